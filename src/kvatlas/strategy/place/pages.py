"""Single slots of a file, by the pages they are in."""

from __future__ import annotations

import numpy as np

from kvatlas.strategy.place.files import SlotFile, aligned

AT_ONCE = 1 << 20
"""Bytes of pages that are read before their slots are picked out."""


def read_slots(file: SlotFile, slots: np.ndarray, out: np.ndarray) -> int:
    """Records of ``slots [H, n]`` (those below 0: none) into ``out [H, n, size]`` uint8; returns the bytes read.

    Each page is read once; pages that follow one another, with one call.
    """
    heads, i = np.nonzero(slots >= 0)
    if not len(heads):
        return 0
    chosen = slots[heads, i]
    pages, which = np.unique(file.pages(heads, chosen), return_inverse=True)
    step = min(len(pages), max(1, AT_ONCE // file.page_bytes))
    buffer = aligned(step * file.page_bytes).numpy().reshape(step, file.page_bytes)
    records = buffer.reshape(step, file.record.page, file.record.size)
    order = np.argsort(which, kind="stable")
    ends = np.searchsorted(which[order], np.arange(step, len(pages) + step, step))
    read = begin = 0
    for start, end in zip(range(0, len(pages), step), ends.tolist()):
        some = pages[start : start + step]
        read += file.read_pages(some, buffer[: len(some)])
        now = order[begin:end]
        out[heads[now], i[now]] = records[which[now] - start, chosen[now] % file.record.page]
        begin = end
    return read


def write_slots(file: SlotFile, slots: np.ndarray, data: np.ndarray) -> None:
    """Records ``data [H, n, size]`` uint8 to ``slots [H, n]``, different ones (those below 0: none).

    A page of which only some slots are written is read before.
    """
    heads, i = np.nonzero(slots >= 0)
    if not len(heads):
        return
    chosen, record = slots[heads, i], file.record
    pages, which, counts = np.unique(file.pages(heads, chosen), return_inverse=True, return_counts=True)
    buffer = aligned(len(pages) * file.page_bytes).numpy().reshape(len(pages), file.page_bytes)
    partial = np.flatnonzero(counts < record.page)
    if len(partial) == len(pages):
        file.read_pages(pages, buffer)
    elif len(partial):
        some = aligned(len(partial) * file.page_bytes).numpy().reshape(len(partial), file.page_bytes)
        file.read_pages(pages[partial], some)
        buffer[partial] = some
    buffer.reshape(len(pages), record.page, record.size)[which, chosen % record.page] = data[heads, i]
    file.write_pages(pages, buffer)
