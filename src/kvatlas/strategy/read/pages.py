"""Pages of slots and the bounds of their keys: what a reader that fetches whole pages remembers (Quest, ICML 2024).

A page is ``page`` slots that follow one another; all of a sequence's pages are full but the last. Its bounds are the
least and the largest value of its keys in each dimension, ``low, high [B, H, pages, D]`` in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvatlas.attention import fast
from kvatlas.attention.bounds import bound_scores
from kvatlas.attention.choose import best_slots, native_serves
from kvatlas.attention.native.choose import choose_pages
from kvatlas.strategy.answers import Read
from kvatlas.strategy.view import Combine, LayerFacts, Selection, View


@dataclass(frozen=True)
class PageBounds(Read):
    """Common to rules that read pages by the bounds of their keys: ``low`` and ``high`` are a sequence's state.

    ``page`` slots make a page; ``gqa`` says how the scores of a group's query heads become one.
    """

    page: int = 16
    gqa: Combine = "mean"

    def begin(self, facts: LayerFacts, slots: int) -> dict[str, Tensor]:
        made = fresh_bounds(facts.kv_heads, slots, self.page, facts.head_dim, facts.dtype, facts.device)
        return dict(zip(("low", "high"), made))

    def state_bytes(self, facts: LayerFacts, slots: int) -> int:
        return bounds_bytes(facts.kv_heads, slots, self.page, facts.head_dim, facts.dtype.itemsize)

    def settle(self, view: View) -> None:
        if view.keys is None or view.width == 0:
            return
        low, high = bounds_of(view.keys(), self.page, view.width)
        view.state["low"][:, :, : low.shape[2]] = low
        view.state["high"][:, :, : high.shape[2]] = high


def pages_for(slots: int, page: int) -> int:
    """Pages that hold so many slots."""
    return -(-slots // page)


def bounds_bytes(kv_heads: int, slots: int, page: int, head_dim: int, itemsize: int) -> int:
    """Bytes of one sequence's bounds."""
    return 2 * kv_heads * pages_for(slots, page) * head_dim * itemsize


