"""Which calls the native kernels take over, in terms of tiles. Without a compiler: none, and everything still works."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention.tiles import Partial, Tile


def serves(q: Tensor, k: Tensor) -> bool:
    """True where the native kernels can take these tensors."""
    return False


def attend_tile(q: Tensor, tile: Tile, scale: float, weights: bool) -> Partial:
    raise NotImplementedError


def column_mass(q: Tensor, k: Tensor, lse: Tensor, scale: float, *, first_query: int, causal: bool) -> Tensor:
    raise NotImplementedError
