"""Keep rules that rank slots: the best ``capacity`` stay, one step evicts the last in rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.strategy.answers import Keep
from kvatlas.strategy.budget import resolve
from kvatlas.strategy.view import POS, Column, LayerFacts, View


@dataclass(frozen=True)
class Ranked(Keep):
    """Common to evicting rules. A subclass says ``priority``; protected slots get infinity."""

    evicts: ClassVar[bool] = True

    def lossless(self) -> bool:
        return self.budget == 1.0

    def grows(self) -> bool:
        return self.budget == 1.0

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        return (POS,)

    def plan(self, length: int) -> dict[str, int]:
        capacity = resolve(self.budget, length)
        return {} if capacity is None else {"capacity": capacity}

    def priority(self, view: View) -> Tensor:
        """``[B, H or 1, n]`` float32: higher stays longer."""
        raise NotImplementedError

    def survivors(self, view: View) -> Tensor | None:
        if "capacity" not in view.plan or view.width <= (capacity := int(view.plan["capacity"][0])):
            return None
        rank = self.priority(view).expand(1, view.layer.kv_heads, -1)
        return rank.topk(capacity, dim=-1).indices.sort(-1).values

    def victims(self, view: View) -> Tensor | None:
        if "capacity" not in view.plan:
            return None
        rank, empty = self.priority(view), view.empty()
        if empty is not None:
            rank = rank.masked_fill(empty, float("inf"))
        worst = rank.argmin(-1).expand(view.lengths.shape)
        return torch.where(view.lengths > view.plan["capacity"].unsqueeze(1), worst, -1)


def protect(rank: Tensor, view: View) -> Tensor:
    """Infinity for the first ``plan["sinks"]`` tokens and the last ``plan["recent"]`` ones of each sequence."""
    pos = view.column("pos")
    held = pos < view.plan["sinks"].view(-1, 1, 1) if "sinks" in view.plan else None
    if "recent" in view.plan:
        recent = pos > (view.now - view.plan["recent"]).view(-1, 1, 1)
        held = recent if held is None else held | recent
    return rank if held is None else rank.masked_fill(held, float("inf"))


def run_places(view: View, history: int) -> Tensor:
    """Where the queries of a run, the latest ``history`` of them, stand in a ring with place ``p % history`` for p."""
    return (view.now - torch.arange(min(view.run, history), device=view.now.device)) % history
