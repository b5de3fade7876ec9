"""Which calls the native kernels take over, in terms of tiles. Without a compiler: none, and everything still works."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention import native
from kvatlas.attention.native.ops import DTYPES, MAX_DIM
from kvatlas.attention.tiles import Partial, Tile


def serves(q: Tensor, k: Tensor) -> bool:
    """True where the native kernels can take these queries and keys ``[.., D]``; says once why not, if they cannot."""
    dim, dtype = q.shape[-1], q.dtype
    if (
        q.device.type != "cpu"
        or dtype not in DTYPES
        or k.dtype != dtype
        or dim % 8
        or dim > MAX_DIM
        or k.stride(-1) != 1
    ):
        return False
    if native.available():
        return True
    native.note_once()
    return False


def attend_tile(q: Tensor, tile: Tile, scale: float, weights: bool) -> Partial:
    """``decode.plain_tile`` by the native kernel: nothing is gathered, decoded or copied."""
    q = q.contiguous()
    if tile.table is not None:
        assert tile.lengths is not None
        done = native.decode_attend_paged(q, tile.k, tile.v, tile.table, tile.lengths, scale, weights, tile.width)
    elif tile.index is not None:
        assert tile.count is not None
        index, count = tile.index.contiguous(), tile.count.contiguous()
        done = native.decode_attend(q, tile.k, tile.v, None, scale, index, count, weights, tile.width)
    else:
        lengths = tile.lengths
        if lengths is None:
            lengths = torch.full(tile.k.shape[:2], tile.k.shape[2], dtype=torch.int64)
        done = native.decode_attend(q, tile.k, tile.v, lengths.contiguous(), scale, probs=weights, width=tile.width)
    return Partial(*done)


def column_mass(q: Tensor, k: Tensor, lse: Tensor, scale: float, *, first_query: int, causal: bool) -> Tensor:
    """``mass.key_statistic`` of kinds mass and window by the native kernel."""
    return native.column_mass(q, k, lse, scale, first_query=first_query, causal=causal)
