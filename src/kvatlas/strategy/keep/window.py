"""Sinks and a window (StreamingLLM), and the plain window of a model's own sliding layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.errors import UserError
from kvatlas.strategy.keep.ranked import Ranked, protect
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import Span, View


@dataclass(frozen=True)
class SinksAndWindow(Ranked):
    """The first ``sinks`` tokens and the latest ones.

    ``positions=cache`` (the paper's): sinks are seen from the query's place inside the cache. In the window, distances
    inside the cache are the true ones, so its keys need nothing. ``positions=true`` keeps all true distances.
    """

    source: ClassVar[str] = "StreamingLLM, ICLR 2024, section 3.2"
    sinks: int = 4
    positions: Literal["cache", "true"] = "cache"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UserError(f"streaming: sinks must be 0 or more, not {self.sinks}")

    def words(self) -> str:
        return f"{self.sinks} sinks + window, budget {self.budget:g}"

    def check(self, strategy: Strategy) -> None:
        if strategy.read.selects and self.positions == "cache" and self.sinks and not self.lossless():
            raise UserError(
                f"'{strategy.name}': streaming sees its sinks from their place in the cache, which a rule that picks "
                "tokens to read does not keep; write positions=true"
            )

    def plan(self, length: int) -> dict[str, int]:
        plan = super().plan(length)
        if plan:  # the newest token stays, whatever the budget
            plan["sinks"] = min(self.sinks, plan["capacity"] - 1)
        return plan

    def priority(self, view: View) -> Tensor:
        return protect(view.column("pos").float(), view)

    def spans(self, view: View) -> tuple[Span, ...] | None:
        if self.positions == "true" or self.sinks == 0 or "capacity" not in view.plan:
            return None
        # A cache too small for its sinks and a window has no window to count from: true distances there.
        inside = torch.where(view.plan["capacity"] > self.sinks, view.lengths[:, 0] - 1, view.now)
        return (Span(0, self.sinks, inside), Span(self.sinks, None, None))


@dataclass(frozen=True)
class Window(Ranked):
    """The last ``tokens`` before the newest: what a model's own sliding-window layer can see."""

    source: ClassVar[str] = "the model's own sliding window"
    tokens: int = 1

    def words(self) -> str:
        return f"the model's window, {self.tokens} tokens and the newest"

    def grows(self) -> bool:
        return False

    def plan(self, length: int) -> dict[str, int]:
        return {"capacity": self.tokens}

    def lossless(self) -> bool:
        return True

    def priority(self, view: View) -> Tensor:
        return view.column("pos").float()


register(Preset("streaming", {"keep": SinksAndWindow}, "the first tokens and the latest"))
