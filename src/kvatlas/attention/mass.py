"""Per-key statistics of prefill attention from each row's log-sum-exp, by tiles: no matrix is kept.

The mass that a key received is a column sum of the softmax. A flash pass gives each row's log-sum-exp; this second
pass recomputes the scores tile by tile and sums the columns, in linear memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvatlas.attention import fast
from kvatlas.attention.flash import SCORES_AT_ONCE, row_scores
from kvatlas.attention.tiles import Wants


def key_statistic(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    wants: Wants,
    *,
    scale: float,
    causal: bool,
    counted: int = 0,
    first: int = 0,
    seen_keys: Tensor | None = None,
    behind: Tensor | None = None,
) -> Tensor:
    """The statistic ``wants`` of every key.

    Args:
        q: ``[Hq, Tq, D]``; k: ``[H, Tk, D]``; lse: ``[Hq, Tq]`` over *all* keys of the row.
        causal: query i sees keys 0..i of these (Tq == Tk), else every one of them.
        counted: the first row that counts.
        first: true position of row 0 (``hits`` only).
        seen_keys: ``[Tq]`` how many keys each query saw in all (``hits`` only).
        behind: ``[H or 1, Tk]`` how far each key lies behind the first query (``band`` over stored keys only).

    Returns:
        ``[Hq, Tk]`` float32, or bits ``[H, Tk, bytes]`` (see ``Wants``).
    """
    band = wants.last if wants.kind == "band" else None
    if band is not None and _farthest(q, behind) < band:  # no key is out of it
        band = None
    if wants.kind != "hits" and band is None and fast.serves(q, k):
        return fast.column_mass(q, k, lse, scale, first_query=counted, causal=causal)
    rows = _weights(q, k, lse, scale, causal, counted, band, behind)
    if wants.kind == "hits":
        assert seen_keys is not None
        return _hits(k, rows, wants, first, seen_keys)
    return _tiled_statistic(q, k, rows, lse.dtype)


def _farthest(q: Tensor, behind: Tensor | None) -> int:
    """The largest distance between a query and a key that it may see."""
    return q.shape[1] - 1 + (int(behind.max()) if behind is not None and behind.numel() else 0)


def _tiled_statistic(q: Tensor, k: Tensor, rows: Iterator[tuple[slice, slice, Tensor]], dtype: torch.dtype) -> Tensor:
    heads, group = k.shape[0], q.shape[0] // k.shape[0]
    total = torch.zeros(heads, group, k.shape[1], dtype=torch.promote_types(dtype, torch.float32), device=q.device)
    for _, keys, p in rows:
        total[..., keys] += p.sum(2)
    return total.flatten(0, 1)


def _hits(
    k: Tensor, rows: Iterator[tuple[slice, slice, Tensor]], wants: Wants, first: int, seen_keys: Tensor
) -> Tensor:
    assert wants.last is not None
    bits = torch.zeros(*k.shape[:2], -(-wants.last // 8), dtype=torch.uint8, device=k.device)
    for queries, keys, p in rows:
        bits[:, keys] |= hit_bits(p, seen_keys[queries], first + queries.start, wants)
    return bits


def _weights(
    q: Tensor, k: Tensor, lse: Tensor, scale: float, causal: bool, counted: int, band: int | None, behind: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles: which queries (from ``counted`` on), which keys, and their weights ``[H, G, t, n]``, 0 where hidden."""
    heads, group = k.shape[0], q.shape[0] // k.shape[0]
    rows, keys = q.shape[1], k.shape[1]
    grouped, row_lse = q.view(heads, group, rows, -1), lse.view(heads, group, rows, 1)
    step = max(1, min(256, SCORES_AT_ONCE // (q.shape[0] * keys)))
    for start in range(counted, rows, step):
        stop = min(rows, start + step)
        left = max(0, start - band + 1) if band is not None and causal else 0
        right = stop if causal else keys
        p = row_scores(grouped[:, :, start:stop], k[:, left:right], scale).sub_(row_lse[:, :, start:stop]).exp_()
        hidden = _hidden(start, stop, left, right, causal, band, behind, q.device)
        if hidden is not None:
            p.masked_fill_(hidden, 0.0)
        yield slice(start, stop), slice(left, right), p


def hit_bits(p: Tensor, seen: Tensor, first: int, wants: Wants) -> Tensor:
    """Weights ``[H, G, t, n]`` of queries from position ``first`` on, which saw ``seen [t]`` keys -> their hit bits."""
    combined = p.amax(1) if wants.combine == "max" else p.mean(1) if wants.combine == "mean" else p.sum(1)
    hit = combined > 1.0 / seen.view(1, -1, 1)  # [H, t, n]
    assert wants.last is not None
    ring = hit.new_zeros(hit.shape[0], wants.last, hit.shape[2])
    at = torch.arange(first, first + hit.shape[1], device=hit.device) % wants.last
    ring[:, at] = hit
    return pack_bits(ring.transpose(1, 2))


def pack_bits(flags: Tensor) -> Tensor:
    """``[..., n]`` bool -> ``[..., ceil(n / 8)]`` uint8, flag i being bit ``i % 8`` of byte ``i // 8``."""
    bytes_ = pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (bytes_ << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(-1, dtype=torch.uint8)


def _hidden(
    start: int,
    stop: int,
    left: int,
    right: int,
    causal: bool,
    band: int | None,
    behind: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """``[t, n]`` or ``[H or 1, 1, t, n]``: True where the key does not count for the query."""
    query = torch.arange(start, stop, device=device).unsqueeze(1)
    if causal:
        gap = query - torch.arange(left, right, device=device)
        return gap < 0 if band is None else (gap < 0) | (gap >= band)
    if band is None:
        return None
    assert behind is not None, "a band over stored keys needs their distances"
    return (query + behind.unsqueeze(1) >= band).unsqueeze(1)
