"""Attention of a run of new tokens of one sequence over what is stored and over each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvatlas.attention.decode import gather_blocks, raw_tiles
from kvatlas.attention.flash import flash, future, row_scores
from kvatlas.attention.mass import hit_bits, key_statistic
from kvatlas.attention.tiles import Partial, Rotate, Tile, Wants, merge

WINDOW_ROWS = 256
"""Query rows that a windowed layer handles at once."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """How to attend: the model's facts of this layer and the mode.

    Attributes:
        scale: of the scores.
        window: the model layer's own sliding window in tokens, or None.
        sink: ``[Hq]`` learned sink logits, or None.
        eager: materialise the score matrix, as the study's systems did. Memory grows with the square.
    """

    scale: float
    window: int | None = None
    sink: Tensor | None = None
    eager: bool = False


def attend_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    how: Prefill,
    *,
    past: Sequence[Tile] = (),
    first: int = 0,
    wants: Wants | None = None,
    ends: int | None = None,
    rotate: Rotate | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`attend_for` with one statistic or none."""
    out, statistics = attend_for(q, k, v, how, (wants,), past=past, first=first, ends=ends, rotate=rotate)
    return out, statistics[0]


def attend_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    how: Prefill,
    wants: Sequence[Wants | None],
    *,
    past: Sequence[Tile] = (),
    first: int = 0,
    ends: int | None = None,
    rotate: Rotate | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Attend causally with T new tokens of one sequence, once for any number of statistics.

    Args:
        q: ``[Hq, T, D]``; k, v: ``[H, T, D]``, all raw.
        wants: the per-key statistics to return, None for none.
        past: tiles of what is stored for this sequence (batch of one), without holes.
        first: true position of the first new token.
        ends: position after the last token of the prompt that the run belongs to (None: the run's own end).
        rotate: needed when a tile has ``query_at``.

    Returns:
        output ``[T, Hq, D]`` and each statistic of ``past + T`` keys (see ``Wants``; stored keys first), or None.
    """
    past = [piece for tile in past for piece in raw_tiles(tile, q.dtype)]
    counted = [_counted(each, first, q.shape[1], ends) for each in wants]
    if how.eager and not past and how.window is None:
        return _eager(q, k, v, how, wants, counted, first)
    parts = [_over_past(q, tile, how, first, rotate) for tile in past]
    parts.append(_windowed(q, k, v, how) if how.window and how.window < q.shape[1] else _causal(q, k, v, how))
    total = merge(parts, None if how.sink is None else how.sink.view(-1, 1))
    out = total.out.transpose(0, 1)
    if all(each is None for each in wants):
        return out, [None] * len(wants)
    stored = [_contiguous(tile)[0] for tile in past]
    seen_keys = torch.arange(1, q.shape[1] + 1, device=q.device) + sum(keys.shape[1] for keys in stored)
    behind = [first - at for at in _positions(past, stored)]

    def statistic(wanted: Wants, counted: int) -> Tensor:
        columns = [
            key_statistic(_seen_from(q, tile, rotate), keys, total.lse, wanted, scale=how.scale, causal=False,
                          counted=counted, first=first, seen_keys=seen_keys, behind=gap)
            for tile, keys, gap in zip(past, stored, behind)
        ]  # fmt: skip
        columns.append(
            key_statistic(q, k, total.lse, wanted, scale=how.scale, causal=True, counted=counted, first=first,
                          seen_keys=seen_keys)
        )  # fmt: skip
        return torch.cat(columns, dim=1)

    found = [None if each is None else statistic(each, rows) for each, rows in zip(wants, counted)]
    return out, found


def _causal(q: Tensor, k: Tensor, v: Tensor, how: Prefill) -> Partial:
    return flash(q, k, v, scale=how.scale, causal=True)


def _windowed(q: Tensor, k: Tensor, v: Tensor, how: Prefill) -> Partial:
    """The model's own sliding window: blocks of rows against the keys they can see."""
    assert how.window is not None
    parts = []
    for start in range(0, q.shape[1], WINDOW_ROWS):
        stop = min(q.shape[1], start + WINDOW_ROWS)
        left = max(0, start - how.window + 1)
        gap = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(left, stop, device=q.device)
        mask = ((gap >= 0) & (gap < how.window)).unsqueeze(0)
        parts.append(
            flash(q[:, start:stop], k[:, left:stop], v[:, left:stop], scale=how.scale, causal=False, mask=mask)
        )
    return Partial(torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1))


