"""Non-uniform levels: found by weighted k-means on the line, looked up, and packed so that 3 bits are 3 bits.

k-means in one dimension needs no library: sorted values make every cluster an interval, so an iteration is a search for
the midpoints and a difference of running sums, whatever the number of values. It starts where many levels would lie at
best (their density goes with the cube root of the values'; Panter and Dite, 1951), hence from no random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 50
"""At most so many of Lloyd's iterations (the authors' number)."""
BINS = 256
"""Of the histogram from which the first levels are taken."""
EIGHT = 8
"""Codes that are packed together: eight codes of ``bits`` bits are ``bits`` bytes."""


def fit_levels(x: Tensor, weights: Tensor, count: int, iterations: int = ITERATIONS) -> Tensor:
    """Levels with the least weighted squared error, by k-means.

    Args:
        x: ``[N]`` values, N at least 1.
        weights: ``[N]``, not negative: what an error of each value costs.
        count: levels.

    Returns:
        ``[count]`` float32 in ascending order. Where there are fewer distinct values, some levels are the same.
    """
    x, order = x.double().sort()
    w = weights.double()[order]
    w = w if bool(w.sum() > 0) else torch.ones_like(w)
    mass, moment = _running(w), _running(w * x)
    levels = _first_levels(x, w, count)
    for _ in range(iterations):
        edges = torch.searchsorted(x, _midpoints(levels))
        edges = torch.cat([edges.new_zeros(1), edges, edges.new_full((1,), len(x))])
        inside = mass[edges].diff()
        moved = torch.where(inside > 0, moment[edges].diff() / inside.clamp(min=1e-300), levels).sort().values
        if torch.equal(moved, levels):
            break
        levels = moved
    return levels.float()


def nearest_level(x: Tensor, levels: Tensor) -> Tensor:
    """Codes ``[...]`` int32 of the nearest of ``levels [count]``, which ascend."""
    return torch.bucketize(x, _midpoints(levels), out_int32=True)


def at_level(codes: Tensor, levels: Tensor) -> Tensor:
    """The levels ``[...]`` of codes ``[...]`` int32."""
    return levels.index_select(0, codes.flatten()).view(codes.shape)


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of n packed codes."""
    return -(-n // EIGHT) * bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., n]`` int32 -> ``[..., packed_bytes(n, bits)]`` uint8; n is filled up to a multiple of eight."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % EIGHT)).unflatten(-1, (-1, EIGHT))
    word = (codes << _steps(EIGHT, bits, codes)).sum(-1, keepdim=True, dtype=torch.int32)
    return ((word >> _steps(bits, 8, codes)) & 255).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The ``n`` codes ``[..., n]`` int32 of ``pack``."""
    parts = packed.unflatten(-1, (-1, bits)).int()
    word = (parts << _steps(bits, 8, parts)).sum(-1, keepdim=True, dtype=torch.int32)
    codes = (word >> _steps(EIGHT, bits, parts)) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :n]


def _first_levels(x: Tensor, weights: Tensor, count: int) -> Tensor:
    """Equal shares of the cube root of the values' density; x ascends."""
    width = ((x[-1] - x[0]) / BINS).clamp(min=torch.finfo(x.dtype).tiny)
    bins = ((x - x[0]) / width).long().clamp(max=BINS - 1)
    density = torch.zeros(BINS, dtype=x.dtype, device=x.device).index_add_(0, bins, weights).pow(1 / 3)
    shares = (torch.arange(count, device=x.device) + 0.5) / count * density.sum()
    return x[0] + (torch.searchsorted(density.cumsum(0), shares) + 0.5) * width


def _steps(count: int, size: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * size, size, dtype=torch.int32, device=like.device)


def _running(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.cumsum(0)])


def _midpoints(levels: Tensor) -> Tensor:
    return (levels[1:] + levels[:-1]) / 2
