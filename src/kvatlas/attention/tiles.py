"""What attention is given and what it gives back: tiles, wants and partial results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

TILE = 1024
"""Tokens in a tile that has to be gathered, decoded or fetched."""

Rotate = Callable[[Tensor, Tensor], Tensor]
"""Turn queries ``[B, Hq, T, D]`` so that they stand at positions ``[B, T]``."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Keys and values as codes of a few bits: element d is ``zero + code * scale`` of group ``d // group``.

    Attributes:
        k, v: uint8 codes ``[B, H, n, D]``, or with 4 bits ``[B, H, n, (D + 1) // 2]``: byte i holds element i in its
            lower half and element ``i + (D + 1) // 2`` in its upper one.
        k_scale, v_scale: ``[B, H, n, groups, 2]`` float16, each group's scale and zero.
        bits: 4 or 8.
        group: elements in a group; the last group may be shorter.
        head_dim: D.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    bits: int
    group: int
    head_dim: int

    def map(self, pick: Callable[[Tensor], Tensor]) -> Packed:
        """The same codes at other slots: ``pick`` acts on each tensor ``[B, H, n, ...]``."""
        return replace(self, k=pick(self.k), v=pick(self.v), k_scale=pick(self.k_scale), v_scale=pick(self.v_scale))


@dataclass(slots=True)
class Tile:
    """Keys and values of one piece of a cache layer, for the whole batch.

    Attributes:
        k, v: ``[B, H, n, D]``, or a block pool ``[blocks, H, block, D]`` when ``table`` is given.
        lengths: ``[B, H]`` int64; slots at or past it are padding. None: all ``n`` count.
        index: ``[B, H, m]`` int64 slots to attend to, with ``count`` ``[B, H]`` of them valid. None: slots in order.
        table: ``[B, blocks]`` int64, block numbers of each sequence in the pool.
        query_at: ``[B, T]`` positions from which these keys are seen, when it is not the query's own.
        positions: ``[B, H, n]`` true positions; needed only where a model layer has a window of its own.
        packed: the keys and values are codes, and ``k, v`` are those codes. Never with ``table``.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None = None
    index: Tensor | None = None
    count: Tensor | None = None
    table: Tensor | None = None
    query_at: Tensor | None = None
    positions: Tensor | None = None
    packed: Packed | None = None

    @property
    def width(self) -> int:
        """Columns of this tile in a statistic."""
        if self.index is not None:
            return self.index.shape[-1]
        if self.table is not None:
            return self.table.shape[-1] * self.k.shape[-2]
        return self.k.shape[-2]


@dataclass(frozen=True, slots=True)
class Wants:
    """The per-key statistic a rule asks of prefill attention (in decode it is always the step's weights).

    ``mass``: sum over all queries of the key's softmax weight; ``window``: over the last ``last`` queries only;
    ``band``: over queries fewer than ``last`` positions after the key; ``hits``: which of the last ``last`` queries
    gave the key more than 1/t, t being the number of keys that the query saw (their group combined as ``combine``
    says). Queries are counted from the end of the prompt, however it comes in.

    The result is ``[Hq, n]`` float32; of hits ``[H, n, ceil(last / 8)]`` uint8, bit ``p % last`` standing for the query
    at position p.
    """

    kind: Literal["mass", "window", "band", "hits"] = "mass"
    last: int | None = None
    combine: Literal["mean", "max", "sum"] = "mean"


@dataclass(slots=True)
class Partial:
    """Attention over some of the keys: output, log-sum-exp of the scores, and the weights if they were asked for."""

    out: Tensor  # [..., D]
    lse: Tensor  # [...] float32
    weights: Tensor | None = None  # [..., n] float32, normalised within this part


def merge(parts: list[Partial], sink: Tensor | None = None) -> Partial:
    """Merge partial results by log-sum-exp; ``sink`` (broadcastable to lse) is a learned logit without a value."""
    if len(parts) == 1 and sink is None:
        return parts[0]
    lses = torch.stack([part.lse for part in parts])
    total = torch.logsumexp(lses if sink is None else torch.cat([lses, sink.float().expand_as(lses[:1])]), dim=0)
    shares = torch.exp(lses - total).nan_to_num_(0.0)  # nothing seen at all: -inf minus -inf
    out = sum(part.out.float() * share.unsqueeze(-1) for part, share in zip(parts, shares))
    weights = None
    if parts[0].weights is not None:
        scaled = [part.weights * share.unsqueeze(-1) for part, share in zip(parts, shares) if part.weights is not None]
        weights = torch.cat(scaled, dim=-1)
    assert isinstance(out, Tensor)
    return Partial(out.to(parts[0].out.dtype), total, weights)
