"""The newest tokens of a store whose other ones are in files: they are written by and by, some at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HOLDS = 32
"""Records that wait for each KV head."""


@dataclass(slots=True)
class WriteBack:
    """Records on the device that are newer than what the file says.

    Attributes:
        records: ``[B, H, HOLDS, size]`` uint8.
        slots: ``[B, H, HOLDS]`` int64, the slot that each belongs to, -1 for none. No slot comes twice.
        count: ``[B, H]`` int64, how many there are; they come first.
        most: at least the largest count, known without asking the device.
    """

    records: Tensor
    slots: Tensor
    count: Tensor
    most: int = 0

    @classmethod
    def of(cls, rows: int, heads: int, size: int, device: torch.device) -> WriteBack:
        """An empty one."""
        return cls(
            torch.zeros(rows, heads, HOLDS, size, dtype=torch.uint8, device=device),
            torch.full((rows, heads, HOLDS), -1, dtype=torch.int64, device=device),
            torch.zeros(rows, heads, dtype=torch.int64, device=device),
        )

    @staticmethod
    def bytes_of(rows: int, heads: int, size: int) -> int:
        """Bytes held, in closed form."""
        return rows * heads * (HOLDS * (size + 8) + 8)

    def room(self, more: int) -> bool:
        """True when ``more`` records fit in."""
        return self.most + more <= HOLDS

    def put(self, slots: Tensor, records: Tensor) -> None:
        """Records ``[B, H, m, size]`` of ``slots [B, H, m]``, different ones; those below 0 are left out."""
        same = (self.slots.unsqueeze(2) == slots.unsqueeze(3)) & (slots >= 0).unsqueeze(3)  # [B, H, m, HOLDS]
        known = same.any(-1)
        new = (slots >= 0) & ~known
        at = torch.where(known, same.byte().argmax(-1), self.count.unsqueeze(-1) + new.cumsum(-1) - 1)
        rows, heads, i = (slots >= 0).nonzero(as_tuple=True)
        places = at[rows, heads, i]
        self.records[rows, heads, places] = records[rows, heads, i]
        self.slots[rows, heads, places] = slots[rows, heads, i]
        self.count += new.sum(-1)
        self.most += slots.shape[2]

    def clear(self) -> None:
        """All have been written."""
        self.slots.fill_(-1)
        self.count.zero_()
        self.most = 0

    def patch(self, buffer: Tensor, start: int) -> None:
        """Put what is newer into ``buffer [B, H, n, size]``, which holds slots from ``start`` on."""
        if self.most == 0:
            return
        inside = (self.slots >= start) & (self.slots < start + buffer.shape[2])
        rows, heads, i = inside.nonzero(as_tuple=True)
        buffer[rows, heads, self.slots[rows, heads, i] - start] = self.records[rows, heads, i]

    def patch_chosen(self, buffer: Tensor, index: Tensor) -> None:
        """The same where ``buffer [B, H, n, size]`` holds slots ``index [B, H, n]``, in any order, also twice."""
        if self.most == 0:
            return
        order = self.slots.sort(-1)
        found = torch.searchsorted(order.values, index.contiguous()).clamp_(max=HOLDS - 1)
        hit = (order.values.gather(-1, found) == index) & (index >= 0)
        rows, heads, i = hit.nonzero(as_tuple=True)
        buffer[rows, heads, i] = self.records[rows, heads, order.indices.gather(-1, found)[rows, heads, i]]

    def of_row(self, row: int) -> WriteBack:
        """One sequence's, as a batch of one."""
        part = slice(row, row + 1)
        return WriteBack(self.records[part], self.slots[part], self.count[part], self.most)

    def select(self, rows: Tensor) -> WriteBack:
        """The same of other sequences."""
        return WriteBack(self.records[rows], self.slots[rows], self.count[rows], self.most)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every tensor held."""
        return self.records, self.slots, self.count