def _over_past(q: Tensor, tile: Tile, how: Prefill, first: int, rotate: Rotate | None) -> Partial:
    k, v = _contiguous(tile)
    mask = None
    if how.window is not None:
        assert tile.positions is not None, "a windowed layer needs the positions of what it stores"
        query = torch.arange(first, first + q.shape[1], device=q.device)
        mask = (query.view(1, -1, 1) - tile.positions[0].unsqueeze(1)) < how.window  # [H, T, n]
    return flash(_seen_from(q, tile, rotate), k, v, scale=how.scale, causal=False, mask=mask)


def _seen_from(q: Tensor, tile: Tile, rotate: Rotate | None) -> Tensor:
    if tile.query_at is None:
        return q
    assert rotate is not None, "a tile with query_at needs the model's rotation"
    return rotate(q.unsqueeze(0), tile.query_at).squeeze(0)


def _contiguous(tile: Tile) -> tuple[Tensor, Tensor]:
    """Keys and values ``[H, n, D]`` of a batch-of-one tile."""
    if tile.table is not None:
        assert tile.lengths is not None
        n = int(tile.lengths[0, 0])
        return gather_blocks(tile.k, tile.table)[0, :, :n], gather_blocks(tile.v, tile.table)[0, :, :n]
    return tile.k[0], tile.v[0]


def _positions(past: Sequence[Tile], stored: Sequence[Tensor]) -> Iterator[Tensor]:
    """True positions ``[H or 1, n]`` of stored keys: as the tiles say, else one after another from 0."""
    start = 0
    for tile, keys in zip(past, stored):
        n = keys.shape[1]
        in_order = torch.arange(start, start + n, device=keys.device).unsqueeze(0)
        yield in_order if tile.positions is None else tile.positions[0]
        start += n


def _counted(wants: Wants | None, first: int, n: int, ends: int | None) -> int:
    """The first row of a run whose query counts."""
    if wants is None or wants.kind not in ("window", "hits") or wants.last is None:
        return 0
    return min(n, max(0, (first + n if ends is None else ends) - wants.last - first))


def _eager(
    q: Tensor, k: Tensor, v: Tensor, how: Prefill, wants: Sequence[Wants | None], counted: Sequence[int], first: int
) -> tuple[Tensor, list[Tensor | None]]:
    """The whole matrix at once: what scoring prefills did before, kept to reproduce what the study measured."""
    heads, group, rows = k.shape[0], q.shape[0] // k.shape[0], q.shape[1]
    scores = row_scores(q.view(heads, group, rows, -1), k, how.scale)
    scores = scores.masked_fill(future(rows, q.device), float("-inf"))
    lse = torch.logsumexp(scores, -1, keepdim=True)
    if how.sink is not None:
        lse = torch.logaddexp(lse, how.sink.float().view(heads, group, 1, 1))
    p = torch.exp(scores - lse)
    out = torch.matmul(p.to(v.dtype), v.unsqueeze(1)).reshape(q.shape).transpose(0, 1)
    found = [None if each is None else _matrix_statistic(p, each, rows, first) for each, rows in zip(wants, counted)]
    return out, found


def _matrix_statistic(p: Tensor, wants: Wants, counted: int, first: int) -> Tensor:
    """``key_statistic`` of weights ``[H, G, T, T]``."""
    rows, p = p.shape[-1], p[:, :, counted:]
    if wants.kind == "hits":
        seen = torch.arange(counted + 1, rows + 1, device=p.device)
        bits = hit_bits(p, seen, first + counted, wants)
        return bits
    p = p.flatten(0, 1)
    if wants.kind == "band" and wants.last is not None:
        gap = torch.arange(rows, device=p.device)[:, None] - torch.arange(rows, device=p.device)
        p = p.masked_fill(gap >= wants.last, 0.0)
    return p.sum(1)
