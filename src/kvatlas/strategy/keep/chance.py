"""Random eviction: the control that every evictor must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.errors import UserError
from kvatlas.strategy.keep.ranked import Ranked, protect
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column, LayerFacts, View

LUCK = Column("luck", (), torch.float32)


@dataclass(frozen=True)
class Chance(Ranked):
    """Sinks, the latest tokens, and others by lot.

    A token's luck is a hash of its position, head and the seed, so it does not depend on who shares the batch.
    """

    source: ClassVar[str] = "control"
    sinks: int = 4
    recent: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UserError(f"random: sinks must be 0 or more, not {self.sinks}")
        if not 0 <= self.recent <= 1:
            raise UserError(f"random: recent must be a share of the budget, 0 to 1, not {self.recent:g}")

    def words(self) -> str:
        return f"{self.sinks} sinks + recent + by lot, budget {self.budget:g}"

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        return (*super().columns(facts), LUCK)

    def plan(self, length: int) -> dict[str, int]:
        plan = super().plan(length)
        if plan:
            plan["sinks"] = min(self.sinks, plan["capacity"] - 1)
            plan["recent"] = min(max(1, int(plan["capacity"] * self.recent)), plan["capacity"] - plan["sinks"])
        return plan

    def fresh(self, positions: Tensor, kv_heads: int) -> dict[str, Tensor]:
        heads = torch.arange(kv_heads, device=positions.device).view(1, -1, 1)
        x = positions.long().unsqueeze(1) * 2654435761 + heads * 40503 + self.seed * 97 + 12345
        for _ in range(2):  # a 31-bit mixing step, twice
            x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
            x = ((x ^ (x >> 12)) * 0x297A2D39) & 0x7FFFFFFF
        return {"luck": x.float() / 0x7FFFFFFF}

    def priority(self, view: View) -> Tensor:
        return protect(view.column("luck"), view)


register(Preset("random", {"keep": Chance}, "evicts by lot: the control that every evictor must beat"))
