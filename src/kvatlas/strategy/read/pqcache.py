"""Product quantisation of keys (PQCache): a step scores all tokens by their codes and reads the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.attention.choose import best_slots
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Read
from kvatlas.strategy.budget import resolve, resolve_all
from kvatlas.strategy.place.blockcache import BlockCache
from kvatlas.strategy.read.kmeans import cluster, nearest
from kvatlas.strategy.read.slots import positions
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import Column, Combine, LayerFacts, Selection, View, fold

SINKS = 32
"""Of them at most a quarter of the budget, where the user does not say how many."""
ALWAYS = 1e9
"""Rank of a token that is read whatever its score."""


def tables(q: Tensor, centroids: Tensor, scale: float) -> Tensor:
    """What each centroid adds to a score: ``[B, H, G, D]`` and ``[B, H, m, C, D/m]`` -> ``[B, H, m, G, C]`` float32."""
    parts = q.unflatten(-1, (centroids.shape[2], -1)).transpose(2, 3)
    return torch.matmul(parts.float(), centroids.float().transpose(-1, -2)).mul_(scale)


def scores(table: Tensor, codes: Tensor) -> Tensor:
    """Approximate scores of tokens with ``codes [B, H, n, m]`` uint8 -> ``[B, H, G, n]`` float32."""
    total: Tensor | None = None
    for part in range(table.shape[2]):
        index = codes[..., part].long().unsqueeze(2).expand(-1, -1, table.shape[3], -1)
        found = table[:, :, part].gather(-1, index)
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


@dataclass(frozen=True)
class ProductQuantised(Read):
    """The first ``sinks`` tokens, the latest, and those with the best approximate scores.

    Keys (after RoPE) are cut into ``parts`` sub-vectors, each coded by the nearest of ``2 ** bits`` centroids: k-means
    over the prompt, a sequence, KV head and part at a time. Tokens that come later are coded by the old centroids. A
    query's products with the centroids then give every token's score; softmaxed per query head over the tokens to
    choose from and combined over the group (``gqa``), they rank them.

    ``budget`` counts everything that is read: sinks (unset: 32, at most a quarter of it), of the rest the share
    ``recent``, and the best. The authors read their sinks and the newest token besides, and fix the number at the
    prompt's end; their k-means stops after as many iterations as hide behind the GPU's prefill.
    """

    source: ClassVar[str] = "PQCache, 2024, section 3"
    whole_prompt: ClassVar[bool] = True
    parts: int = 2
    bits: int = 6
    recent: float = 0.5
    sinks: int | None = None
    gqa: Combine = "sum"
    iterations: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise UserError(f"pqcache: parts must be at least 1, not {self.parts}")
        if not 1 <= self.bits <= 8:
            raise UserError(f"pqcache: bits must be 1 to 8 (a code is a byte), not {self.bits}")
        if not 0 <= self.recent <= 1:
            raise UserError(f"pqcache: recent must be a share of the budget, 0 to 1, not {self.recent:g}")
        if self.sinks is not None and self.sinks < 0:
            raise UserError(f"pqcache: sinks must be 0 or more, not {self.sinks}")
        tokens = resolve(self.budget, 0) if self.budget > 1 or self.budget == -1.0 else None
        if self.sinks and tokens is not None and self.sinks >= tokens:
            raise UserError(f"pqcache: sinks={self.sinks} leaves nothing else of a budget of {tokens} tokens")
        if self.iterations < 1:
            raise UserError(f"pqcache: iterations must be at least 1, not {self.iterations}")
        if self.seed < 0:
            raise UserError(f"pqcache: seed must be 0 or more, not {self.seed}")

    @property
    def selects(self) -> bool:  # type: ignore[override]
        """Without a budget everything is read, and nothing is clustered."""
        return self.budget != 1.0

    def words(self) -> str:
        sinks = SINKS if self.sinks is None else self.sinks
        return f"{sinks} sinks + recent + best by {self.parts} codes of {self.bits} bits, budget {self.budget:g}"

    def lossless(self) -> bool:
        return not self.selects

    def check(self, strategy: Strategy) -> None:
        if strategy.place.archives:
            raise UserError(f"'{strategy.name}': codes of evicted tokens are not kept; read them by pages (quest)")

    def limit(self, length: int) -> int:
        return min(length, resolve(self.budget, length) or length)

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        if facts.head_dim % self.parts:
            raise UserError(f"pqcache: parts={self.parts} must divide head_dim, here {facts.head_dim}")
        return () if self.lossless() else (Column("codes", (self.parts,), torch.uint8),)

    def begin(self, facts: LayerFacts, slots: int) -> dict[str, Tensor]:
        if self.lossless():
            return {}
        shape = (facts.kv_heads, self.parts, 1 << self.bits, facts.head_dim // self.parts)
        return {
            "centroids": torch.zeros(shape, dtype=facts.dtype, device=facts.device),
            "fitted": torch.zeros((), dtype=torch.bool, device=facts.device),
        }

    def state_bytes(self, facts: LayerFacts, slots: int) -> int:
        return 0 if self.lossless() else facts.kv_heads * facts.head_dim * facts.dtype.itemsize * (1 << self.bits) + 1

    def fresh(self, constants: Mapping[str, Tensor], state: Mapping[str, Tensor], k: Tensor) -> dict[str, Tensor]:
        if self.lossless() or (k.shape[2] > 1 and not bool(state["fitted"].all())):  # settle codes a prompt
            return {}
        return {"codes": self.codes(k, state["centroids"])}

    def codes(self, k: Tensor, centroids: Tensor) -> Tensor:
        """``[B, H, n, D]`` and ``[B, H, m, C, D/m]`` -> ``[B, H, n, m]`` uint8."""
        parts = k.unflatten(-1, (self.parts, -1)).transpose(2, 3)
        return nearest(parts, centroids).to(torch.uint8).transpose(2, 3)

    def settle(self, view: View) -> None:
        """Centroids of a prompt and its codes. A later turn has codes already, by the old centroids."""
        if view.keys is None or bool(view.state["fitted"]):
            return
        keys = view.keys()
        first = SINKS if self.sinks is None else self.sinks
        if "capacity" in view.plan or view.width <= 2 * first:
            first = 0
        parts = keys[0, :, first:].unflatten(-1, (self.parts, -1)).transpose(1, 2)
        problems, size = parts.flatten(0, 1).unbind(0), 1 << self.bits
        found = cluster(problems, [size] * len(problems), iterations=self.iterations, seed=self.seed)
        view.state["centroids"].copy_(torch.stack(found).view(view.state["centroids"].shape))
        view.state["fitted"].fill_(True)
        view.column("codes").copy_(self.codes(keys, view.state["centroids"]))

    def select(self, view: View, q: Tensor, foreseen: Selection | None) -> Selection | None:
        width = self.limit(view.width)
        if width >= view.width:  # also without a budget
            return None
        codes, centroids = view.column("codes"), view.state["centroids"]
        found = scores(tables(q.unflatten(1, (codes.shape[1], -1)), centroids, view.layer.scale), codes)
        total = resolve_all(self.budget, view.lengths)
        always, empty = self._always(view, total), view.empty()
        others = always if empty is None else always | empty
        # added, for masking the scores themselves takes longer than computing them
        found += torch.zeros_like(others, dtype=found.dtype).masked_fill_(others, float("-inf")).unsqueeze(2)
        rank = fold(found.softmax(-1).flatten(1, 2), codes.shape[1], self.gqa).masked_fill_(always, ALWAYS)
        if empty is not None:
            rank.masked_fill_(empty, -1.0)
        return Selection(best_slots(rank, total, width), total, codes.nbytes + centroids.nbytes)

    def _always(self, view: View, total: Tensor) -> Tensor:
        """True for sinks and the latest tokens, of ``total [B, H]`` to be read: ``[B, H, n]``, or ``[B, 1, n]``."""
        if "capacity" not in view.plan:  # a sequence's heads hold the same tokens
            total = total[:, :1]
        sinks = (total // 4).clamp(max=SINKS) if self.sinks is None else (total - 1).clamp(max=self.sinks)
        recent = ((total - sinks) * self.recent).long().clamp(min=1)
        at = positions(view)
        newest = view.now.view(-1, 1, 1)
        return (at < sinks.unsqueeze(-1)) | (at > newest - recent.unsqueeze(-1))


register(
    Preset(
        "pqcache",
        {"read": ProductQuantised, "place": BlockCache},
        "reads the best tokens by their codes; keys and values on the host",
        yields=("place",),
    )
)
