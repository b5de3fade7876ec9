"""Keys and values that sequences and caches hold together: slots, each with a count of its holders, found by text."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import count, islice, takewhile
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from kvatlas.strategy.answers import Layout
from kvatlas.strategy.place.blocks import block_texts
from kvatlas.strategy.place.link import Link
from kvatlas.strategy.place.store import payload

BLOCK = 16
"""Tokens of a prompt that are found together: those after its last full block are never shared."""
SLOT = 8
"""Bytes that the pool's books need for a slot: two int32."""


class Member:
    """What a store holds of a pool: ``map [B, H, capacity]`` int32 from its slots to the pool's, -1 where it has none.

    The pool keeps it, not the store, so that a pool that renumbers its slots reaches maps of stores that are just gone.
    """

    def __init__(self, rows: int, heads: int, capacity: int) -> None:
        self.map = torch.full((rows, heads, capacity), -1, dtype=torch.int32)
        self.gone = False

    def leave(self) -> None:
        """The store is gone. Only noted here, for this may come in the middle of anything."""
        self.gone = True


class Pool:
    """One layer's slots, those of all its KV heads: ``[slots, ...]`` host tensors, one a payload column.

    ``refs [slots]`` int32 counts the places in the members' maps that name a slot; 0 is free. ``home [slots]`` int32
    says which token of which text a slot holds, where it can be found by that, -1 elsewhere (of free slots it says
    nothing). A slot that is named twice or can be found is never written again.
    """

    def __init__(self, layout: Layout) -> None:
        self.heads, self.pinned = layout.kv_heads, layout.device.type == "cuda"
        self.data = {c.name: torch.zeros(0, *c.tail, dtype=c.dtype) for c in payload(layout.columns)}
        self.refs = torch.zeros(0, dtype=torch.int32)
        self.home = torch.zeros(0, dtype=torch.int32)
        self.members: list[Member] = []
        self.lock = RLock()
        self._numbers: dict[bytes, int] = {}  # of the texts that end a block
        self._freed = False

    def join(self, member: Member) -> Member:
        """One more store holds slots of this pool."""
        self.members.append(member)
        return member

    # -------------------------------------------------------------------- slots

    def settle(self) -> None:
        """Free what stores held that are gone; give memory back when more than a quarter of the slots are free.

        Slots get other numbers then, in all maps: none may be in use while this is called.
        """
        for member in [m for m in self.members if m.gone]:
            self.mention(member.map[member.map >= 0], -1)
            self.members.remove(member)
        if self._freed:
            self._freed = False
            live = self.refs > 0
            if int(live.sum()) < 3 * len(live) // 4:
                self._keep(live)

    def _keep(self, live: Tensor) -> None:
        number = live.cumsum(0, dtype=torch.int32) - 1
        for name, column in list(self.data.items()):  # one at a time, so the peak is one column's copy
            self.data[name] = self._placed(column[live])
        self.refs, self.home = self.refs[live], self.home[live]
        for member in self.members:
            held = member.map >= 0
            member.map[held] = number[member.map[held].long()]

    def take(self, n: int, home: Tensor | None = None, exact: bool = True) -> Tensor:
        """Numbers ``[n]`` int64 of free slots, each named once now; ``exact``: no more room is made than is needed."""
        free = (self.refs == 0).nonzero().view(-1)[:n]
        if (short := n - len(free)) > 0:
            had = len(self.refs)
            self._grow(had + (short if exact else max(short, had // 8)))
            free = torch.cat([free, torch.arange(had, had + short)])
        self.refs[free] = 1
        self.home[free] = -1 if home is None else home
        return free

    def _grow(self, slots: int) -> None:
        for name, old in list(self.data.items()):
            new = self._placed(torch.zeros(slots, *old.shape[1:], dtype=old.dtype))
            new[: len(old)] = old
            self.data[name] = new
        more = slots - len(self.refs)
        self.refs = torch.cat([self.refs, self.refs.new_zeros(more)])
        self.home = torch.cat([self.home, self.home.new_full((more,), -1)])

    def _placed(self, column: Tensor) -> Tensor:
        return column.pin_memory() if self.pinned else column

    def mention(self, slots: Tensor, change: int | Tensor) -> None:
        """Slots are named by so many places more (or fewer), ``change`` being one number or one each."""
        if not isinstance(change, Tensor):
            change = torch.full(slots.shape, change)
        self.refs.index_add_(0, slots.long().reshape(-1), change.reshape(-1).int())
        self._freed = self._freed or bool((change < 0).any())

    def write(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        """Columns ``[..., *tail]`` of the tokens in ``slots [...]``; what is not payload is left out."""
        for name, column in self.data.items():
            if name in values:
                column[slots] = values[name].to(column.device, column.dtype)

    def bound(self, slots: Tensor) -> Tensor:
        """Which of these slots cannot be written: others hold them too, or may find them."""
        return (self.refs[slots] > 1) | (self.home[slots] >= 0)

    # ------------------------------------------------------------------ by text

    def homes(self, texts: Sequence[bytes], positions: Tensor) -> Tensor:
        """``home`` of tokens at ``positions [H, n]`` of a prompt whose full blocks end ``texts``; -1 past those."""
        numbers = torch.tensor(self._numbered(texts))
        block = positions // BLOCK
        heads = torch.arange(self.heads).unsqueeze(1)
        at = (numbers[block.clamp(max=len(texts) - 1)] * self.heads + heads) * BLOCK + positions % BLOCK
        return torch.where(block < len(texts), at, -1).int()

    def _numbered(self, texts: Sequence[bytes]) -> list[int]:
        if any(text not in self._numbers for text in texts):
            found = self.home[(self.refs > 0) & (self.home >= 0)] // (self.heads * BLOCK)
            alive = set(found.unique().tolist())
            self._numbers = {text: number for text, number in self._numbers.items() if number in alive}
            new = [text for text in texts if text not in self._numbers]
            free = (number for number in count() if number not in alive)
            self._numbers.update(zip(new, islice(free, len(new))))
        return [self._numbers[text] for text in texts]

    def find(self, home: Tensor) -> Tensor:
        """Slots ``[H, n]`` int64 that hold the tokens of ``home [H, n]``; -1 where none does."""
        live = ((self.refs > 0) & (self.home >= 0)).nonzero().view(-1)
        held = self.home[live].long()
        size = 1 + max(int(held.max()) if len(held) else 0, int(home.max()) if home.numel() else 0, 0)
        table = torch.full((size,), -1)
        table[held] = live
        return torch.where(home >= 0, table[home.clamp(min=0).long()], -1)

    # -------------------------------------------------------------------- bytes

    def paid_by(self, member: Member) -> Tensor:
        """``[slots]`` bool: what is counted as this member's: a slot is its oldest holder's, free ones the oldest's."""
        paid = self.named(member.map[member.map >= 0])
        for older in takewhile(lambda other: other is not member, self.members):
            paid &= ~self.named(older.map[older.map >= 0])
        return paid | (self.refs == 0) if self.members[0] is member else paid

    def named(self, slots: Tensor) -> Tensor:
        """``[slots]`` bool: those of these numbers."""
        mask = torch.zeros(len(self.refs), dtype=torch.bool)
        mask[slots.long()] = True
        return mask


class Pools:
    """The pools of all layers: what the caches of one model under one strategy hold together."""

    def __init__(self) -> None:
        self._by_layer: dict[int, Pool] = {}

    def of(self, layout: Layout) -> Pool:
        """The pool of a layer."""
        if layout.layer not in self._by_layer:
            self._by_layer[layout.layer] = Pool(layout)
        return self._by_layer[layout.layer]


class PooledLink(Link):
    """A link whose stores hold slots of pools, and the texts of the prompts that are coming in."""

    def __init__(self, overlap: bool, speed: float | None) -> None:
        super().__init__(overlap, speed)
        self.pools = Pools()
        self._texts: dict[int, list[bytes]] = {}

    def join(self, alive: MutableMapping[Any, Any], key: object) -> None:
        self.pools = alive.setdefault(key, self.pools)

    def announce(self, row: int, ids: Sequence[int]) -> None:
        self._texts[row] = list(block_texts(list(ids), BLOCK))

    def texts(self, row: int) -> list[bytes]:
        """A digest of all the text up to the end of each full block of the prompt that is coming in."""
        return self._texts.get(row, [])

    def forget(self) -> None:
        """Sequences have other numbers now."""
        self._texts.clear()
