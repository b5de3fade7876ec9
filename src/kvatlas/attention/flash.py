"""Many queries against many keys in linear memory, with each row's log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention.tiles import Partial

SCORES_AT_ONCE = 4 << 20
"""Score elements that a plain tile may hold (float32: 16 MiB)."""


def flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, mask: Tensor | None = None) -> Partial:
    """Softmax attention of one sequence.

    Args:
        q: ``[Hq, Tq, D]``.
        k, v: ``[H, Tk, D]``; keys are shared by the group through a stride of zero, never copied.
        causal: query i sees keys 0..i (needs Tq == Tk).
        mask: ``[H or 1, Tq, Tk]`` bool, True = seen; instead of ``causal``.

    Returns:
        Partial with out ``[Hq, Tq, D]`` and lse ``[Hq, Tq]`` float32.
    """
    heads, group = k.shape[0], q.shape[0] // k.shape[0]
    grouped = q.view(heads, group, *q.shape[1:])
    if _fused_serves(q, mask):
        out, lse = _fused(grouped, _shared(k, group), _shared(v, group), scale, causal, mask)
    else:
        out, lse = _tiled(grouped, k, v, scale, causal, mask)
    return Partial(out.reshape(q.shape), lse.reshape(q.shape[:2]).float())


def _shared(x: Tensor, group: int) -> Tensor:
    return x.unsqueeze(1).expand(x.shape[0], group, *x.shape[1:])


def _fused_serves(q: Tensor, mask: Tensor | None) -> bool:
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and mask is None and q.shape[-1] % 8 == 0


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        bias = None if mask is None else mask.unsqueeze(1).expand(q.shape[0], 1, *mask.shape[1:])
        if bias is not None:  # the operator wants an additive mask in the queries' dtype
            bias = torch.zeros(bias.shape, dtype=q.dtype).masked_fill_(~bias, float("-inf"))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)[
            :2
        ]
        if mask is not None:  # the operator gives rows that see nothing a log-sum-exp of 0
            lse = lse.masked_fill(~mask.any(-1).unsqueeze(1), float("-inf"))
        return out, lse
    if q.dtype in (torch.bfloat16, torch.float16):
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out, lse
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    return out, lse[..., : q.shape[2]]  # the operator pads rows


def _tiled(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Plain rows of tiles: for devices, dtypes and masks without a fused operator."""
    heads, group, rows, _ = q.shape
    step = max(1, SCORES_AT_ONCE // (heads * group * k.shape[1]))
    out, lse = torch.empty_like(q), q.new_empty(heads, group, rows, dtype=torch.float32)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        keys = stop if causal else k.shape[1]
        scores = row_scores(q[:, :, start:stop], k[:, :keys], scale)
        if causal:
            scores[..., start:].masked_fill_(future(stop - start, q.device), float("-inf"))
        elif mask is not None:
            scores.masked_fill_(~mask[:, None, start:stop], float("-inf"))
        lse[:, :, start:stop] = torch.logsumexp(scores, -1)
        p = scores.sub_(lse[:, :, start:stop, None]).exp_().nan_to_num_(0.0)
        out[:, :, start:stop] = torch.matmul(p.to(v.dtype), v[:, None, :keys])
    return out, lse


def row_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """``q [H, G, t, D]`` on ``k [H, n, D]`` -> scaled scores ``[H, G, t, n]`` (at least float32)."""
    heads, group, rows, dim = q.shape
    flat = torch.matmul(q.reshape(heads, group * rows, dim), k.transpose(1, 2))
    wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return wide.view(heads, group, rows, -1).mul_(scale)


def future(n: int, device: torch.device) -> Tensor:
    """``[n, n]`` True where the key lies after the query."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu_(1)
