"""A sliding window and the tokens most attended of late (ALISA's sparse window attention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.attention.tiles import Wants
from kvatlas.errors import UserError
from kvatlas.strategy.keep.ranked import Ranked, protect, run_places
from kvatlas.strategy.place.phases import Phased
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column, Combine, LayerFacts, View, fold


@dataclass(frozen=True)
class SparseWindow(Ranked):
    """The latest tokens (``window``, a share of the budget) and those with the largest attention of late.

    Attention "of late" is the local sum: softmax weights of the last ``history`` queries, held in a ring (half
    precision, two bytes a query), so that an old favourite that nobody looks at any more loses its place. From the
    paper; no code of the authors is public, so the shares and the history are ours.
    """

    source: ClassVar[str] = "ALISA, ISCA 2024, section 4 (from the paper)"
    window: float = 0.5
    history: int = 16
    gqa: Combine = "mean"

    def __post_init__(self) -> None:
        if not 0 <= self.window <= 1:
            raise UserError(f"alisa: window must be a share of the budget, 0 to 1, not {self.window:g}")
        if self.history < 1:
            raise UserError(f"alisa: history must be at least 1 query, not {self.history}")

    def words(self) -> str:
        return f"window + most attended of the last {self.history} queries, budget {self.budget:g}"

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        if self.lossless():
            return super().columns(facts)
        return (*super().columns(facts), Column("late", (self.history,), torch.float16))

    def wants(self) -> Wants | None:
        return None if self.lossless() else Wants("window", self.history)

    def plan(self, length: int) -> dict[str, int]:
        plan = super().plan(length)
        if plan:
            plan["recent"] = min(plan["capacity"], max(1, int(plan["capacity"] * self.window)))
        return plan

    def observe(self, view: View) -> None:
        if view.weights is None:
            return
        late, weights = view.column("late"), fold(view.weights, view.layer.kv_heads, self.gqa)
        if view.newest is None:
            # What a run's last queries gave is known as a sum: it stands at the run's end and leaves in one piece.
            late[..., run_places(view, self.history)] = 0
            late[..., int(view.now[0]) % self.history] = weights.to(late.dtype)
            return
        at = (view.now % self.history).view(-1, 1, 1, 1).expand(*late.shape[:3], 1)
        late.scatter_(-1, at, weights.to(late.dtype).unsqueeze(-1))

    def priority(self, view: View) -> Tensor:
        return protect(view.column("late").float().sum(-1), view)


register(
    Preset(
        "alisa",
        {"keep": SparseWindow, "place": Phased},
        "a window and what was attended to of late; on the device, then on the host, then computed again",
        yields=("place",),
    )
)
