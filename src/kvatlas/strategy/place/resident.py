"""Which blocks of a host store are on the device, and which of them leave when others enter."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvatlas.attention.choose import move
from kvatlas.strategy.answers import Layout
from kvatlas.strategy.place.store import payload, put_slots
from kvatlas.strategy.view import Selection

AGE = 64
"""Steps after which counts are halved, lest a block live on what it once was."""


class Resident:
    """Device copies of blocks of slots, chosen for each sequence and KV head by itself.

    Args:
        layout: of the store; where nothing selects, there are no blocks.
        capacity: its slots.
        tokens: slots to hold a copy of.
        block: slots of a block.
        policy: ``lfu`` or ``lru``.
        topk: blocks that may enter at a step.

    Attributes:
        active: something selects.
        data: payload columns ``[B, H, places * block, ...]``.
        table: ``[B, H, places]`` int64, the block in each place or -1.
        place: ``[B, H, blocks]`` int64, the place of each block or -1.
        use: ``[B, H, blocks]`` int64, how often (lfu) or when last (lru) a block was among the ``topk``.
    """

    def __init__(
        self, layout: Layout, capacity: int, tokens: int, block: int, policy: Literal["lfu", "lru"], topk: int
    ) -> None:
        self.block, self.policy, self.topk, self._tokens, self._steps = block, policy, topk, tokens, 0
        self.active = layout.limit is not None
        shape = (layout.rows, layout.kv_heads)
        self.table = torch.full((*shape, 0), -1, dtype=torch.int64, device=layout.device)
        self.place, self.use = self.table.clone(), self.table.clone()
        self.data = {
            c.name: torch.zeros(*shape, 0, *c.tail, dtype=c.dtype, device=layout.device)
            for c in payload(layout.columns)
        }
        self.grow(capacity)

    @staticmethod
    def bytes_of(layout: Layout, tokens: int, block: int) -> int:
        """``bytes()`` in closed form."""
        if layout.limit is None:
            return 0
        blocks = -(-layout.capacity // block)
        places = min(tokens // block, blocks)
        return layout.rows * layout.kv_heads * (places * (block * layout.slot_bytes("payload") + 8) + 16 * blocks)

    def grow(self, capacity: int) -> None:
        """The store has so many slots now."""
        if not self.active:
            return
        blocks = -(-capacity // self.block)
        places = min(self._tokens // self.block, blocks)
        self.place = pad(self.place, (0, blocks - self.place.shape[2]), value=-1)
        self.use = pad(self.use, (0, blocks - self.use.shape[2]))
        self.table = pad(self.table, (0, places - self.table.shape[2]), value=-1)
        for name, old in self.data.items():
            new = old.new_zeros(*old.shape[:2], places * self.block, *old.shape[3:])
            new[:, :, : old.shape[2]] = old
            self.data[name] = new

    # -------------------------------------------------------------- what is there

    def find(self, slots: Tensor) -> Tensor:
        """Where ``slots [B, H, n]`` are in ``data``, -1 for nowhere."""
        if not self.active:
            return torch.full_like(slots, -1)
        block = slots.div(self.block, rounding_mode="floor")
        place = self.place.gather(-1, block.clamp(0, self.place.shape[2] - 1))
        return torch.where((place < 0) | (slots < 0), -1, (place - block) * self.block + slots)

    def read(self, name: str, to: Tensor, at: Tensor) -> None:
        """Copy what ``find`` found into ``to [B, H, n, ...]``; anything where it found nothing."""
        if self.data[name].shape[2]:
            move(to, self.data[name], at.clamp(min=0))

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        """Slots ``[B, H, m]`` were overwritten by ``values [B, H, m, ...]``: their copies follow."""
        if self.active:
            put_slots(self.data[name], self.find(slots), values)

    def fill(self, name: str, rows: Tensor, heads: Tensor, places: Tensor, values: Tensor) -> None:
        """Put blocks ``[m * block, ...]`` into ``places [m]`` of sequences and heads ``[m]``."""
        blocks = self.data[name].unflatten(2, (-1, self.block))
        values = values.unflatten(0, (-1, self.block)).to(blocks.device, non_blocking=True)
        blocks[rows, heads, places] = values

    def forget(self, row: int | None = None) -> None:
        """Slots of a sequence (None: of all) are not what they were: it has nothing here."""
        rows = slice(None) if row is None else row
        self.table[rows] = -1
        self.place[rows] = -1

    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat sequences; their blocks follow."""
        self.table, self.place, self.use = self.table[rows], self.place[rows], self.use[rows]
        self.data = {name: column.index_select(0, rows) for name, column in self.data.items()}

    def bytes(self) -> int:
        """Bytes of every tensor held."""
        held = (self.table, self.place, self.use, *self.data.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    # ------------------------------------------------------------------ admission

    def admit(self, selection: Selection) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A step has read ``selection``. Returns the blocks that enter, as sequences, heads, blocks, places ``[m]``.

        Their bytes are to be put into place by ``fill``; ``find`` names them already.
        """
        if not self.active:
            none = self.table.new_zeros(0)
            return none, none, none, none
        hits = self._hits(selection)
        best = hits.topk(min(self.topk, hits.shape[-1]), dim=-1)
        considered = torch.zeros_like(hits, dtype=torch.bool).scatter_(-1, best.indices, best.values > 0)
        self._note(considered)
        resident = self.place >= 0
        rank = ((self.use * 2 + resident) * (hits.amax() + 1) + hits).masked_fill_(~(considered | resident), -1)
        chosen = rank.topk(self.table.shape[-1], dim=-1)
        return self._swap(chosen.indices, chosen.values >= 0)

    def _hits(self, selection: Selection) -> Tensor:
        """Selected slots of each block, ``[B, H, blocks]`` int64."""
        ranks = torch.arange(selection.index.shape[-1], device=self.use.device)
        counted = (ranks < selection.count.unsqueeze(-1)).long()
        blocks = selection.index.div(self.block, rounding_mode="floor").clamp_(0, self.use.shape[-1] - 1)
        return torch.zeros_like(self.use).scatter_add_(-1, blocks, counted)

    def _note(self, considered: Tensor) -> None:
        self._steps += 1
        if self.policy == "lru":
            self.use = torch.where(considered, self._steps, self.use)
            return
        self.use += considered
        if self._steps % AGE == 0:
            self.use //= 2

    def _swap(self, blocks: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Make the ``valid`` ones of ``blocks [B, H, places]`` the residents; those that were stay where they are."""
        chosen = torch.zeros_like(self.place, dtype=torch.bool).scatter_(-1, blocks, valid)
        stays = (self.table >= 0) & chosen.gather(-1, self.table.clamp(min=0))
        enters = valid & (self.place.gather(-1, blocks) < 0)
        free = stays.byte().argsort(dim=-1, stable=True)  # free places first, entering blocks first
        coming = blocks.gather(-1, enters.byte().argsort(dim=-1, descending=True, stable=True))
        number = enters.sum(-1, keepdim=True)
        pairs = torch.arange(blocks.shape[-1], device=blocks.device) < number
        table = self.table.masked_fill(~stays, -1)
        self.table = table.scatter(-1, free, torch.where(pairs, coming, table.gather(-1, free)))
        ends = torch.where(self.table < 0, self.place.shape[-1], self.table)
        places = torch.arange(self.table.shape[-1], device=blocks.device).expand_as(ends)
        self.place = pad(torch.full_like(self.place, -1), (0, 1)).scatter_(-1, ends, places)[..., :-1].contiguous()
        rows, heads, at = pairs.nonzero(as_tuple=True)
        return rows, heads, coming[rows, heads, at], free[rows, heads, at]
