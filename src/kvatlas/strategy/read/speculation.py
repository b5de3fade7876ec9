"""Speculated reading (InfiniGen): the layer before guesses which keys this layer will need.

Queries and keys are turned once a model so that few columns carry most of a score (``skew``). A prompt chooses those
columns (``partial_columns``). At each step the previous layer's attention input, projected by this layer's query
weight, is scored on them (``speculate``), and only the tokens near the best are fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.attention.choose import best_slots, native_serves
from kvatlas.attention.native import choose as native
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Read
from kvatlas.strategy.budget import resolve, resolve_all
from kvatlas.strategy.keep.pool import Pool
from kvatlas.strategy.place.host import Host
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column, Combine, LayerFacts, Port, Selection, View, fold


def skew(q: Tensor, k: Tensor) -> Tensor:
    """Orthogonal matrices that gather a head's scores in few columns.

    Args:
        q: ``[H, N, D]`` queries as they reach attention; k: ``[H, M, D]`` keys. A KV head's query heads may be stacked
            along N.

    Returns:
        ``[H, D, D]``: right singular vectors of q, in ascending order of the product of q's and k's singular values.
        ``q @ A`` and ``k @ A`` have the scores of q and k (paper, section 4.2).
    """
    _, sigma_q, right = torch.linalg.svd(q.float(), full_matrices=False)
    sigma_k = torch.linalg.svdvals(k.float())
    order = (sigma_q * sigma_k).argsort(-1)
    vectors = right.transpose(-1, -2)
    return vectors.gather(-1, order.unsqueeze(1).expand(-1, vectors.shape[1], -1))


def partial_columns(q_skewed: Tensor, ratio: float) -> Tensor:
    """The columns with the largest absolute sum: ``[H, N, D]`` -> ``[H, int(D * ratio)]`` int64, ascending."""
    return _largest(_column_sums(q_skewed), ratio)


def _column_sums(q_skewed: Tensor) -> Tensor:
    return q_skewed.float().abs().sum(-2)


def _largest(sums: Tensor, ratio: float) -> Tensor:
    return sums.topk(max(1, int(sums.shape[-1] * ratio)), dim=-1).indices.sort(-1).values


def speculate(q_partial: Tensor, k_partial: Tensor, alpha: float, limit: int) -> Tensor:
    """Which tokens to fetch, for one sequence.

    Args:
        q_partial: ``[H, 1, d]``, already scaled by 1/sqrt(D); k_partial: ``[H, N, d]``.
        alpha: scores strictly within it of the head's own maximum count.
        limit: most tokens a head may fetch.

    Returns:
        ``[H, n]`` int64 positions, best first; n = int(mean count over heads), at most ``limit``.
    """
    scores = torch.matmul(q_partial.float(), k_partial.float().transpose(-1, -2)).squeeze(1)
    near = (scores > scores.amax(-1, keepdim=True) - alpha).sum(-1)
    n = min(int(near.float().mean()), limit)
    return scores.topk(n, dim=-1).indices


def speculated_rank(view: View, part: Tensor, keys: Tensor, alpha: float, gqa: Combine) -> tuple[Tensor, Tensor]:
    """The group's combined speculated weights and how many tokens are near.

    Args:
        part: ``[B, H, G, d]`` partial queries; keys: ``[B, H, n, d]`` partial keys.

    Returns:
        rank ``[B, H, n]`` float32, -1 where there is nothing, and near ``[B, H]`` int64. A KV head fetches for its
        whole group: what any of its query heads finds within ``alpha`` of its own best is near.
    """
    if native_serves(keys):
        return native.speculate(part, keys, view.lengths, view.hole, view.layer.scale, alpha, gqa)
    scores = torch.matmul(part, keys.transpose(-1, -2)).float().mul_(view.layer.scale)  # [B, H, G, n]
    empty = view.empty()
    if empty is not None:
        scores.masked_fill_(empty.unsqueeze(2), float("-inf"))
    near = (scores > scores.amax(-1, keepdim=True) - alpha).any(2).sum(-1)
    rank = fold(scores.softmax(-1).flatten(1, 2), keys.shape[1], gqa)
    return (rank if empty is None else rank.masked_fill(empty, -1.0)), near


@dataclass(frozen=True)
class Speculated(Read):
    """Tokens within ``alpha`` of the best speculated score, at most ``budget`` of the cache; layers 0 and 1 read all.

    Under grouped queries one skew and one set of columns serve a KV head. Scores are per query head: a token counts
    when any head of the group finds it near its own best, and tokens are ranked by the group's combined speculated
    weights. With one query head per KV head, which is all that the authors' code covers, both are the authors' rule.
    """

    source: ClassVar[str] = "InfiniGen, OSDI 2024, section 4"
    selects: ClassVar[bool] = True
    foresees: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    first_layer: ClassVar[int] = 2
    whole_prompt: ClassVar[bool] = True
    alpha: float = 5.0
    partial: float = 0.3
    gqa: Combine = "mean"

    def __post_init__(self) -> None:
        if not 0 < self.partial <= 1:
            raise UserError(
                f"infinigen: partial must be above 0 and at most 1 (a share of head_dim), not {self.partial:g}"
            )
        if not self.alpha > 0:
            raise UserError(f"infinigen: alpha must be above 0 (inf: no threshold), not {self.alpha:g}")

    def words(self) -> str:
        return f"speculated by the layer before, at most {self.budget:g}, alpha {self.alpha:g}"

    def lossless(self) -> bool:
        return self.budget == 1.0 and self.alpha == float("inf")

    def limit(self, length: int) -> int:
        return min(length, resolve(self.budget, length) or length)

    def width(self, head_dim: int) -> int:
        """Columns of the partial keys."""
        return max(1, int(head_dim * self.partial))

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        return (Column("partial", (self.width(facts.head_dim),), facts.dtype),)

    def state_bytes(self, facts: LayerFacts, slots: int) -> int:
        basis = self.width(facts.head_dim) * facts.dtype.itemsize
        return facts.kv_heads * facts.head_dim * (basis + torch.float32.itemsize)

    def calibration(self) -> object:
        return type(self)  # the skew is the model's alone

    def calibrate(self, facts: LayerFacts, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        stacked = q.reshape(facts.kv_heads, -1, q.shape[-1])
        return {"skew": skew(stacked, k).to(facts.dtype)}

    def observe_prefill(
        self, facts: LayerFacts, constants: Mapping[str, Tensor], q: Tensor, k: Tensor, so_far: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        stacked = q.reshape(facts.kv_heads, -1, q.shape[-1])
        sums = _column_sums(torch.matmul(stacked, constants["skew"]))
        if so_far:
            sums += so_far["sums"]
        columns = _largest(sums, self.partial)
        # The chosen columns of the skew matrix: one product gives partial keys and partial queries.
        basis = constants["skew"].gather(-1, columns.unsqueeze(1).expand(-1, q.shape[-1], -1))
        return {"basis": basis, "sums": sums}

    def fresh(self, constants: Mapping[str, Tensor], state: Mapping[str, Tensor], k: Tensor) -> dict[str, Tensor]:
        return {"partial": torch.matmul(k, state["basis"])}

    def foresee(
        self, view: View, constants: Mapping[str, Tensor], port: Port, x: Tensor, positions: Tensor
    ) -> Selection | None:
        if view.width == 0:
            return None
        q = port.project_query(view.layer.layer, x, positions).squeeze(2)  # [B, Hq, D]
        heads = view.layer.kv_heads
        part = torch.matmul(q.unflatten(1, (heads, -1)), view.state["basis"])  # [B, H, G, d]
        keys = view.column("partial")
        rank, near = speculated_rank(view, part, keys, self.alpha, self.gqa)
        count = near.float().mean(1).long().minimum(resolve_all(self.budget, view.lengths[:, 0]))
        index = best_slots(rank, count.unsqueeze(1).expand(-1, heads), int(count.max()))
        return Selection(index, count.unsqueeze(1).expand(-1, heads), scanned=keys.numel() * keys.element_size())

    def select(self, view: View, q: Tensor, foreseen: Selection | None) -> Selection | None:
        if foreseen is None or view.newest is None:
            return None
        index = torch.cat([view.newest.unsqueeze(-1), foreseen.index], dim=-1)
        return Selection(index, foreseen.count + 1, foreseen.scanned, foreseen)


register(
    Preset(
        "infinigen",
        {"keep": Pool, "read": Speculated, "place": Host},
        "all on the host; a step fetches what the layer before guesses",
        budget="read",
        names={"pool": ("keep", "budget")},
        yields=("keep", "place"),
    )
)
