"""The best slots of a ranking: the native selection where it serves, else PyTorch's top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention import native
from kvatlas.attention.native.choose import choose


def best_slots(rank: Tensor, count: Tensor, width: int) -> Tensor:
    """The ``count [B, H]`` best of ``rank [B, H, n]`` float32 -> slots ``[B, H, width]`` int64.

    Ascending on the CPU, best first elsewhere; what lies past a row's count does not matter.
    """
    if rank.device.type == "cpu" and rank.dtype == torch.float32 and native.available():
        return choose(rank, count, width)
    return rank.topk(width, dim=-1).indices
