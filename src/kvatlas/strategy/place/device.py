"""Contiguous slots on the device: ``[B, H, capacity, ...]`` for every column, one tile, a view."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvatlas.attention.decode import take_slots
from kvatlas.attention.tiles import TILE, Tile
from kvatlas.strategy.answers import Layout, Place, Shared
from kvatlas.strategy.place.hugepages import zeros
from kvatlas.strategy.place.store import GROWTH, Bytes, Store, put_slots, storage
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column, Selection, Span


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
        self.data = {c.name: self._empty(c.name, layout.capacity) for c in self._columns()}
        self._rows = torch.arange(layout.rows, device=layout.device).unsqueeze(1)
        self._heads = torch.arange(layout.kv_heads, device=layout.device).unsqueeze(0)

    def _columns(self) -> Sequence[Column]:
        """The columns that are held as tensors ``[B, H, capacity, ...]``."""
        return self.layout.columns

    def _empty(self, name: str, capacity: int) -> Tensor:
        spec, layout = self._spec(name), self.layout
        shape = (len(self.lengths), layout.kv_heads, capacity, *spec.tail)
        # Zeros, not garbage: a weight of 0 times a NaN would be a NaN.
        return zeros(shape, spec.dtype, self._device(name))

    def _spec(self, name: str) -> Column:
        return next(c for c in self.layout.columns if c.name == name)

    def _device(self, name: str) -> torch.device:
        return self.layout.device

    def _ensure(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        roomy = max(capacity, self.capacity + max(GROWTH, self.capacity // 8))
        self._resize(roomy if self.most is None else max(capacity, min(roomy, self.most)))

    def _resize(self, capacity: int) -> None:
        for name, old in list(self.data.items()):  # one column at a time, so the peak is one column's copy
            new = self._empty(name, capacity)
            new[:, :, : old.shape[2]] = old
            self.data[name] = new
        self.capacity = capacity

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
        filled = self.filled + 1 if self.most is None else min(self.filled + 1, self.most)
        self._ensure(filled)
        self.filled = filled
        uniform = not (self.ragged or self.holes)
        slots = self._advance()
        for name, column in self.data.items():
            value = values.get(name, 0)
            if uniform:
                column[:, :, filled - 1] = value
            else:
                value = value.to(column.device) if isinstance(value, Tensor) else value
                column[self._at(slots, column.device)] = value
        return slots

    def _at(self, slots: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Slots ``[B, H]`` as an index into a column there."""
        return self._rows.to(device), self._heads.to(device), slots.to(device)

    def column(self, name: str) -> Tensor:
        return self.data[name][:, :, : self.filled]

    def take(self, name: str, slots: Tensor) -> Tensor:
        column = self.data[name]
        return take_slots(column, slots.to(column.device)).to(self.layout.device)

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        put_slots(self.data[name], slots, values)

    def keys(self) -> Tensor:
        return self.layout.encode.decode({n: self.column(n) for n in self._needs()})[0]

    def _payload(self) -> list[str]:
        return [c.name for c in self.layout.columns if c.kind == "payload"]

    def tiles(self, selection: Selection | None, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        lengths = self.lengths if self.ragged else None
        values = {n: self.column(n) for n in self._needs()}
        pos = self.column("pos") if "pos" in self.data else None
        return tiles_of(self.layout, values, lengths, selection, spans, pos)

    def row_tiles(self, row: int, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        values = {n: c.unsqueeze(0) for n, c in self.row_columns(row).items()}
        if next(iter(values.values())).shape[2] == 0:
            return iter(())
        needed = {n: values[n] for n in self._needs()}
        return tiles_of(self._row_layout(row), needed, None, None, spans, values.get("pos"))

    def compact(self) -> None:
        if not self.holes:
            return
        hole, last = self.next, self.lengths - 1
        gap = hole < self.lengths  # rows without a hole have next == lengths
        target = torch.where(gap, hole, last)
        for column in self.data.values():
            column[self._at(target, column.device)] = column[self._at(last, column.device)]
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
        return self._count(storage(self.data), "device")


def tiles_of(
    layout: Layout,
    values: Mapping[str, Tensor],
    lengths: Tensor | None,
    selection: Selection | None,
    spans: Sequence[Span] | None,
    positions: Tensor | None = None,
) -> Iterator[Tile]:
    """Tiles of contiguous columns ``[B, H, n, ...]``.

    Raw and packed ones are views, one tile a span; what has no fused form is decoded a tile at a time.
    """
    if selection is not None:
        yield from _selected(layout, values, selection)
        return
    n = next(iter(values.values())).shape[2]
    whole = layout.encode.raw or layout.encode.packed(values) is not None
    for span in spans or (Span(0, None, None),):
        stop = n if span.stop is None else min(n, span.stop)
        step = max(1, stop - span.start) if whole else TILE
        for start in range(span.start, stop, step):
            end = min(stop, start + step)
            tile = _tile(layout, {name: column[:, :, start:end] for name, column in values.items()})
            tile.lengths = None if lengths is None else (lengths - start).clamp(0, end - start)
            tile.query_at = None if span.query_at is None else span.query_at.view(tile.k.shape[0], -1)
            tile.positions = None if positions is None else positions[:, :, start:end]
            yield tile


def _tile(layout: Layout, values: Mapping[str, Tensor]) -> Tile:
    packed = layout.encode.packed(values)
    if packed is not None:
        return Tile(packed.k, packed.v, packed=packed)
    return Tile(*layout.encode.decode(values))


def _selected(layout: Layout, values: Mapping[str, Tensor], selection: Selection) -> Iterator[Tile]:
    """A tile a set of slots, chosen in place; what has no fused form is gathered and decoded a tile at a time."""
    whole = _tile(layout, values) if layout.encode.raw or layout.encode.packed(values) is not None else None
    for part in selection.parts():
        query_at = None if part.query_at is None else part.query_at.view(-1, 1)
        if whole is not None:
            yield replace(whole, index=part.index, count=part.count, query_at=query_at)
            continue
        for start in range(0, part.index.shape[-1], TILE):
            index = part.index[..., start : start + TILE]
            tile = _tile(layout, {name: take_slots(column, index) for name, column in values.items()})
            yield replace(tile, lengths=(part.count - start).clamp(0, index.shape[-1]), query_at=query_at)


register(Preset("full", {}, "keep all, read all: the baseline"))