def fresh_bounds(
    kv_heads: int, slots: int, page: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Room for the bounds of a sequence that holds nothing yet: ``[H, pages, D]`` twice."""
    shape = (kv_heads, pages_for(slots, page), head_dim)
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)


def bounds_of(keys: Tensor, page: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Bounds of the first ``length`` (None: all) of ``keys [..., n, D]`` -> low, high ``[..., pages, D]``."""
    n = keys.shape[-2] if length is None else length
    full = n // page
    pieces = [keys[..., : full * page, :].unflatten(-2, (full, page))] if full else []
    if n > full * page:
        pieces.append(keys[..., full * page : n, :].unsqueeze(-3))
    if not pieces:
        empty = keys.new_zeros(*keys.shape[:-2], 0, keys.shape[-1])
        return empty, empty.clone()
    low, high = ([f(piece, -2) for piece in pieces] for f in (torch.amin, torch.amax))
    return torch.cat(low, -2), torch.cat(high, -2)


def note_key(low: Tensor, high: Tensor, key: Tensor, slot: Tensor, lengths: Tensor, page: int) -> None:
    """A key was stored: its page's bounds follow, in place.

    A page that begins with it gets its bounds from it. One whose slot was overwritten is only widened: the bounds of
    the key that is gone may be too wide, never too narrow.

    Args:
        low, high: ``[B, H, pages, D]``, contiguous.
        key: ``[B, H, D]``.
        slot: ``[B, H]`` int64 where it was stored, -1 for nowhere.
        lengths: ``[B, H]`` int64 filled slots, the new one included.
    """
    rows = low.shape[0] * low.shape[1]
    first = torch.arange(0, rows * low.shape[2], low.shape[2], device=slot.device)
    at = (slot.clamp(min=0).div_(page, rounding_mode="floor")).view(rows).add_(first)
    begins = ((slot + 1 == lengths) & (slot % page == 0)).view(rows, 1)
    absent = (slot < 0).view(rows, 1)
    key = key.reshape(rows, -1).to(low.dtype)
    for bounds, wider in ((low, torch.minimum), (high, torch.maximum)):
        flat = bounds.view(-1, bounds.shape[-1])
        old = flat.index_select(0, at)
        new = torch.where(begins, key, wider(old, key))
        flat.index_copy_(0, at, torch.where(absent, old, new))


def read_best(view: View, q: Tensor, rule: PageBounds, count: Tensor, most: int, newest: bool = False) -> Selection:
    """The slots of the best pages by their bounds, which follow the newest key first.

    Args:
        q: ``[B, Hq, D]``.
        count: ``[B, H]`` int64, pages to read of each row.
        most: the largest of them, or more.
        newest: the page of the newest token is read whatever its score.
    """
    page, held = rule.page, pages_for(view.width, rule.page)
    low, high = (view.state[name][:, :, :held] for name in ("low", "high"))
    grouped, width = q.unflatten(1, (low.shape[1], -1)), min(view.width, most * page)
    scanned = 2 * low.numel() * low.element_size()
    if fast.serves(q, low):
        index, number = choose_pages(
            grouped, low, high, view.lengths, count, page, width, rule.gqa, view.newest, view.key, newest
        )
        return Selection(index, number, scanned)
    note_newest(view, page)
    total = (view.lengths + (page - 1)).div_(page, rounding_mode="floor")
    rank = bound_scores(grouped, low, high, total, rule.gqa)
    if newest and view.newest is not None:
        prefer(rank, view.newest, page)
    return slots_of_pages(best_pages(rank, count, most), count, view.lengths, page, view.width, scanned)


def note_newest(view: View, page: int) -> None:
    """The bounds follow the newest key, if there is one."""
    if view.newest is not None and view.key is not None:
        note_key(view.state["low"], view.state["high"], view.key, view.newest, view.lengths, page)


def prefer(rank: Tensor, newest: Tensor, page: int) -> None:
    """The pages of the slots ``newest [B, H]`` (-1 for none) come first in ``rank [B, H, P]``, in place."""
    at = newest.clamp(min=0).div_(page, rounding_mode="floor").unsqueeze(-1)
    rank.scatter_(-1, at, torch.where((newest >= 0).unsqueeze(-1), torch.inf, rank.gather(-1, at)))


def best_pages(rank: Tensor, count: Tensor, width: int) -> Tensor:
    """The ``count [B, H]`` best pages of ``rank [B, H, P]`` float32 -> ``[B, H, width]`` int64, ascending.

    What lies past a row's count does not matter.
    """
    index = best_slots(rank, count, width)
    if native_serves(rank):
        return index
    past = torch.arange(width, device=rank.device) >= count.unsqueeze(-1)
    return index.masked_fill_(past, rank.shape[-1] - 1).sort(-1).values


def slots_of_pages(pages: Tensor, count: Tensor, lengths: Tensor, page: int, width: int, scanned: int = 0) -> Selection:
    """Whole pages as a selection of their filled slots, ascending.

    Args:
        pages: ``[B, H, m]`` int64, each row's first ``count [B, H]`` ascending.
        lengths: ``[B, H]`` int64 filled slots.
        width: the largest of the lengths: no slot at or past it is named, and no more than so many.
    """
    slots = (pages.unsqueeze(-1) * page + torch.arange(page, device=pages.device)).flatten(-2).clamp_(max=width - 1)
    # Of the chosen pages only the last one can be partly filled, and only if it is the sequence's last.
    last = pages.gather(-1, (count - 1).clamp_(min=0).unsqueeze(-1)).squeeze(-1)
    unfilled = ((last + 1) * page - lengths).clamp_(min=0)
    return Selection(slots[..., :width].contiguous(), (count * page - unfilled).clamp_(min=0), scanned)
