"""A reserved range of addresses for each sequence and KV head (vTensor): memory comes as it grows, without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvatlas.errors import UserError
from kvatlas.strategy.answers import Layout, Place, Shared
from kvatlas.strategy.place.device import SlotStore
from kvatlas.strategy.place.store import Bytes, Store
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column

PAGE = 4096
"""Bytes that are committed at a time."""
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class Virtual(Place):
    """Contiguous slots in a range of addresses that has room for ``reserve`` tokens of each sequence.

    The system gives a range its memory page by page (4,096 bytes) as tokens are written, so a sequence may grow without
    a copy, and what it has not reached costs nothing. On CUDA it is a growing store on the allocator's expandable
    segments, where PyTorch has them.
    """

    source: ClassVar[str] = "vTensor, 2024"
    reserve: int = 131072

    def __post_init__(self) -> None:
        if self.reserve < 1:
            raise UserError(f"virtual: reserve must be at least 1 token, not {self.reserve}")

    def words(self) -> str:
        return f"device, addresses for {self.reserve:,} tokens a sequence, memory as it grows"

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        if layout.device.type != "cpu":
            _expand_segments()
            return SlotStore(layout)
        return VirtualStore(layout, self.reserve)

    def bytes_held(self, layout: Layout) -> int:
        """Whole pages, for sequences that fill the layout's capacity; ``committed`` tells those that do not."""
        if layout.device.type != "cpu":
            return super().bytes_held(layout)
        return committed(layout.columns, layout.kv_heads, [layout.capacity] * layout.rows)


def committed(columns: Sequence[Column], kv_heads: int, lengths: Sequence[int]) -> int:
    """Bytes of sequences of these lengths, in closed form."""
    sizes = [c.slot_bytes() for c in columns]
    return kv_heads * sum(-(-n * size // PAGE) * PAGE for n in lengths for size in sizes)


class VirtualStore(SlotStore):
    """Columns ``[B, H, reserve, ...]`` of which only what was written to takes memory."""

    def __init__(self, layout: Layout, reserve: int) -> None:
        self.reserve = reserve
        self._touched = np.zeros((layout.rows, layout.kv_heads), dtype=np.int64)
        self._check(layout.capacity)
        super().__init__(layout)

    def _check(self, capacity: int) -> None:
        if capacity > self.reserve:
            raise UserError(f"virtual: {capacity} tokens are more than reserve={self.reserve}; set a larger reserve")

    def _empty(self, name: str, capacity: int) -> Tensor:
        return _reserved(self._spec(name), len(self.lengths), self.layout.kv_heads, self.reserve)

    def _ensure(self, capacity: int) -> None:
        self._check(capacity)
        self.capacity = max(self.capacity, capacity)

    def extend(self, row: int, values: Mapping[str, Tensor]) -> None:
        super().extend(row, values)
        self._note()

    def compact(self) -> None:
        self._note()
        super().compact()

    def _note(self) -> np.ndarray:
        """The most slots that were ever filled, ``[B, H]``."""
        np.maximum(self._touched, self.lengths.numpy(), out=self._touched)
        return self._touched

    def select_rows(self, rows: Tensor) -> None:
        """New ranges for the sequences that are wanted; only what they hold is copied."""
        old, lengths = dict(self.data), self.lengths.amax(1).tolist()
        self._select_lengths(rows)
        self._rows = torch.arange(len(rows), device=self.layout.device).unsqueeze(1)
        self.layout = replace(self.layout, rows=len(rows))
        for name, column in old.items():
            new = self._empty(name, self.capacity)
            for row, source in enumerate(rows.tolist()):
                new[row, :, : lengths[source]] = column[source, :, : lengths[source]]
            self.data[name] = new
        self._touched = np.repeat(self.lengths.amax(1, keepdim=True).numpy(), self.layout.kv_heads, axis=1)

    def bytes(self) -> Bytes:
        """Committed pages."""
        filled = self._note()
        sizes = {c.name: int((-(-filled * c.slot_bytes() // PAGE)).sum()) * PAGE for c in self.layout.columns}
        return self._count(sizes, "device")


def _reserved(column: Column, rows: int, heads: int, slots: int) -> Tensor:
    """Zeros ``[rows, heads, slots rounded up, ...]`` that take no memory; each (row, head) starts at a page."""
    whole = -(-slots // PAGE) * PAGE
    size = rows * heads * whole * column.slot_bytes()
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except (OSError, OverflowError, ValueError) as error:
        raise UserError(
            f"virtual: the system refuses {size / 2**30:.1f} GiB of addresses ({error}); set a smaller reserve"
        ) from error
    with suppress(AttributeError, OSError):  # a huge page would commit 2 MiB at a time
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(column.dtype)
    return flat.view(rows, heads, whole, *column.tail)


def _expand_segments() -> None:
    """Let CUDA's allocator enlarge its segments in place, where this PyTorch can."""
    change = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if change is not None:
        with suppress(RuntimeError, ValueError):
            change("expandable_segments:True")


register(Preset("virtual", {"place": Virtual}, "one reserved address range a sequence, committed as it grows"))
