"""Codes of 4 or 8 bits in groups along the head dimension: made and undone."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention import fast
from kvatlas.attention.native import packed as native
from kvatlas.attention.native.ops import MAX_DIM
from kvatlas.attention.tiles import Packed

MOST, LEAST = 65504.0, 2.0**-24
"""The largest and the smallest positive float16."""

code_bytes = native.code_bytes


def quantise(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Asymmetric codes of ``x [..., D]`` in groups of ``group`` elements, the last one perhaps shorter.

    Codes are found with scale and zero as float16 has them. Zero is rounded down, so that the least element is not cut
    off, and what that adds to the range goes into the scale: an element is off by half a step at most (and by float16's
    rounding of the scale), however large its group's values are.

    Returns:
        codes uint8 ``[..., code_bytes(D, bits)]`` and scales float16 ``[..., groups, 2]``, as ``Packed`` holds them.
    """
    if x.shape[-1] <= MAX_DIM and fast.serves(x, x):
        return native.quantise(x, bits, group)
    return plain_quantise(x, bits, group)


def plain_quantise(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """The same in PyTorch; its codes and scales are the native ones to the bit."""
    dim, levels = x.shape[-1], 2.0**bits - 1
    values = _grouped(x.float(), group)
    low = values.amin(-1, keepdim=True) + (values * 0).sum(-1, keepdim=True)  # NaN where an element is not finite
    zero = (low - low.abs() * 2.0**-11).clamp(-MOST, MOST).half()
    scale = ((values.amax(-1, keepdim=True) - zero.float()) / levels).clamp(LEAST, MOST).half()
    codes = (values - zero.float()).div_(scale.float()).clamp_(0, levels).round_()
    flat = codes.flatten(-2)[..., :dim].to(torch.uint8)
    return flat if bits == 8 else _halves(flat), torch.cat([scale, zero], -1)


def _grouped(x: Tensor, group: int) -> Tensor:
    """``[..., D]`` -> ``[..., groups, group]``; the last group is filled up by repeating the last element."""
    group = min(group, x.shape[-1])
    short = -x.shape[-1] % group
    if short:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1)
    return x.unflatten(-1, (-1, group))


def _halves(codes: Tensor) -> Tensor:
    """Two codes to a byte: element i below, element i + half above."""
    half = (codes.shape[-1] + 1) // 2
    upper = torch.nn.functional.pad(codes[..., half:], (0, codes.shape[-1] % 2))
    return codes[..., :half] | (upper << 4)


def restore(codes: Tensor, scales: Tensor, bits: int, group: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """``quantise`` undone, to within half a step: ``[..., head_dim]`` of this dtype."""
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)[..., :head_dim]
    values = _grouped(codes.float(), group)
    scale, zero = scales.float().split(1, -1)
    return (values * scale).add_(zero).flatten(-2)[..., :head_dim].to(dtype)


def unpack(packed: Packed, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, n, D]``."""
    how = (packed.bits, packed.group, packed.head_dim, dtype)
    return restore(packed.k, packed.k_scale, *how), restore(packed.v, packed.v_scale, *how)
