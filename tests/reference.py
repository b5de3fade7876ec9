"""Attention in float64 with the whole matrix: slow, small and plain, to compare everything else with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvatlas.attention.tiles import Wants


@dataclass
class Keys:
    """Keys and values ``[H, n, D]`` as the queries ``q [Hq, T, D]`` see them, with true positions ``[H, n]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (halves) on ``[..., T, D]`` at ``[..., T]``."""
    half = x.shape[-1] // 2
    angle = positions.double().unsqueeze(-1) * (100.0 ** (-torch.arange(half, dtype=torch.float64) / half))
    cos, sin, a, b = angle.cos(), angle.sin(), x[..., :half].double(), x[..., half:].double()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def softmax64(
    parts: Sequence[Keys], query_at: Tensor, scale: float, sink: Tensor | None = None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output ``[Hq, T, D]`` and weights ``[Hq, T, all keys]`` of causal attention over the parts, in float64."""
    scores = []
    for part in parts:
        group = part.q.shape[0] // part.k.shape[0]
        k = part.k.double().repeat_interleave(group, 0)
        score = part.q.double() @ k.transpose(1, 2) * scale
        gap = query_at.view(1, -1, 1) - part.positions.repeat_interleave(group, 0).unsqueeze(1)
        hidden = (gap < 0) if window is None else (gap < 0) | (gap >= window)
        scores.append(score.masked_fill(hidden, -math.inf))
    if sink is not None:
        scores.append(sink.double().view(-1, 1, 1).expand(-1, scores[0].shape[1], 1))
    p = torch.softmax(torch.cat(scores, -1), -1)
    p = p if sink is None else p[..., :-1]
    values = torch.cat([part.v.double() for part in parts], 1)
    return p @ values.repeat_interleave(p.shape[0] // values.shape[0], 0), p


def statistic64(p: Tensor, gap: Tensor, wants: Wants, kv_heads: int = 1, first: int = 0) -> Tensor:
    """``[Hq, n]`` from weights ``[Hq, T, n]``; ``gap [Hq, T, n]`` is how far the key lies behind the query.

    Hits are bits ``[H, n, bytes]``, query by query.
    """
    if wants.kind == "band":
        assert wants.last is not None
        return p.masked_fill(gap >= wants.last, 0.0).sum(1)
    rows = slice(None) if wants.last is None or wants.kind == "mass" else slice(-wants.last, None)
    if wants.kind == "hits":
        assert wants.last is not None
        grouped = p.unflatten(0, (kv_heads, -1))
        combined = {"mean": grouped.mean(1), "max": grouped.amax(1), "sum": grouped.sum(1)}[wants.combine]
        bits = torch.zeros(kv_heads, p.shape[2], -(-wants.last // 8), dtype=torch.uint8)
        for row in range(max(0, p.shape[1] - wants.last), p.shape[1]):
            place = (first + row) % wants.last
            hit = combined[:, row] > 1.0 / (gap[0, row] >= 0).sum()
            bits[:, :, place // 8] |= hit.to(torch.uint8) << (place % 8)
        return bits
    return p[:, rows].sum(1)
