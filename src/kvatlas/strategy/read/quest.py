"""Pages by the bounds of their keys (Quest): a step reads the pages whose best possible score is highest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.attention.bounds import bound_scores
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
        appended = not view.ragged and "capacity" not in view.plan  # nothing was ever dropped: the newest is the last
        low, high = self._bounds(view, appended)
        held = pages.pages_for(view.width, self.page)
        width = pages.pages_for(self.limit(view.width), self.page)
        if width >= held:
            return None
        total, count = self._counts(view, held, width)
        rank = bound_scores(q.unflatten(1, (low.shape[1], -1)), low[:, :, :held], high[:, :, :held], total, self.gqa)
        if self.newest:
            self._prefer_newest(view, rank, appended)
        index = pages.best_pages(rank, count, width)
        scanned = 2 * rank.numel() * low.shape[-1] * low.element_size()
        missing = held * self.page - view.width if self.newest and appended else None
        return pages.slots_of_pages(index, count, view.lengths, self.page, view.width, scanned, missing)

    def _bounds(self, view: View, appended: bool) -> tuple[Tensor, Tensor]:
        """The bounds of all pages, the newest key among them."""
        low, high = view.state["low"], view.state["high"]
        if view.newest is not None and view.key is not None:
            if appended:
                pages.note_last(low, high, view.key, view.width - 1, self.page)
            else:
                pages.note_key(low, high, view.key, view.newest, view.lengths, self.page)
        return low, high

    def _prefer_newest(self, view: View, rank: Tensor, appended: bool) -> None:
        """The newest token's page comes first, in place. To an archive of evicted tokens there may have come none."""
        if view.newest is None:
            return
        if appended:
            rank[:, :, -1] = torch.inf
            return
        at = view.newest.clamp(min=0).div_(self.page, rounding_mode="floor").unsqueeze(-1)
        came = (view.newest >= 0).unsqueeze(-1)
        rank.scatter_(-1, at, torch.where(came, torch.inf, rank.gather(-1, at)))

    def _counts(self, view: View, held: int, width: int) -> tuple[Tensor, Tensor]:
        """Pages that there are and pages to read, ``[B, H]`` each."""
        if not view.ragged:
            return torch.full_like(view.lengths, held), torch.full_like(view.lengths, width)
        total = (view.lengths + (self.page - 1)).div_(self.page, rounding_mode="floor")
        budget = resolve_all(self.budget, view.lengths)
        return total, budget.div(self.page, rounding_mode="floor").clamp_(min=LEAST).minimum(total)


register(Preset("quest", {"read": Quest}, "reads the pages whose keys could score best"))
