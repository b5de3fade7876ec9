"""Eviction with a second chance (ours): what a keep rule evicts waits on the host, its best pages are read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvatlas.errors import UserError
from kvatlas.strategy.keep.heavy import HeavyHitters
from kvatlas.strategy.place.archive import Archived
from kvatlas.strategy.read import pages as paging
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Selection, View


@dataclass(frozen=True)
class SecondChance(paging.PageBounds):
    """All that is kept, and the ``pages`` best pages of ``page`` tokens of what was evicted.

    Pages are scored by the bounds of their keys, as Quest does; the bounds stay on the device, the tokens come from
    the host. A page holds tokens that were evicted one after another: of a prompt, neighbours; later, whatever went.
    """

    source: ClassVar[str] = "ours; page bounds from Quest, ICML 2024"
    selects: ClassVar[bool] = True
    pages: int = 8

    def __post_init__(self) -> None:
        for name in ("page", "pages"):
            if getattr(self, name) < 1:
                raise UserError(f"recall: {name} must be at least 1, not {getattr(self, name)}")

    def words(self) -> str:
        return f"all that is kept + the best {self.pages} evicted pages of {self.page}"

    def limit(self, length: int) -> int:
        return min(length, self.page * self.pages)

    def select(self, view: View, q: Tensor, foreseen: Selection | None) -> Selection | None:
        held = paging.pages_for(view.width, self.page)
        if held == 0:
            return None
        total = (view.lengths + (self.page - 1)).div(self.page, rounding_mode="floor")
        return paging.read_best(view, q, self, total.clamp(max=self.pages), min(held, self.pages))


register(
    Preset(
        "recall",
        {"keep": HeavyHitters, "read": SecondChance, "place": Archived},
        "what is evicted goes to the host, and its best pages are read again",
        names={"pages_gqa": ("read", "gqa")},
        yields=("keep",),
    )
)
