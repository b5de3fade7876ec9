"""Zeros on the system's large pages: rows that lie scattered are found without a walk through its page tables."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SIZE = 1 << 21
"""Bytes of a large page on x86 and, with pages of 4 KiB, on ARM."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.zeros``. On a CPU under Linux large pages are asked for wherever one fits inside the tensor, so that
    no byte more than the tensor's is held; a system that has none to give gives small ones.
    """
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.device.type == "cpu" and out.nbytes >= SIZE and (ask := _madvise()) is not None:
        first = -(-out.data_ptr() // SIZE) * SIZE
        whole = (out.data_ptr() + out.nbytes - first) // SIZE * SIZE
        if whole > 0:
            ask(first, whole, mmap.MADV_HUGEPAGE)  # a wish: whether it was granted does not matter
    return out.zero_()


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's call, or None where there is none of this meaning."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found  # type: ignore[no-any-return]
