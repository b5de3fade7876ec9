"""Which calls the native kernels take over, in terms of tiles. Without a compiler: none, and everything still works."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention import native
from kvatlas.attention.native.ops import DTYPES, MAX_DIM
from kvatlas.attention.native.packed import decode_packed
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
    lengths, index, count = (None if x is None else x.contiguous() for x in (tile.lengths, tile.index, tile.count))
    if lengths is None and tile.table is None and index is None:
        lengths = torch.full(tile.k.shape[:2], tile.k.shape[2], dtype=torch.int64)
    if tile.packed is not None:
        done = decode_packed(q, tile.packed, lengths, scale, index, count, weights, tile.width)
    elif tile.table is not None:
        assert lengths is not None
        done = native.decode_attend_paged(q, tile.k, tile.v, tile.table, lengths, scale, weights, tile.width)
    else:
        done = native.decode_attend(q, tile.k, tile.v, lengths, scale, index, count, weights, tile.width)
    return Partial(*done)


def column_mass(q: Tensor, k: Tensor, lse: Tensor, scale: float, *, first_query: int, causal: bool) -> Tensor:
    """``mass.key_statistic`` of kinds mass and window by the native kernel."""
    return native.column_mass(q, k, lse, scale, first_query=first_query, causal=causal)
