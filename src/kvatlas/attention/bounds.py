"""How well a page of keys could score at best: from the least and the largest value of each of its dimensions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvatlas.attention import fast
from kvatlas.attention.native import choose


def bound_scores(
    q: Tensor, low: Tensor, high: Tensor, pages: Tensor, combine: Literal["mean", "max", "sum"] = "mean"
) -> Tensor:
    """An upper bound of the unscaled scores that a page's keys get, folded over the query heads of a group.

    A query head's bound is ``sum_d max(q_d * low_d, q_d * high_d)`` (Quest, ICML 2024, section 3.3).

    Args:
        q: ``[B, H, G, D]``.
        low, high: ``[B, H, P, D]`` of q's dtype, per page the least and the largest key value of each dimension.
        pages: ``[B, H]`` int64, how many pages count. What lies past them is never looked at.
        combine: how the bounds of the G query heads become one.

    Returns:
        ``[B, H, P]`` float32, -inf past a row's pages.
    """
    if fast.serves(q, low) and fast.serves(q, high):
        return choose.bound_scores(q, low, high, pages, combine)
    return plain_scores(q, low, high, pages, combine)


def plain_scores(q: Tensor, low: Tensor, high: Tensor, pages: Tensor, combine: str) -> Tensor:
    """The same in PyTorch: above . high + below . low, where above = max(q, 0) and below = min(q, 0).

    Both are linear, so the group is folded before the product unless its best query head counts.
    """
    above, below = q.float().clamp(min=0), q.float().clamp(max=0)
    if combine != "max":
        above, below = above.sum(2, keepdim=True), below.sum(2, keepdim=True)
    scores = above @ high.float().transpose(-1, -2) + below @ low.float().transpose(-1, -2)  # [B, H, G or 1, P]
    rank = scores.amax(2)
    if combine == "mean":
        rank /= q.shape[2]
    past = torch.arange(low.shape[2], device=q.device) >= pages.unsqueeze(-1)
    return rank.masked_fill_(past, float("-inf"))
