"""One new query per sequence against the tiles of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from kvatlas.attention import fast
from kvatlas.attention.packed import unpack
from kvatlas.attention.tiles import TILE, Partial, Rotate, Tile, merge


def attend_step(
    q: Tensor,
    tiles: Iterable[Tile],
    *,
    scale: float,
    weights: bool = False,
    sink: Tensor | None = None,
    rotate: Rotate | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend with one query per sequence and query head.

    Args:
        q: ``[B, Hq, D]``; query head ``g`` of KV head ``h`` is number ``h * G + g``.
        tiles: the keys and values; their statistics are laid side by side in this order.
        weights: also return the softmax weight that each key received.
        sink: ``[Hq]`` learned logits that take part in the softmax (GPT-OSS).
        rotate: needed when a tile has ``query_at``.

    Returns:
        output ``[B, Hq, D]`` in q's dtype and weights ``[B, Hq, n]`` float32 (0 for padding), or None.
    """
    parts = []
    for tile in tiles:
        seen_from = q if tile.query_at is None else _rotated(q, tile.query_at, rotate)
        parts.append(attend_tile(seen_from, tile, scale, weights))
    total = merge(parts, None if sink is None else sink.view(1, -1))
    return total.out, total.weights


def attend_tile(q: Tensor, tile: Tile, scale: float, weights: bool) -> Partial:
    """One tile: the native kernel where it serves, else plain PyTorch, which is also its test."""
    if fast.serves(q, q if tile.packed is not None else tile.k):
        return fast.attend_tile(q, tile, scale, weights)
    return plain_tile(q, tile, scale, weights)


def plain_tile(q: Tensor, tile: Tile, scale: float, weights: bool) -> Partial:
    """Batched products over grouped queries; keys are never repeated, gathers are a tile at a time."""
    pieces: list[tuple[Tensor, Tensor, Tensor | None]]
    if tile.packed is not None:
        pieces = [(part.k, part.v, part.lengths) for part in raw_tiles(tile, q.dtype)]
    elif tile.table is not None:
        pieces = list(_paged_pieces(tile))
    elif tile.index is not None:
        pieces = list(_gathered_pieces(tile))
    else:
        pieces = [(tile.k, tile.v, tile.lengths)]
    return merge([_piece(q, k, v, lengths, scale, weights) for k, v, lengths in pieces])


def _piece(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, weights: bool) -> Partial:
    batch, heads, n, dim = k.shape
    grouped = q.view(batch, heads, -1, dim)
    scores = torch.matmul(grouped, k.transpose(-1, -2)).float().mul_(scale)  # [B, H, G, n]
    if lengths is not None:
        past = torch.arange(n, device=q.device) >= lengths.unsqueeze(-1)
        scores.masked_fill_(past.unsqueeze(2), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    p = scores.sub_(lse).exp_().nan_to_num_(0.0)
    out = torch.matmul(p.to(v.dtype), v).reshape(batch, -1, dim)
    kept = p.reshape(batch, -1, n) if weights else None
    return Partial(out, lse.reshape(batch, -1), kept)


def _rotated(q: Tensor, query_at: Tensor, rotate: Rotate | None) -> Tensor:
    assert rotate is not None, "a tile with query_at needs the model's rotation"
    return rotate(q.unsqueeze(2), query_at).squeeze(2)


def _gathered_pieces(tile: Tile) -> Iterable[tuple[Tensor, Tensor, Tensor | None]]:
    assert tile.index is not None and tile.count is not None
    for start in range(0, tile.index.shape[-1], TILE):
        index = tile.index[..., start : start + TILE]
        yield take_slots(tile.k, index), take_slots(tile.v, index), tile.count - start


def raw_tiles(tile: Tile, dtype: torch.dtype) -> Iterator[Tile]:
    """A packed tile as decoded ones of at most TILE slots, in order; any other tile as it is."""
    packed, width = tile.packed, tile.width
    if packed is None:
        yield tile
        return
    for start in range(0, width, TILE):
        part = slice(start, min(width, start + TILE))
        number = tile.lengths if tile.index is None else tile.count
        k, v = unpack(packed.map(partial(_slots_of, tile, part)), dtype)
        yield Tile(
            k,
            v,
            None if number is None else (number - start).clamp(0, part.stop - start),
            query_at=tile.query_at,
            positions=None if tile.positions is None else tile.positions[..., part],
        )


def _slots_of(tile: Tile, part: slice, column: Tensor) -> Tensor:
    return column[:, :, part] if tile.index is None else take_slots(column, tile.index[..., part])


def take_slots(column: Tensor, index: Tensor) -> Tensor:
    """``column [B, H, cap, ...]`` at slots ``index [B, H, n]`` -> ``[B, H, n, ...]``."""
    batch, heads, cap = column.shape[:3]
    if column.is_contiguous():
        base = torch.arange(batch * heads, device=index.device).view(batch, heads, 1) * cap
        flat = (index.clamp(0, cap - 1) + base).reshape(-1)
        return (
            column.reshape(batch * heads * cap, *column.shape[3:])
            .index_select(0, flat)
            .view(*index.shape, *column.shape[3:])
        )
    b = torch.arange(batch, device=index.device).view(-1, 1, 1)
    h = torch.arange(heads, device=index.device).view(1, -1, 1)
    return column[b, h, index.clamp(0, cap - 1)]


def _paged_pieces(tile: Tile) -> Iterable[tuple[Tensor, Tensor, Tensor | None]]:
    assert tile.table is not None and tile.lengths is not None
    block = tile.k.shape[-2]
    step = max(1, TILE // block)
    for start in range(0, tile.table.shape[-1], step):
        table = tile.table[:, start : start + step]
        yield gather_blocks(tile.k, table), gather_blocks(tile.v, table), tile.lengths - start * block


def gather_blocks(pool: Tensor, table: Tensor) -> Tensor:
    """``pool [blocks, H, block, ...]`` at ``table [B, m]`` -> ``[B, H, m * block, ...]`` (a copy)."""
    gathered = pool[table]  # [B, m, H, block, ...]
    batch, m, heads, block = gathered.shape[:4]
    return gathered.transpose(1, 2).reshape(batch, heads, m * block, *gathered.shape[4:])
