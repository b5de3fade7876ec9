"""Matrix products of few rows: the one place that chooses between the native one and PyTorch's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvatlas.attention import native
from kvatlas.attention.native.ops import DTYPES, MAX_ROWS


def few(x: Tensor) -> bool:
    """Whether the native operations for few rows take x."""
    return x.shape[0] <= MAX_ROWS and x.device.type == "cpu" and x.dtype in DTYPES and native.available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in] times weight [out, in]: the one place that chooses the matrix product.

    The native one reads a weight once for up to 16 rows, and a row's result does not depend on how many there are.
    """
    if bias is None and x.shape[1] % 8 == 0 and few(x):
        return native.linear_small(x.contiguous(), weight)
    return F.linear(x, weight, bias)
