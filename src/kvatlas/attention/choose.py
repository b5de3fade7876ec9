"""The best slots of a ranking: the native selection where it serves, else PyTorch's top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention import native
from kvatlas.attention.decode import take_slots
from kvatlas.attention.native.choose import choose, copy_rows
from kvatlas.attention.native.ops import DTYPES


def best_slots(rank: Tensor, count: Tensor, width: int) -> Tensor:
    """The ``count [B, H]`` best of ``rank [B, H, n]`` float32 -> slots ``[B, H, width]`` int64.

    Ascending on the CPU, best first elsewhere; what lies past a row's count does not matter.
    """
    if rank.dtype == torch.float32 and native_serves(rank):
        return choose(rank, count, width)
    return rank.topk(width, dim=-1).indices


def native_serves(x: Tensor) -> bool:
    """True where the native kernels rank and choose for x."""
    return x.device.type == "cpu" and x.dtype in DTYPES and x.stride(-1) == 1 and native.available()


def move(to: Tensor, source: Tensor, index: Tensor | None = None) -> int:
    """Copy slots ``index [B, H, n]`` (or all) of ``source [B, H, slots, ..]`` into ``to [B, H, n, ..]``; its bytes."""
    if to.shape[2] == 0:
        return 0
    if to.device.type == "cpu" and native.available():
        copy_rows(to, source, index)
    else:
        to.copy_(source if index is None else take_slots(source, index), non_blocking=True)
    return to.nbytes
