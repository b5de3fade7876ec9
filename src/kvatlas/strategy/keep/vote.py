"""One vote at the end of the prompt (SnapKV): its last queries choose what stays; what is generated stays as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvatlas.attention.tiles import Wants
from kvatlas.errors import UserError
from kvatlas.strategy.budget import resolve
from kvatlas.strategy.keep.ranked import Ranked
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Combine, View, fold


@dataclass(frozen=True)
class Voted(Ranked):
    """The prompt tokens that its last ``window`` queries attend to most, pooled over neighbours, and the window.

    Votes are softmax weights summed over the window's queries, pooled along the sequence (``kernel``, ``pool``).
    ``capacity`` in tokens instead of a budget is the authors' parameter. Later turns are kept whole, as is all that is
    generated. The authors store a cache per query head; here a KV head's group votes together (``gqa``).
    """

    source: ClassVar[str] = "SnapKV, NeurIPS 2024, section 4"
    window: int | None = None
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    capacity: int | None = None
    gqa: Combine = "mean"

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f"snapkv: window must be at least 1 token, not {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"snapkv: kernel must be an odd number of tokens, not {self.kernel}")
        if self.capacity is not None and self.budget != 1.0:
            raise UserError("snapkv: give either a budget or capacity= (tokens), not both")
        if self.capacity is not None and self.capacity < 1:
            raise UserError(f"snapkv: capacity must be at least 1 token, not {self.capacity}")
        tokens = self.capacity if self.capacity is not None else resolve(self.budget, 0) if self.budget > 1 else None
        if tokens is not None and self.window is not None and self.window > tokens:
            raise UserError(f"snapkv: a window of {self.window} tokens does not fit into a budget of {tokens}")

    def words(self) -> str:
        size = f"budget {self.budget:g}" if self.capacity is None else f"{self.capacity} tokens"
        return f"voted by the prompt's last {self.window or 32} queries ({self.pool}-pooled), {size}"

    def lossless(self) -> bool:
        return self.budget == 1.0 and self.capacity is None

    def with_budget(self, budget: float) -> Voted:
        if self.capacity is not None:
            raise UserError("snapkv: layers= divides a budget among the layers; give one instead of capacity=")
        return replace(self, budget=budget)

    def grows(self) -> bool:
        return True

    def wants(self) -> Wants | None:
        return None if self.lossless() else Wants("window", self.window or 32)

    def plan(self, length: int) -> dict[str, int]:
        capacity = resolve(self.budget, length) if self.capacity is None else self.capacity
        if capacity is None:
            return {}
        if self.window is not None and capacity < min(self.window, length):
            raise UserError(
                f"snapkv: a window of {self.window} tokens does not fit into {capacity}, the budget of a prompt of "
                f"{length}; raise the budget or lower window="
            )
        window = min(self.window or 32, max(1, capacity // 2)) if self.window is None else self.window
        return {"capacity": capacity, "window": window, "prompt": length}

    def survivors(self, view: View) -> Tensor | None:
        if "prompt" in view.plan and int(view.now[0]) + 1 > int(view.plan["prompt"][0]):
            return None  # a later turn
        return super().survivors(view)

    def victims(self, view: View) -> Tensor | None:
        return None

    def priority(self, view: View) -> Tensor:
        assert view.weights is not None
        window = int(view.plan["window"][0])
        votes = view.weights[..., :-window] if view.width > window else view.weights[..., :0]
        if votes.shape[-1]:
            smooth = avg_pool1d if self.pool == "avg" else max_pool1d
            votes = smooth(votes, self.kernel, stride=1, padding=self.kernel // 2)
        rank = fold(votes, view.layer.kv_heads, self.gqa)
        kept = rank.new_full((*rank.shape[:2], view.width - rank.shape[-1]), float("inf"))
        return torch.cat([rank, kept], -1)


register(Preset("snapkv", {"keep": Voted}, "what the prompt's last queries attend to, chosen once"))
