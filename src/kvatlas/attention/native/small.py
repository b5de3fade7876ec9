"""The small operations of a decode step as functions on tensors: see ``small.h``. All rows are few."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention.native.ops import call


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., n] and weight [n] of one dtype, contiguous: normalised in float32, rounded, times weight."""
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    out, n = torch.empty_like(x), x.shape[-1]
    half = x.dtype == torch.bfloat16
    call("kvatlas_rms_norm", half, x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // n, n, eps)
    return out


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, heads, D] in place; cos, sin [n, 1, D] of its dtype, sin's first half negated. Returns x."""
    rows, heads, dim = x.shape
    assert x.stride(2) == 1 and x.stride(1) == dim and cos.is_contiguous() and sin.is_contiguous()
    assert x.dtype == cos.dtype == sin.dtype and cos.numel() == sin.numel() == rows * dim
    half = x.dtype == torch.bfloat16
    call("kvatlas_rope", half, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, dim, x.stride(0))
    return x
