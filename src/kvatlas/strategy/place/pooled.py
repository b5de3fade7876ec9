"""An archive on the host that holds slots of a pool: what sequences and caches have in common is stored once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from weakref import finalize

import torch
from torch import Tensor

from kvatlas.attention.decode import take_slots
from kvatlas.attention.tiles import Tile
from kvatlas.strategy.answers import Layout
from kvatlas.strategy.place.device import tiles_of
from kvatlas.strategy.place.fetch import Arrive, Run, cut
from kvatlas.strategy.place.host import HostStore
from kvatlas.strategy.place.pool import SLOT, Member, PooledLink
from kvatlas.strategy.place.store import Bytes, Store, payload, storage
from kvatlas.strategy.view import Column, Selection, Span

STEP = 64
"""Slots of its own that a sequence gets at once when those that it began with are full."""


class PooledStore(HostStore):
    """A host store whose payload lies in a pool; a map says in which of its slots.

    To its users it is what a ``HostStore`` is: each sequence has its own slots 0, 1, 2, ... in its own order. Behind
    them a sequence has spare slots of the pool for the tokens to come. All KV heads of a sequence have equally many.
    """

    link: PooledLink

    def __init__(self, layout: Layout, link: PooledLink) -> None:
        super().__init__(layout, link)
        rows, heads, spare = layout.rows, layout.kv_heads, spare_of(layout)
        self.pool = link.pools.of(layout)
        with self.pool.lock:
            self.pool.settle()
            self.member = self.pool.join(Member(rows, heads, layout.capacity))
            self.member.map[:, :, :spare] = self.pool.take(rows * heads * spare).view(rows, heads, spare)
        finalize(self, self.member.leave)

    def _columns(self) -> Sequence[Column]:
        return [c for c in self.layout.columns if c.kind == "metadata"]

    def _resize(self, capacity: int) -> None:
        super()._resize(capacity)
        old = self.member.map
        self.member.map = old.new_full((*old.shape[:2], capacity), -1)
        self.member.map[:, :, : old.shape[2]] = old

    # ------------------------------------------------------------------- prefill

    def extend(self, row: int, values: Mapping[str, Tensor]) -> None:
        with self.pool.lock:
            self.pool.settle()
            heads, n = next(iter(values.values())).shape[:2]
            held = self.pool.take(heads * n).view(heads, n)
            self.pool.write(held, values)
            self._hold(row, held, values)

    def evicted(self, row: int, values: Mapping[str, Tensor], positions: Tensor) -> None:
        """Tokens of a prompt that was announced are held together with whoever has them already."""
        texts = self.link.texts(row)
        if not texts:
            self.extend(row, values)
            return
        with self.pool.lock:
            self.pool.settle()
            home = self.pool.homes(texts, positions.cpu())
            held = self.pool.find(home)
            new = held < 0
            self.pool.mention(held[~new], 1)
            held[new] = self.pool.take(int(new.sum()), home[new])
            self.pool.write(held[new], {name: values[name][new.to(values[name].device)] for name in self._payload()})
            self._hold(row, held, values)

    def adopt(self, other: Store) -> bool:
        if not isinstance(other, PooledStore) or other.pool is not self.pool:
            return False
        with self.pool.lock:
            self.pool.settle()
            for row, n in enumerate(other.lengths[:, 0].tolist()):
                held = other.member.map[row, :, :n].long()
                self.pool.mention(held, 1)
                self._hold(row, held, {name: column[row, :, :n] for name, column in other.data.items()})
            self.ragged = self.ragged or other.ragged
        return True

    def _hold(self, row: int, held: Tensor, values: Mapping[str, Tensor]) -> None:
        """A sequence's next tokens are in ``held [H, n]`` of the pool; spare slots move on, as far as there is room."""
        start = int(self.lengths[row, 0])
        # the slots stand for the columns where a store has no other
        super().extend(row, {**{c.name: values[c.name] for c in self._columns()}, "held": held})
        own = self.member.map[row, :, start:]
        after_it = torch.cat([held.int(), own[:, own[0] >= 0]], 1)
        self.pool.mention(after_it[:, own.shape[1] :], -1)
        after_it = after_it[:, : own.shape[1]]
        own[:, : after_it.shape[1]] = after_it

    def load(self, row: int, values: Mapping[str, Tensor]) -> None:
        with self.pool.lock:
            held = self.member.map[row, :, : int(self.lengths[row, 0])]
            self.pool.mention(held[held >= 0], -1)
            held.fill_(-1)
            self._recount(row, 0)
            self.member.map[row] = self.member.map[row].roll(-held.shape[1], 1)
            self.extend(row, values)

    # -------------------------------------------------------------------- decode

    def append(self, values: Mapping[str, Tensor]) -> Tensor:
        slots = super().append(values)
        with self.pool.lock:
            at = slots.cpu()
            if bool((self._held(at.unsqueeze(-1)) < 0).any()):
                self._more(at)
            rows, heads = torch.meshgrid(*(torch.arange(n) for n in at.shape), indexing="ij")
            self.pool.write(self._own(rows, heads, at, keep=False), values)
        return slots

    def _more(self, at: Tensor) -> None:
        """Spare slots for the sequences that have none at ``at [B, H]``."""
        self.pool.settle()
        short = (self._held(at.unsqueeze(-1)) < 0).flatten(1).any(1).view(-1, 1, 1)
        stop = at.amax(1).view(-1, 1, 1) + STEP
        lack = (self.member.map < 0) & (torch.arange(self.capacity) < stop) & short
        self.member.map[lack] = self.pool.take(int(lack.sum()), exact=False).int()

    def _own(self, rows: Tensor, heads: Tensor, at: Tensor, keep: bool) -> Tensor:
        """The pool's slots of ``at``, to be written: those that others may see are replaced (``keep``: by copies)."""
        held = self.member.map[rows, heads, at].long()
        bound = self.pool.bound(held)
        if bool(bound.any()):
            old, new = held[bound], self.pool.take(int(bound.sum()), exact=False)
            if keep:
                self.pool.write(new, {name: column[old] for name, column in self.pool.data.items()})
            self.pool.mention(old, -1)
            held[bound] = new
            self.member.map[rows, heads, at] = held.int()
        return held

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        if name in self.data:
            super().write(name, slots, values)
            return
        self.forget_ahead()
        rows, heads, i = (slots >= 0).nonzero(as_tuple=True)
        with self.pool.lock:
            held = self._own(rows.cpu(), heads.cpu(), slots[rows, heads, i].cpu(), keep=True)
            self.pool.write(held, {name: values[rows, heads, i]})

    # ------------------------------------------------------------------- reading

    def _held(self, slots: Tensor) -> Tensor:
        """The pool's numbers of ``slots [B, H, m]``; -1 where there is none."""
        return self.member.map.gather(2, slots.clamp(0, self.capacity - 1)).long()

    def _where(self, slots: Tensor) -> Tensor:
        return self._held(slots).clamp(min=0)

    def _source(self, name: str) -> Tensor:
        column = self.pool.data[name]
        return column.expand(*self.lengths.shape, *column.shape)

    def _gathered(self, name: str, start: int, stop: int) -> Tensor:
        if name in self.data:
            return self.data[name][:, :, start:stop]
        return self.pool.data[name][self.member.map[:, :, start:stop].clamp(min=0).long()]

    def column(self, name: str) -> Tensor:
        with self.pool.lock:
            return self._gathered(name, 0, self.filled).to(self.layout.device)

    def take(self, name: str, slots: Tensor) -> Tensor:
        if name in self.data:
            return super().take(name, slots)
        with self.pool.lock:
            return self.pool.data[name][self._where(slots.cpu())].to(self.layout.device)

    def row_columns(self, row: int) -> dict[str, Tensor]:
        n = int(self.lengths[row, 0])
        with self.pool.lock:
            held = self.member.map[row, :, :n].long()
            columns = {name: column[held].to(self.layout.device) for name, column in self.pool.data.items()}
        return columns | {name: column[row, :, :n] for name, column in self.data.items()}

    def tiles(self, selection: Selection | None, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        if selection is None or not self._in_place:
            yield from super().tiles(selection, spans)
            return
        self.link.claim(self)
        for part in selection.parts():
            self._note_chosen(part)
            yield from self._in_pool(part)

    def _in_pool(self, part: Selection) -> Iterator[Tile]:
        """A selection's tiles, read where they are; what is decoded with the help of other columns is gathered."""
        with self.pool.lock:
            at, sources = self._where(part.index), {name: self._source(name) for name in self._payload()}
        beside = self._beside(part.index)
        if not beside:
            return tiles_of(self.layout, sources, None, replace(part, index=at, beside=None), None)
        values = {name: take_slots(column, at) for name, column in sources.items()}
        return tiles_of(self.layout, values | beside, part.count, None, (Span(0, None, part.query_at),))

    def _runs(self, stop: int) -> list[Run]:
        return [Run(a, b, self._in_place) for a, b in cut(0, stop)]  # gathered, so never more than a tile at a time

    def _pieces(self, run: Run) -> dict[str, Tensor]:
        with self.pool.lock:
            return {name: self._gathered(name, run.start, run.stop) for name in self._payload()}

    def _all_here(self) -> dict[str, Tensor] | None:
        return {name: self._source(name) for name in self._payload()} if self._in_place else None

    def _bring(self, part: Selection, head: int, ahead: bool) -> Arrive:
        with self.pool.lock:
            return super()._bring(part, head, ahead)

    # ---------------------------------------------------------------------- rows

    def compact(self) -> None:
        """The slots of the pool that are left over become spare ones."""
        if self.holes:
            last = (self.lengths - 1).cpu()
            hole = torch.where(self.next < self.lengths, self.next, self.lengths - 1).cpu()
            rows, heads = (x.cpu() for x in (self._rows, self._heads))
            with self.pool.lock:
                held = self.member.map
                held[rows, heads, hole], held[rows, heads, last] = held[rows, heads, last], held[rows, heads, hole]
        super().compact()

    def select_rows(self, rows: Tensor) -> None:
        """A sequence that is repeated holds the same slots; spare ones stay with the first."""
        with self.pool.lock:
            self.pool.settle()
            self._select_held(rows.cpu())
            self.pool.settle()
        super().select_rows(rows)
        self.link.forget()

    def _select_held(self, rows: Tensor) -> None:
        held = self.member.map
        filled = torch.arange(self.capacity) < self.lengths.cpu().unsqueeze(-1)
        times = rows.bincount(minlength=len(held)).view(-1, 1, 1)
        change = torch.where(filled, times - 1, times.clamp(max=1) - 1)
        self.pool.mention(held[held >= 0], change[held >= 0])
        again = (rows.unsqueeze(1) == rows).tril(-1).any(1).view(-1, 1, 1)
        self.member.map = held[rows].masked_fill(again & ~filled[rows], -1)

    # --------------------------------------------------------------------- bytes

    def bytes(self) -> Bytes:
        """The slots of the pool that are counted as this store's (``Pool.paid_by``), its map and its metadata."""
        with self.pool.lock:
            self.pool.settle()
            held, paid = self.member.map, self.pool.paid_by(self.member)
            at = torch.arange(self.capacity)
            lengths, hole = self.lengths.cpu().unsqueeze(-1), self.next.cpu().unsqueeze(-1)
            filled = self.pool.named(held[(at < lengths) & (at != hole)])
            slots, tokens = int(paid.sum()), int((paid & filled).sum())
        size = self.layout.slot_bytes("payload")
        return self._count(storage(self.data), "host") + Bytes(
            host_payload=tokens * size, host_padding=(slots - tokens) * size, host_metadata=slots * SLOT + held.nbytes
        )


def spare_of(layout: Layout) -> int:
    """Slots for tokens to come that each sequence begins with."""
    return layout.capacity - max(layout.expected, default=0)


def pooled_bytes(layout: Layout) -> int:
    """Bytes of a store's slots, books and map in closed form where nothing is shared."""
    slots = layout.kv_heads * (sum(layout.expected) + layout.rows * spare_of(layout))
    mapped = layout.rows * layout.kv_heads * layout.capacity
    size = sum(c.slot_bytes() for c in payload(layout.columns))
    return slots * (size + SLOT) + mapped * (4 + layout.slot_bytes("metadata"))
