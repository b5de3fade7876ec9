"""The exact best keys of every step: the upper bound of every reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.attention.choose import best_slots
from kvatlas.strategy.answers import Read
from kvatlas.strategy.budget import resolve, resolve_all
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Combine, Selection, View, fold


@dataclass(frozen=True)
class Oracle(Read):
    """Looks at every key, then attends to the best ``budget`` of them. Its choice costs a full read of the keys."""

    source: ClassVar[str] = "upper bound"
    selects: ClassVar[bool] = True
    gqa: Combine = "mean"

    def words(self) -> str:
        return f"the exact best keys, budget {self.budget:g}"

    def lossless(self) -> bool:
        return self.budget == 1.0

    def limit(self, length: int) -> int:
        return min(length, resolve(self.budget, length) or length)

    def select(self, view: View, q: Tensor, foreseen: Selection | None) -> Selection | None:
        if self.budget == 1.0 or view.keys is None:
            return None
        keys = view.keys()
        scores = torch.matmul(q.unflatten(1, (keys.shape[1], -1)), keys.transpose(-1, -2)).float()
        scores.mul_(view.layer.scale)
        empty = view.empty()
        if empty is not None:
            scores.masked_fill_(empty.unsqueeze(2), float("-inf"))
        rank = fold(scores.softmax(-1).flatten(1, 2), keys.shape[1], self.gqa)
        if empty is not None:
            rank = rank.masked_fill(empty, -1.0)
        count = resolve_all(self.budget, view.lengths)
        index = best_slots(rank, count, self.limit(view.width))
        return Selection(index, count, scanned=keys.numel() * keys.element_size())


register(Preset("oracle", {"read": Oracle}, "reads the exact best keys: the bound of every reader"))
