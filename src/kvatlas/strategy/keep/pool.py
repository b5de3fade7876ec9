"""A bounded pool (InfiniGen): of what is kept for fetching, the least useful of the older half goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.strategy.keep.ranked import Ranked
from kvatlas.strategy.view import Column, LayerFacts, View

USE = Column("use", (), torch.float32)


@dataclass(frozen=True)
class Pool(Ranked):
    """Evicts a token a step and KV head: fewest fetches (``counter``), longest unfetched (``lru``), oldest (``fifo``).

    A prompt that is longer than the pool keeps its latest tokens: nothing was fetched yet.
    """

    source: ClassVar[str] = "InfiniGen, OSDI 2024, section 4.4"
    policy: Literal["counter", "lru", "fifo"] = "counter"

    def words(self) -> str:
        return "all" if self.budget == 1.0 else f"pool of {self.budget:g} by {self.policy}"

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        return () if self.budget == 1.0 else (*super().columns(facts), USE)

    def observe(self, view: View) -> None:
        if self.budget == 1.0 or view.newest is None:
            return
        use = view.column("use")
        fetched = torch.ones_like(use)
        if view.selection is not None:
            ranks = torch.arange(view.selection.index.shape[-1], device=use.device)
            valid = (ranks < view.selection.count.unsqueeze(-1)).to(use.dtype)
            fetched = torch.zeros_like(use).scatter_reduce_(-1, view.selection.index, valid, "amax")
        if self.policy == "counter":
            use.add_(fetched)
        else:
            use.copy_(torch.where(fetched > 0, view.now.view(-1, 1, 1).float(), use))

    def priority(self, view: View) -> Tensor:
        pos = view.column("pos")
        if self.policy == "fifo" or view.newest is None:
            return pos.float()
        filled = pos if (empty := view.empty()) is None else pos.masked_fill(empty, torch.iinfo(pos.dtype).max)
        half = (view.lengths // 2 - 1).clamp(min=0).unsqueeze(-1)
        middle = filled.sort(-1).values.gather(-1, half)
        rank = view.column("use").double() * 2**31 + pos  # of equally useful ones the oldest, wherever its slot is
        return rank.masked_fill(pos > middle, float("inf"))
