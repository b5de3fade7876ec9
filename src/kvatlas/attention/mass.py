"""Per-key statistics of prefill attention from each row's log-sum-exp, by tiles: no matrix is kept.

The mass that a key received is a column sum of the softmax. A flash pass gives each row's log-sum-exp; this second
pass recomputes the scores tile by tile and sums the columns, in linear memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    seen_keys: Tensor | None = None,
    behind: Tensor | None = None,
) -> Tensor:
    """The statistic ``wants`` of every key.

    Args:
        q: ``[Hq, Tq, D]``; k: ``[H, Tk, D]``; lse: ``[Hq, Tq]`` over *all* keys of the row.
        causal: query i sees keys 0..i of these (Tq == Tk), else every one of them.
        seen_keys: ``[Tq]`` how many keys each query saw in all (``hits`` only).
        behind: ``[H or 1, Tk]`` how far each key lies behind the first query (``band`` over stored keys only).

    Returns:
        ``[Hq, Tk]`` float32.
    """
    first = 0
    if wants.kind in ("window", "hits") and wants.last is not None:
        first = max(0, q.shape[1] - wants.last)
    band = wants.last if wants.kind == "band" else None
    if wants.kind != "hits" and band is None and fast.serves(q, k):
        return fast.column_mass(q, k, lse, scale, first_query=first, causal=causal)
    return _tiled_statistic(q, k, lse, wants, scale, causal, first, band, seen_keys, behind)


def _tiled_statistic(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    wants: Wants,
    scale: float,
    causal: bool,
    first: int,
    band: int | None,
    seen_keys: Tensor | None,
    behind: Tensor | None,
) -> Tensor:
    heads, group = k.shape[0], q.shape[0] // k.shape[0]
    rows, keys = q.shape[1], k.shape[1]
    grouped, row_lse = q.view(heads, group, rows, -1), lse.view(heads, group, rows, 1)
    total = torch.zeros(heads, group, keys, dtype=torch.promote_types(lse.dtype, torch.float32), device=q.device)
    step = max(1, min(256, SCORES_AT_ONCE // (q.shape[0] * keys)))
    for start in range(first, rows, step):
        stop = min(rows, start + step)
        left = max(0, start - band + 1) if band is not None and causal else 0
        right = stop if causal else keys
        p = row_scores(grouped[:, :, start:stop], k[:, left:right], scale).sub_(row_lse[:, :, start:stop]).exp_()
        hidden = _hidden(start, stop, left, right, causal, band, behind, q.device)
        if hidden is not None:
            p.masked_fill_(hidden, 0.0)
        if wants.kind == "hits":
            assert seen_keys is not None
            p = (p > (1.0 / seen_keys[start:stop]).view(1, 1, -1, 1)).to(total.dtype)
        total[..., left:right] += p.sum(2)
    return total.view(q.shape[0], keys)


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
