"""Persistently important keys (Scissorhands): those that the latest queries kept hitting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.attention.mass import pack_bits
from kvatlas.attention.tiles import Wants
from kvatlas.errors import UserError
from kvatlas.strategy.keep.ranked import Ranked, protect, run_places
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column, Combine, LayerFacts, View, fold


@dataclass(frozen=True)
class Persistent(Ranked):
    """A key is hit by a query that gives it more than 1/t, t being the keys that the query saw; the fewest hits go.

    Hits among the last ``history`` queries count; the last ``recent`` tokens stay anyway. Of equally hit keys the
    oldest goes. The threshold 1/t is the paper's; the authors' simulation takes each row's 90th percentile instead,
    which needs the score matrix. A KV head's group hits together: its weights are combined (``gqa``), then compared.
    The hits are bits in a ring, one for each of the last ``history`` queries.
    """

    source: ClassVar[str] = "Scissorhands, NeurIPS 2023, section 4"
    history: int = 400
    recent: int | None = None
    sinks: int = 0
    gqa: Combine = "mean"

    def __post_init__(self) -> None:
        if self.history < 1:
            raise UserError(f"scissorhands: history must be at least 1 query, not {self.history}")
        if self.recent is not None and self.recent < 0:
            raise UserError(f"scissorhands: recent must be 0 tokens or more, not {self.recent}")
        if self.sinks < 0:
            raise UserError(f"scissorhands: sinks must be 0 or more, not {self.sinks}")
        if self.recent is not None and 1 < self.budget < self.recent:
            raise UserError(f"scissorhands: recent={self.recent} does not fit into a budget of {self.budget:g}")

    def words(self) -> str:
        return f"hit most by the last {self.history} queries + recent, budget {self.budget:g}"

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        if self.lossless():
            return super().columns(facts)
        ring = Column("ring", (-(-self.history // 8),), torch.uint8)
        return (*super().columns(facts), ring, Column("hits", (), torch.float32))

    def wants(self) -> Wants | None:
        return None if self.lossless() else Wants("hits", self.history, self.gqa)

    def plan(self, length: int) -> dict[str, int]:
        plan = super().plan(length)
        if not plan:
            return plan
        sinks = min(self.sinks, plan["capacity"] - 1)
        room = plan["capacity"] - sinks
        if self.recent is not None and self.recent > room:
            raise UserError(
                f"scissorhands: recent={self.recent} does not fit into {plan['capacity']} tokens, the budget of a "
                f"prompt of {length}"
            )
        recent = min(10, max(1, room // 2)) if self.recent is None else self.recent
        return plan | {"recent": max(1, recent), "sinks": sinks}

    def observe(self, view: View) -> None:
        if view.weights is None:
            return
        ring, hits = view.column("ring"), view.column("hits")
        if view.newest is None:
            self._observe_run(view, ring, hits)
            return
        at = (view.now % self.history).view(-1, 1, 1)
        seen = view.lengths.float().unsqueeze(-1)
        hit = (fold(view.weights, view.layer.kv_heads, self.gqa) > 1.0 / seen).to(torch.uint8)
        byte = (at // 8).unsqueeze(-1).expand(*ring.shape[:3], 1)
        old, bit = ring.gather(-1, byte).squeeze(-1), (at % 8).to(torch.uint8)
        before = (old >> bit) & 1
        hits.add_(hit.to(hits.dtype) - before.to(hits.dtype))
        ring.scatter_(-1, byte, ((old & ~(torch.ones_like(bit) << bit)) | (hit << bit)).unsqueeze(-1))

    def _observe_run(self, view: View, ring: Tensor, hits: Tensor) -> None:
        """The bits of a run's queries (the latest ``history`` of them) take the places of those before them."""
        assert view.weights is not None
        mask = torch.zeros(self.history, dtype=torch.bool, device=ring.device)
        mask[run_places(view, self.history)] = True
        taken = pack_bits(mask)
        ring.copy_((ring & ~taken) | view.weights)
        bits = (ring.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=ring.device)) & 1
        hits.copy_(bits.flatten(-2).sum(-1).to(hits.dtype))

    def priority(self, view: View) -> Tensor:
        rank = view.column("hits").double() * 2**31 + view.column("pos")  # of equally hit ones the oldest goes
        return protect(rank, view)


register(Preset("scissorhands", {"keep": Persistent}, "what the latest queries kept attending to"))
