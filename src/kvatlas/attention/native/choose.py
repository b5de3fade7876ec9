"""What a reader that chooses tokens does at every step, as functions on tensors: see ``choose.h``."""

from __future__ import annotations

import torch
from torch import Tensor

from kvatlas.attention.native.ops import DTYPES, call, strides, threads

COMBINE = {"mean": 0, "max": 1, "sum": 2}


def speculate(
    q: Tensor, keys: Tensor, lengths: Tensor, hole: Tensor | None, scale: float, alpha: float, combine: str
) -> tuple[Tensor, Tensor]:
    """Combined weights and near counts of queries q [B, H, G, d] on keys [B, H, n, d] of one dtype.

    lengths [B, H] and hole [B, H] (a slot that does not count) int64, contiguous. Returns rank [B, H, n] float32 (-1
    where there is nothing) and near [B, H] int64: slots that any query head scores within alpha of its own best.
    """
    batch, heads, group, dim = q.shape
    n = keys.shape[2]
    q, lengths = q.contiguous(), lengths.contiguous()
    hole = None if hole is None else hole.contiguous()
    assert q.dtype == keys.dtype and keys.stride(3) == 1 and keys.shape == (batch, heads, n, dim)
    rank = torch.empty(batch, heads, n, dtype=torch.float32)
    near = torch.empty(batch, heads, dtype=torch.int64)
    call(
        "kvatlas_speculate",
        q.dtype == torch.bfloat16,
        q.data_ptr(),
        keys.data_ptr(),
        lengths.data_ptr(),
        None if hole is None else hole.data_ptr(),
        rank.data_ptr(),
        near.data_ptr(),
        batch,
        heads,
        group,
        dim,
        n,
        strides(*keys.stride()[:3]),
        scale,
        alpha,
        COMBINE[combine],
        threads(rank.nbytes * group),
    )
    return rank, near


def bound_scores(q: Tensor, low: Tensor, high: Tensor, pages: Tensor, combine: str) -> Tensor:
    """Combined best possible scores of queries q [B, H, G, D] on pages of keys bounded by low, high [B, H, P, D].

    All of one dtype, bounds contiguous in D, D a multiple of 8; pages [B, H] int64 is how many count. Returns
    [B, H, P] float32, -inf past them.
    """
    batch, heads, group, dim = q.shape
    n = low.shape[2]
    q, pages = q.contiguous(), pages.contiguous()
    assert q.dtype == low.dtype == high.dtype and q.dtype in DTYPES and dim % 8 == 0
    assert low.shape == high.shape == (batch, heads, n, dim) and low.stride(3) == high.stride(3) == 1
    assert pages.dtype == torch.int64 and pages.shape == (batch, heads)
    rank = torch.empty(batch, heads, n, dtype=torch.float32)
    call(
        "kvatlas_bounds",
        q.dtype == torch.bfloat16,
        q.data_ptr(),
        low.data_ptr(),
        high.data_ptr(),
        pages.data_ptr(),
        rank.data_ptr(),
        batch,
        heads,
        group,
        dim,
        n,
        strides(*low.stride()[:3], *high.stride()[:3]),
        COMBINE[combine],
        threads(2 * rank.numel() * dim * low.element_size()),
    )
    return rank


def choose_pages(
    q: Tensor,
    low: Tensor,
    high: Tensor,
    lengths: Tensor,
    count: Tensor,
    page: int,
    width: int,
    combine: str,
    newest: Tensor | None = None,
    key: Tensor | None = None,
    prefer: bool = False,
) -> tuple[Tensor, Tensor]:
    """One step of a reader of pages: `note_key`, `bound_scores`, and the slots of the best pages, in one pass.

    As for `bound_scores`; lengths [B, H] int64 filled slots (pages are of `page` of them), count [B, H] int64 pages to
    read. key [B, H, D] was stored in slot newest [B, H] (-1: nowhere); low and high are widened by it in place; prefer:
    its page is read whatever its score. Returns index [B, H, width] int64, ascending, and number [B, H] of its slots.
    """
    batch, heads, group, dim = q.shape
    held = low.shape[2]
    q, lengths, count = q.contiguous(), lengths.contiguous(), count.contiguous()
    pages = (lengths + (page - 1)).div_(page, rounding_mode="floor")
    key = None if key is None or newest is None else key.contiguous()
    newest = None if newest is None else newest.contiguous()
    assert q.dtype == low.dtype == high.dtype and q.dtype in DTYPES and dim % 8 == 0
    assert key is None or (key.dtype == low.dtype and key.shape == (batch, heads, dim))
    assert low.shape == high.shape == (batch, heads, held, dim) and low.stride(3) == high.stride(3) == 1
    assert lengths.dtype == count.dtype == torch.int64 and lengths.shape == count.shape == (batch, heads)
    assert newest is None or (newest.dtype == torch.int64 and newest.shape == (batch, heads))
    rank = torch.empty(batch, heads, held, dtype=torch.float32)
    index, number = torch.empty(batch, heads, width, dtype=torch.int64), torch.empty_like(lengths)
    call(
        "kvatlas_choose_pages",
        q.dtype == torch.bfloat16,
        q.data_ptr(),
        low.data_ptr(),
        high.data_ptr(),
        None if key is None else key.data_ptr(),
        None if newest is None else newest.data_ptr(),
        lengths.data_ptr(),
        pages.data_ptr(),
        count.data_ptr(),
        rank.data_ptr(),
        index.data_ptr(),
        number.data_ptr(),
        batch,
        heads,
        group,
        dim,
        held,
        page,
        width,
        strides(*low.stride()[:3], *high.stride()[:3]),
        COMBINE[combine],
        prefer,
        threads(2 * rank.numel() * dim * low.element_size()),
    )
    return index, number


def choose(rank: Tensor, count: Tensor, width: int) -> Tensor:
    """The count [B, H] best slots of rank [B, H, n] float32 -> index [B, H, width] int64, ascending, then zeros."""
    rank, count = rank.contiguous(), count.contiguous()
    batch, heads, n = rank.shape
    assert rank.dtype == torch.float32 and count.dtype == torch.int64 and count.shape == (batch, heads)
    index = torch.empty(batch, heads, width, dtype=torch.int64)
    size = threads(rank.nbytes)
    call("kvatlas_choose", rank.data_ptr(), count.data_ptr(), index.data_ptr(), batch * heads, n, width, size)
    return index


def copy_rows(to: Tensor, source: Tensor, index: Tensor | None) -> None:
    """to[b, h, i] = source[b, h, index[b, h, i]] (slot i itself without an index).

    to [B, H, n, ..], source [B, H, slots, ..] of one dtype, contiguous within a slot; index [B, H, n] int64.
    """
    batch, heads, n = to.shape[:3]
    size, bytes_ = to.element_size(), to[0, 0, 0].nbytes
    assert to.dtype == source.dtype and to.shape[3:] == source.shape[3:] and to.shape[:2] == source.shape[:2]
    assert to[0, 0, 0].is_contiguous() and source[0, 0, 0].is_contiguous()
    index = None if index is None else index.contiguous()
    assert index is None or (index.dtype == torch.int64 and index.shape == (batch, heads, n))
    apart = strides(*(size * s for s in (*to.stride()[:3], *source.stride()[:3])))
    number = threads(to.nbytes)
    at = None if index is None else index.data_ptr()
    call("kvatlas_copy_rows", to.data_ptr(), source.data_ptr(), at, batch, heads, n, bytes_, apart, number)
