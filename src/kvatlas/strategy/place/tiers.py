"""A store whose payload lies in several tiers, one run of slots after the other; metadata is on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvatlas.attention.choose import move
from kvatlas.attention.decode import take_slots
from kvatlas.attention.tiles import TILE
from kvatlas.strategy.answers import Layout
from kvatlas.strategy.place.fetch import Arrive, FetchingStore, Run, after, cut, staged
from kvatlas.strategy.place.link import Link
from kvatlas.strategy.place.store import Bytes, payload, put_slots, storage
from kvatlas.strategy.view import Column, Selection

Values = dict[str, Tensor]


class Segment(ABC):
    """The payload of some consecutive slots. Slots count from its own start; those outside are left out."""

    tier: str
    here: bool = False
    """It can be read where it is."""

    def __init__(self, layout: Layout, slots: int, link: Link) -> None:
        self.layout, self.slots, self.link = layout, slots, link

    @abstractmethod
    def load(self, row: int, start: int, values: Mapping[str, Tensor]) -> None:
        """A sequence's ``[H, n, ...]`` of every column, from slot ``start`` on."""

    @abstractmethod
    def put(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        """One token per sequence and KV head: ``slots [B, H]``, ``[B, H, ...]`` of every column."""

    @abstractmethod
    def take(self, slots: Tensor) -> Values:
        """Every column at ``slots [B, H, m]``, on the device; anything for those outside."""

    @abstractmethod
    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        """Overwrite a column at ``slots [B, H, m]`` by ``[B, H, m, ...]``."""

    @abstractmethod
    def row(self, row: int, stop: int) -> Values:
        """A sequence's first ``stop`` slots ``[H, stop, ...]``, on the device."""

    @abstractmethod
    def fetch(self, start: int, stop: int, lengths: Tensor, ahead: bool) -> Arrive:
        """Start to bring slots ``start .. stop - 1``; ``lengths [B, H]`` are filled."""

    def at(self, start: int, stop: int) -> Values:
        """Slots ``start .. stop - 1`` where they are, as views."""
        raise NotImplementedError

    def bring(self, part: Selection, head: int, ahead: bool) -> Arrive | None:
        """Start to bring a selection in a way of its own, after ``head`` free places. None: there is none."""
        return None

    @abstractmethod
    def resize(self, slots: int) -> None:
        """Have room for so many."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep, reorder or repeat sequences; nothing has changed when it fails."""

    @abstractmethod
    def bytes(self, tokens: int, lengths: Tensor, hole: Tensor) -> Bytes:
        """What it holds, with so many tokens (of one KV head each).

        ``lengths [B, H]`` slots are filled, and of those ``hole [B, H]`` is free (-1: none).
        """

    def busy(self) -> bool:
        """An append has something to write first."""
        return False

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Write it."""


class Tensors(Segment):
    """Payload in tensors: on the device, or in host memory (pinned, where the device is CUDA)."""

    def __init__(self, layout: Layout, slots: int, link: Link, tier: Literal["device", "host"]) -> None:
        super().__init__(layout, slots, link)
        self.tier = tier
        self.device = layout.device if tier == "device" else torch.device("cpu")
        self.here = tier == "device" or not link.moves(layout.device)
        self.data = {c.name: self._empty(c, layout.rows, slots) for c in payload(layout.columns)}

    def _empty(self, column: Column, rows: int, slots: int) -> Tensor:
        shape = (rows, self.layout.kv_heads, slots, *column.tail)
        pinned = self.device != self.layout.device
        return torch.zeros(shape, dtype=column.dtype, device=self.device, pin_memory=pinned)

    def load(self, row: int, start: int, values: Mapping[str, Tensor]) -> None:
        for name, column in self.data.items():
            column[row, :, start : start + values[name].shape[1]] = values[name].to(self.device)

    def put(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        for name in self.data:
            self.write(name, slots.unsqueeze(-1), values[name].unsqueeze(2))

    def take(self, slots: Tensor) -> Values:
        at = slots.to(self.device)
        return {name: take_slots(column, at).to(self.layout.device) for name, column in self.data.items()}

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        put_slots(self.data[name], torch.where(slots < self.slots, slots, -1), values)

    def row(self, row: int, stop: int) -> Values:
        return {name: column[row, :, :stop].to(self.layout.device) for name, column in self.data.items()}

    def at(self, start: int, stop: int) -> Values:
        if self.tier == "host":
            token = len(self.data[next(iter(self.data))]) * self.layout.kv_heads * self.layout.slot_bytes("payload")
            self.link.count(-(-(stop - start) // TILE), (stop - start) * token)
        return {name: column[:, :, start:stop] for name, column in self.data.items()}

    def fetch(self, start: int, stop: int, lengths: Tensor, ahead: bool) -> Arrive:
        sources = {name: column[:, :, start:stop] for name, column in self.data.items()}
        buffers = staged(self.link, self.layout, "tile", stop - start, min(TILE, self.slots))
        wait = self.link.start(lambda: sum(move(buffers[n], sources[n]) for n in sources), self.layout.device, ahead)
        return after(wait, buffers)

    def resize(self, slots: int) -> None:
        columns = {c.name: c for c in payload(self.layout.columns)}
        for name, old in list(self.data.items()):
            new = self._empty(columns[name], len(old), slots)
            kept = min(slots, old.shape[2])
            new[:, :, :kept] = old[:, :, :kept]
            self.data[name] = new
        self.slots = slots

    def select(self, rows: Tensor) -> None:
        self.data = {name: column.index_select(0, rows.to(self.device)) for name, column in self.data.items()}

    def bytes(self, tokens: int, lengths: Tensor, hole: Tensor) -> Bytes:
        size = sum(column.untyped_storage().nbytes() for column in self.data.values())
        used = tokens * self.layout.slot_bytes("payload")
        if self.tier == "device":
            return Bytes(device_payload=used, device_padding=size - used)
        return Bytes(host_payload=used, host_padding=size - used)


class TieredStore(FetchingStore):
    """Segments of slots, the first slots in the first one; the last one grows."""

    def __init__(self, layout: Layout, segments: Sequence[Segment], link: Link) -> None:
        self.segments = list(segments)
        super().__init__(layout, link)

    def _columns(self) -> Sequence[Column]:
        return [c for c in self.layout.columns if c.kind == "metadata"]

    def _placed(self) -> Iterator[tuple[int, Segment]]:
        """Segments and where they start."""
        start = 0
        for segment in self.segments:
            if segment.slots:
                yield start, segment
            start += segment.slots

    # --------------------------------------------------------------------- writing

    def extend(self, row: int, values: Mapping[str, Tensor]) -> None:
        self.forget_ahead()
        start, n = int(self.lengths[row, 0]), next(iter(values.values())).shape[1]
        self._ensure(start + n)
        for at, segment in self._placed():
            first, stop = max(start, at), min(start + n, at + segment.slots)
            if first < stop:
                part = slice(first - start, stop - start)
                segment.load(row, first - at, {name: values[name][:, part] for name in self._payload()})
        super().extend(row, values)

    def append(self, values: Mapping[str, Tensor]) -> Tensor:
        for segment in self.segments:
            if segment.busy():
                self._arrive_all()
                segment.settle()
        slots = super().append(values)
        for at, segment in self._placed():
            segment.put(slots - at, values)
        return slots

    def _arrive_all(self) -> None:
        """What is being read is complete before anything is written."""
        for fetched in self._ahead:
            fetched.arrive()
        if self._foreseen is not None:
            self._foreseen[1]()

    def take(self, name: str, slots: Tensor) -> Tensor:
        if name in self.data:
            return super().take(name, slots)
        return self._taken(slots)[name]

    def _taken(self, slots: Tensor) -> Values:
        """Every payload column at ``slots [B, H, m]``."""
        parts = [(at, s, s.take((slots - at).clamp(0, s.slots - 1))) for at, s in self._placed()]
        out = parts[0][2]
        for at, _, values in parts[1:]:
            for name, column in values.items():
                inside = (slots >= at).view(*slots.shape, *(1 for _ in column.shape[3:]))
                out[name] = torch.where(inside, column, out[name])
        return out

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        if name in self.data:
            super().write(name, slots, values)
            return
        self.forget_ahead()
        self._overwrite(name, slots, values)

    def _overwrite(self, name: str, slots: Tensor, values: Tensor) -> None:
        for at, segment in self._placed():
            segment.write(name, slots - at, values)

    def compact(self) -> None:
        if self.holes:
            self.forget_ahead()
            last = self.lengths - 1
            target = torch.where(self.next < self.lengths, self.next, -1).unsqueeze(-1)
            moved = self._taken(last.clamp(min=0).unsqueeze(-1))
            for name, values in moved.items():
                self._overwrite(name, target, values)
        super().compact()

    def _resize(self, capacity: int) -> None:
        last = self.segments[-1]
        last.resize(last.slots + capacity - self.capacity)
        super()._resize(capacity)

    def select_rows(self, rows: Tensor) -> None:
        self.forget_ahead()
        for segment in self.segments:
            segment.select(rows)
        super().select_rows(rows)
        for segment in self.segments:
            segment.layout = self.layout

    # --------------------------------------------------------------------- reading

    def column(self, name: str) -> Tensor:
        if name in self.data:
            return super().column(name)
        rows = [self._row_payload(row, self.filled)[name] for row in range(len(self.lengths))]
        return torch.stack(rows)

    def _row_payload(self, row: int, stop: int) -> Values:
        parts = [s.row(row, min(stop - at, s.slots)) for at, s in self._placed() if at < stop]
        if not parts:
            return {c.name: self._nothing(c) for c in payload(self.layout.columns)}
        return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}

    def _nothing(self, column: Column) -> Tensor:
        return torch.zeros(self.layout.kv_heads, 0, *column.tail, dtype=column.dtype, device=self.layout.device)

    def row_columns(self, row: int) -> Values:
        n = int(self.lengths[row, 0])
        values = super().row_columns(row) | self._row_payload(row, n)
        return {c.name: values[c.name] for c in self.layout.columns}

    def _runs(self, stop: int) -> list[Run]:
        runs = []
        for at, segment in self._placed():
            end = min(stop, at + segment.slots)
            if segment.here and end > at:
                runs.append(Run(at, end, True))
            elif end > at:
                runs += [Run(a, b, False) for a, b in cut(at, end)]
        return runs

    def _of(self, slot: int) -> tuple[int, Segment]:
        return next((at, s) for at, s in self._placed() if at <= slot < at + s.slots)

    def _here(self, run: Run) -> Values:
        at, segment = self._of(run.start)
        return segment.at(run.start - at, run.stop - at)

    def _fetch(self, run: Run, ahead: bool) -> Arrive:
        at, segment = self._of(run.start)
        lengths = (self.lengths - at).clamp(0, segment.slots)
        return segment.fetch(run.start - at, run.stop - at, lengths, ahead)

    def _bring(self, part: Selection, head: int, ahead: bool) -> Arrive:
        placed = list(self._placed())
        if len(placed) == 1:
            arrive = placed[0][1].bring(part, head, ahead)
            if arrive is not None:
                return arrive
        most = self.layout.limit(self.capacity) if self.layout.limit is not None else self.capacity
        buffers = staged(self.link, self.layout, "selection", part.index.shape[2] + head, most + 1)

        def copy() -> int:
            for name, values in self._taken(part.index).items():
                buffers[name][:, :, head:] = values
            return self._far(part) * self.layout.slot_bytes("payload")

        return after(self.link.start(copy, self.layout.device, ahead), buffers)

    def _far(self, part: Selection) -> int:
        """How many of the chosen slots are not on the device."""
        counted = torch.arange(part.index.shape[2], device=part.index.device) < part.count.unsqueeze(-1)
        near = torch.zeros_like(counted)
        for at, segment in self._placed():
            if segment.tier == "device":
                near |= (part.index >= at) & (part.index < at + segment.slots)
        return int((counted & ~near).sum())

    def _all_here(self) -> Values | None:
        placed = list(self._placed())
        if len(placed) != 1 or not isinstance(placed[0][1], Tensors) or not placed[0][1].here:
            return None
        return dict(placed[0][1].data)

    def _note_chosen(self, part: Selection) -> None:
        far = self._far(replace(part, index=part.foreseen.index, count=part.foreseen.count) if part.foreseen else part)
        if far:
            self.link.count(1, far * self.layout.slot_bytes("payload"))

    # ----------------------------------------------------------------------- bytes

    def bytes(self) -> Bytes:
        held = self._count(storage(self.data), "device")
        hole = torch.where(self.next < self.lengths, self.next, -1)
        for at, segment in self._placed():
            lengths = (self.lengths - at).clamp(0, segment.slots)
            inside = (hole >= at) & (hole < at + segment.slots)
            tokens = int(lengths.sum()) - int(inside.sum())
            held += segment.bytes(tokens, lengths, torch.where(inside, hole - at, -1))
        return held
