"""Attention over packed keys and values, and the making of codes, as functions on tensors: see ``packed.h``."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention.native.ops import DTYPES, MAX_DIM, MAX_GROUP, call, outputs, strides, threads, weights_width
from kvatlas.attention.tiles import Packed


def decode_packed(
    q: Tensor,
    packed: Packed,
    lengths: Tensor | None,
    scale: float,
    index: Tensor | None = None,
    count: Tensor | None = None,
    probs: bool = False,
    width: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``ops.decode_attend`` over codes: nothing but a block of rows at a time is ever decoded, and into float32.

    q [B, Hq, D] contiguous, D a multiple of 8. lengths [B, H], or index [B, H, n] and count [B, H]: int64, contiguous.
    """
    batch, query_heads, dim = q.shape
    heads, n = packed.k.shape[1:3]
    number = count if index is not None else lengths
    assert q.dtype in DTYPES and q.is_contiguous() and dim % 8 == 0 and dim <= MAX_DIM and dim == packed.head_dim
    assert query_heads % heads == 0 and query_heads // heads <= MAX_GROUP
    assert number is not None and number.dtype == torch.int64 and number.shape == (batch, heads)
    assert number.is_contiguous()
    for codes, scales in ((packed.k, packed.k_scale), (packed.v, packed.v_scale)):
        assert codes.dtype == torch.uint8 and codes.shape == (batch, heads, n, code_bytes(dim, packed.bits))
        assert scales.dtype == torch.float16 and scales.shape == (batch, heads, n, -(-dim // packed.group), 2)
        assert codes.stride(3) == 1 and scales.stride()[3:] == (2, 1)
    index_width = 0
    if index is not None:
        index_width = index.shape[2]
        assert index.dtype == torch.int64 and index.is_contiguous() and index.shape[:2] == (batch, heads)
    out, lse, weights = outputs(q, weights_width(probs, width, number, index))
    sides = (packed.k, packed.k_scale, packed.v, packed.v_scale)
    call(
        "kvatlas_decode_packed",
        q.dtype == torch.bfloat16,
        q.data_ptr(),
        *(side.data_ptr() for side in sides),
        out.data_ptr(),
        lse.data_ptr(),
        None if weights is None else weights.data_ptr(),
        batch,
        heads,
        query_heads // heads,
        dim,
        packed.bits,
        packed.group,
        strides(*(apart for side in sides for apart in side.stride()[:3])),
        number.data_ptr(),
        None if index is None else index.data_ptr(),
        index_width,
        0 if weights is None else weights.shape[2],
        scale,
        threads(batch * heads * (index_width or n) * dim * 4),
    )
    return out, lse, weights


def code_bytes(dim: int, bits: int) -> int:
    """Bytes of a row's codes."""
    return dim if bits == 8 else (dim + 1) // 2


def quantise(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """``packed.quantise`` of x [..., D], D up to 256."""
    dim = x.shape[-1]
    x = x.contiguous()
    assert x.dtype in DTYPES and dim <= MAX_DIM and bits in (4, 8) and group >= 1
    codes = torch.empty(*x.shape[:-1], code_bytes(dim, bits), dtype=torch.uint8)
    scales = torch.empty(*x.shape[:-1], -(-dim // group), 2, dtype=torch.float16)
    rows, size = x.numel() // dim, threads(x.nbytes)
    call(
        "kvatlas_quantise",
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        rows,
        dim,
        bits,
        group,
        size,
    )
    return codes, scales
