"""Pages by the bounds of their keys (Quest): a step reads the pages whose best possible score is highest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.errors import UserError
from kvatlas.strategy.budget import resolve, resolve_all
from kvatlas.strategy.read import pages
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import LayerFacts, Selection, View

LEAST = 3
"""Pages that are read whatever the budget."""


@dataclass(frozen=True)
class Quest(pages.PageBounds):
    """The best ``max(3, budget / page)`` pages of ``page`` slots; layers 0 and 1, and every prompt, read all.

    A page's score is ``sum_d max(q_d * low_d, q_d * high_d)`` with the bounds of its keys, per query head, combined
    over the group (``gqa``). With ``newest`` the page of the newest token is one of them whatever its score.

    Traffic falls; memory grows by the bounds, two keys a page. Pages are of slots, not of positions: under a keep rule
    that evicts, a new token takes a freed slot and the bounds of its page are widened, never narrowed. Under an encoder
    bounds of a prompt are of the keys as they are read; those of later tokens are of their raw keys.
    """

    source: ClassVar[str] = "Quest, ICML 2024, section 3.3"
    selects: ClassVar[bool] = True
    first_layer: ClassVar[int] = 2
    newest: bool = True

    def __post_init__(self) -> None:
        if self.page < 1:
            raise UserError(f"quest: page must be at least 1 token, not {self.page}")

    def words(self) -> str:
        return f"pages of {self.page} by key bounds, budget {self.budget:g}"

    def lossless(self) -> bool:
        return self.budget == 1.0

    def limit(self, length: int) -> int:
        budget = resolve(self.budget, length)
        return length if budget is None else min(length, self.page * max(LEAST, budget // self.page))

    def begin(self, facts: LayerFacts, slots: int) -> dict[str, Tensor]:
        return {} if self.lossless() else super().begin(facts, slots)

    def state_bytes(self, facts: LayerFacts, slots: int) -> int:
        return 0 if self.lossless() else super().state_bytes(facts, slots)

    def settle(self, view: View) -> None:
        if not self.lossless():
            super().settle(view)

    def select(self, view: View, q: Tensor, foreseen: Selection | None) -> Selection | None:
        if self.lossless():
            return None
        held = pages.pages_for(view.width, self.page)
        most = pages.pages_for(self.limit(view.width), self.page)
        if most >= held:
            pages.note_newest(view, self.page)
            return None
        return pages.read_best(view, q, self, self._counts(view, most), most, self.newest)

    def _counts(self, view: View, most: int) -> Tensor:
        """Pages to read, ``[B, H]``."""
        if not view.ragged:
            return torch.full_like(view.lengths, most)
        total = (view.lengths + (self.page - 1)).div_(self.page, rounding_mode="floor")
        budget = resolve_all(self.budget, view.lengths)
        return budget.div(self.page, rounding_mode="floor").clamp_(min=LEAST).minimum(total)


register(Preset("quest", {"read": Quest}, "reads the pages whose keys could score best"))
