"""Heavy hitters (H2O): the keys that received most attention, and the recent ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.attention.tiles import Wants
from kvatlas.errors import UserError
from kvatlas.strategy.budget import resolve
from kvatlas.strategy.keep.ranked import Ranked, protect
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column, Combine, LayerFacts, View, fold

SCORE = Column("score", (), torch.float32)


@dataclass(frozen=True)
class HeavyHitters(Ranked):
    """Accumulated softmax mass decides; a new token starts at its first weight; an evicted key's mass is gone.

    ``variant=real-drop`` follows the authors' code that really drops; ``variant=flexgen`` their FlexGen one, in which
    the oldest recent key becomes heavy whatever its mass: its window leaves out the newest token, so it protects one
    more.
    Where given, ``heavy`` and ``recent`` are tokens; otherwise the budget is halved between them.
    """

    source: ClassVar[str] = "H2O, NeurIPS 2023, algorithm 1"
    heavy: int | None = None
    recent: int | None = None
    sinks: int = 0
    variant: Literal["real-drop", "flexgen"] = "real-drop"
    normalise: bool = False
    gqa: Combine = "mean"

    def __post_init__(self) -> None:
        for name in ("heavy", "recent"):
            value = getattr(self, name)
            if value is not None and value < (1 if name == "heavy" else 0):
                raise UserError(f"h2o: {name} must be at least {1 if name == 'heavy' else 0} tokens, not {value}")
        if self.sinks < 0:
            raise UserError(f"h2o: sinks must be 0 or more, not {self.sinks}")
        if self.variant == "flexgen" and self.recent is not None:
            raise UserError("h2o: variant=flexgen sets recent to heavy - 1 itself; leave recent out")
        if self.recent is not None and self.heavy is None:
            raise UserError("h2o: recent= needs heavy= beside it (both in tokens), or a budget for both")
        if self.heavy is not None and self.budget != 1.0:
            raise UserError("h2o: give either a budget or heavy= and recent=, not both")

    def words(self) -> str:
        size = f"budget {self.budget:g}" if self.heavy is None else f"{self.heavy} heavy"
        return f"heavy hitters + recent ({self.variant}), {size}" + (f", {self.sinks} sinks" if self.sinks else "")

    def lossless(self) -> bool:
        return self.budget == 1.0 and self.heavy is None

    def with_budget(self, budget: float) -> HeavyHitters:
        if self.heavy is not None:
            raise UserError("h2o: layers= divides a budget among the layers; give one instead of heavy= and recent=")
        return replace(self, budget=budget)

    def grows(self) -> bool:
        return self.lossless()

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        return (*super().columns(facts), SCORE)

    def wants(self) -> Wants | None:
        return None if self.lossless() else Wants("mass")

    def plan(self, length: int) -> dict[str, int]:
        if self.heavy is not None:
            recent = self.heavy - 1 if self.variant == "flexgen" or self.recent is None else self.recent
            return self._plan(self.heavy + recent + self.sinks, recent)
        capacity = resolve(self.budget, length)
        if capacity is None:
            return {}
        # Sinks come first, half of the rest is recent, and the newest token always stays (flexgen counts it besides).
        room = capacity - min(self.sinks, capacity - 1)
        return self._plan(capacity, min(room // 2, room - 1) if self.variant == "flexgen" else max(1, room // 2))

    def _plan(self, capacity: int, recent: int) -> dict[str, int]:
        plan = {"capacity": capacity, "recent": recent}
        return plan | {"sinks": min(self.sinks, capacity - 1)} if self.sinks else plan

    def observe(self, view: View) -> None:
        if view.weights is None:  # lossless: nothing was asked for
            return
        view.column("score").add_(fold(view.weights, view.layer.kv_heads, self.gqa))

    def priority(self, view: View) -> Tensor:
        score = view.column("score")
        if self.normalise:
            score = score / (view.now.view(-1, 1, 1) - view.column("pos") + 1)  # by the queries that saw the key
        if self.variant == "flexgen" and view.newest is not None:
            plan = {**view.plan, "recent": view.plan["recent"] + 1}
            view = replace(view, plan=plan)
        return protect(score, view)


register(Preset("h2o", {"keep": HeavyHitters}, "the most attended and the latest; the rest is gone"))
