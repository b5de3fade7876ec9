"""Contiguous slots on the device: ``[B, H, capacity, ...]`` for every column, one tile, a view."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvatlas.attention.decode import take_slots
from kvatlas.attention.tiles import TILE, Tile
from kvatlas.strategy.answers import Column, Layout, Place, Selection, Shared, Span
from kvatlas.strategy.place.store import GROWTH, Bytes, Store
from kvatlas.strategy.registry import Preset, register


@dataclass(frozen=True)
class Device(Place):
    """One buffer a column."""

    def words(self) -> str:
        return "device, contiguous slots"

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        return SlotStore(layout)


class SlotStore(Store):
    """An evicting cache overwrites a slot; a growing one is enlarged by an eighth now and then."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.capacity = layout.capacity
        self.data = {c.name: self._empty(c.name, layout.capacity) for c in layout.columns}
        self._rows = torch.arange(layout.rows, device=layout.device).unsqueeze(1)
        self._heads = torch.arange(layout.kv_heads, device=layout.device).unsqueeze(0)

    def _empty(self, name: str, capacity: int) -> Tensor:
        spec, layout = self._spec(name), self.layout
        shape = (len(self.lengths), layout.kv_heads, capacity, *spec.tail)
        # Zeros, not garbage: a weight of 0 times a NaN would be a NaN. The pages cost nothing until they are written.
        return torch.zeros(shape, dtype=spec.dtype, device=self._device(name))

    def _spec(self, name: str) -> Column:
        return next(c for c in self.layout.columns if c.name == name)

    def _device(self, name: str) -> torch.device:
        return self.layout.device

    def _ensure(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        roomy = max(capacity, self.capacity + max(GROWTH, self.capacity // 8))
        self.capacity = roomy if self.most is None else max(capacity, min(roomy, self.most))
        for name, old in list(self.data.items()):  # one column at a time, so the peak is one column's copy
            new = self._empty(name, self.capacity)
            new[:, :, : old.shape[2]] = old
            self.data[name] = new

    def extend(self, row: int, values: Mapping[str, Tensor]) -> None:
        start, n = int(self.lengths[row, 0]), next(iter(values.values())).shape[1]
        self._ensure(start + n)
        for name, column in self.data.items():
            column[row, :, start : start + n] = values[name].to(column.device) if name in values else 0
        self._recount(row, start + n)

    def load(self, row: int, values: Mapping[str, Tensor]) -> None:
        self.lengths[row] = 0
        self.extend(row, values)

    def row_columns(self, row: int) -> dict[str, Tensor]:
        n = int(self.lengths[row, 0])
        return {name: column[row, :, :n] for name, column in self.data.items()}

    def append(self, values: Mapping[str, Tensor]) -> Tensor:
        # once a sequence holds ``most``, each new token fills the hole of another
        self.filled = self.filled + 1 if self.most is None else min(self.filled + 1, self.most)
        self._ensure(self.filled)
        uniform = not (self.ragged or self.holes)
        slots = self._advance()
        at = (slice(None), slice(None), self.filled - 1) if uniform else (self._rows, self._heads, slots)
        for name, column in self.data.items():
            column[at] = values.get(name, 0)
        return slots

    def column(self, name: str) -> Tensor:
        return self.data[name][:, :, : self.filled]

    def keys(self) -> Tensor:
        return self.layout.encode.decode({n: self.column(n) for n in self._payload()})[0]

    def _payload(self) -> list[str]:
        return [c.name for c in self.layout.columns if c.kind == "payload"]

    def tiles(self, selection: Selection | None, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        lengths = self.lengths if self.ragged else None
        values = {n: self.column(n) for n in self._payload()}
        pos = self.column("pos") if "pos" in self.data else None
        return tiles_of(self.layout, values, lengths, selection, spans, pos)

    def row_tiles(self, row: int, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        values = {n: c.unsqueeze(0) for n, c in self.row_columns(row).items()}
        if next(iter(values.values())).shape[2] == 0:
            return iter(())
        return tiles_of(self.layout, values, None, None, spans, values.get("pos"))

    def compact(self) -> None:
        if not self.holes:
            return
        hole, last = self.next, self.lengths - 1
        gap = hole < self.lengths  # rows without a hole have next == lengths
        target = torch.where(gap, hole, last)
        for column in self.data.values():
            column[self._rows, self._heads, target] = column[self._rows, self._heads, last]
        self.lengths = torch.where(gap, last, self.lengths)
        self.next, self.holes = self.lengths, False
        self.filled = int(self.lengths.max())
        self.ragged = bool((self.lengths != self.filled).any())

    def select_rows(self, rows: Tensor) -> None:
        self._select_lengths(rows)
        self._rows = torch.arange(len(rows), device=self.layout.device).unsqueeze(1)
        self.layout = replace(self.layout, rows=len(rows))
        for name, column in list(self.data.items()):
            self.data[name] = column.index_select(0, rows.to(column.device))

    def bytes(self) -> Bytes:
        return self._count(self.data, "device")


def tiles_of(
    layout: Layout,
    values: Mapping[str, Tensor],
    lengths: Tensor | None,
    selection: Selection | None,
    spans: Sequence[Span] | None,
    positions: Tensor | None = None,
) -> Iterator[Tile]:
    """Tiles of contiguous columns ``[B, H, n, ...]``: raw ones are views, encoded ones are decoded a tile at a time."""
    n = next(iter(values.values())).shape[2]
    if selection is not None:
        yield from _selected(layout, values, selection)
        return
    for span in spans or (Span(0, None, None),):
        stop = n if span.stop is None else min(n, span.stop)
        step = max(1, stop - span.start) if layout.encode.raw else TILE
        for start in range(span.start, stop, step):
            end = min(stop, start + step)
            k, v = layout.encode.decode({name: values[name][:, :, start:end] for name in values if name != "pos"})
            yield Tile(
                k,
                v,
                None if lengths is None else (lengths - start).clamp(0, end - start),
                query_at=None if span.query_at is None else span.query_at.view(k.shape[0], -1),
                positions=None if positions is None else positions[:, :, start:end],
            )


def _selected(layout: Layout, values: Mapping[str, Tensor], selection: Selection) -> Iterator[Tile]:
    if layout.encode.raw:
        k, v = layout.encode.decode(values)
        yield Tile(k, v, index=selection.index, count=selection.count)
        return
    for start in range(0, selection.index.shape[-1], TILE):
        index = selection.index[..., start : start + TILE]
        k, v = layout.encode.decode({name: take_slots(values[name], index) for name in values})
        yield Tile(k, v, (selection.count - start).clamp(0, index.shape[-1]))


register(Preset("full", {}, "keep all, read all: the baseline"))
