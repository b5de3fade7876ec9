"""The small operations of a decode step as functions on tensors: see ``small.h``, ``between.h``. All rows are few."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kvatlas.attention.native.ops import ALONE, DTYPES, MAX_ROWS, call, isa, strides


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


class Weights(NamedTuple):
    """Matrices and norms from one attention to the next; the last two belong to the next layer and are None after all.

    out [hidden, attended], mlp_norm [hidden], gate_up [2 inner, hidden], down [hidden, inner]; norm [hidden],
    qkv [width, hidden]. Contiguous, of one dtype.
    """

    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor | None
    qkv: Tensor | None


@functools.cache
def fuses() -> bool:
    """Whether `between` is the faster way: not where matrix products have tiles of their own."""
    return "amx" not in isa()


def between(
    weights: Weights, seen: Tensor, x: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """From one layer's attention to the next one's input, as the separate operations would, in one call.

    seen [n <= 16, attended] is what was attended to, x [n, hidden] the residual, which is followed in place; cos, sin
    [n, 1, D] as for `rope_`. Returns the next attention's input h [n, hidden] and qkv [n, width], whose first `heads`
    heads are rotated. After the last layer both hold nothing.
    """
    (rows, attended), hidden, inner, dim = seen.shape, x.shape[1], weights.down.shape[1], cos.shape[-1]
    assert 0 < rows <= MAX_ROWS and x.shape[0] == rows and x.dtype in DTYPES and not (attended | hidden | inner) % 8
    parts = [part for part in (*weights, seen, x, cos, sin) if part is not None]
    assert all(part.is_contiguous() and part.dtype == x.dtype for part in parts)
    assert weights.out.shape == (hidden, attended) and weights.gate_up.shape == (2 * inner, hidden)
    assert weights.down.shape[0] == hidden and cos.numel() == sin.numel() == rows * dim
    width = 0 if weights.qkv is None else weights.qkv.shape[0]
    assert weights.qkv is None or (weights.qkv.shape[1] == hidden and heads * dim <= width)
    h, qkv = x.new_empty(rows, hidden if width else 0), x.new_empty(rows, width)
    call(
        "kvatlas_between",
        x.dtype == torch.bfloat16,
        *(None if weight is None else weight.data_ptr() for weight in weights),
        seen.data_ptr(),
        x.data_ptr(),
        h.data_ptr(),
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        strides(rows, attended, hidden, inner, width, heads, dim),
        eps,
        1 if weights.down.nbytes < ALONE else torch.get_num_threads(),
    )
    return h, qkv
