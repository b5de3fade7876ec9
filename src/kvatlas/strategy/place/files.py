"""Slots of one sequence and layer in a file, by aligned pages."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from kvatlas.strategy.place.folder import PAGE, Folder
from kvatlas.strategy.view import Column

BLOCK = 128
"""Slots that lie together in a file, one KV head after the other, at least."""
PIECES = 1024
"""Buffers that a call may name (IOV_MAX)."""


@dataclass(frozen=True)
class Record:
    """One slot of one KV head as bytes: its payload columns one after the other.

    ``page`` slots fill whole pages of 4,096 bytes; ``block`` slots of each KV head lie together in a file.
    """

    columns: tuple[Column, ...]
    offsets: tuple[int, ...]
    size: int
    page: int
    block: int

    @classmethod
    def of(cls, columns: Sequence[Column]) -> Record:
        """The record of these payload columns, each at a multiple of its element's size."""
        offsets, end = [], 0
        for c in columns:
            end = -(-end // c.dtype.itemsize) * c.dtype.itemsize
            offsets.append(end)
            end += c.slot_bytes()
        size = -(-end // 8) * 8
        page = PAGE // math.gcd(PAGE, size)
        return cls(tuple(columns), tuple(offsets), size, page, max(page, BLOCK))

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """``[..., size]`` uint8 as the columns ``[..., *tail]``; nothing is copied."""
        out = {}
        for c, at in zip(self.columns, self.offsets):
            view = records[..., at : at + c.slot_bytes()].view(c.dtype)
            out[c.name] = view.unflatten(-1, c.tail) if c.tail else view.squeeze(-1)
        return out

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Columns ``[..., *tail]`` as records ``[..., size]`` uint8."""
        first = self.columns[0]
        like = values[first.name]
        shape = like.shape[: like.dim() - len(first.tail)]
        out = torch.zeros(*shape, self.size, dtype=torch.uint8, device=like.device)
        for name, view in self.views(out).items():
            view.copy_(values[name])
        return out

    def slots(self, capacity: int) -> int:
        """Slots of whole blocks."""
        return -(-capacity // self.block) * self.block


def aligned(size: int, pinned: bool = False) -> Tensor:
    """``size`` bytes of zeros at an address that direct I/O takes (their storage is one page more)."""
    raw = torch.zeros(size + PAGE, dtype=torch.uint8, pin_memory=pinned)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + size]


class SlotFile:
    """A file of blocks ``[H, block, size]``, removed with this object.

    A page, ``record.page`` slots of one KV head, is the least that is read or written. Room for all slots is reserved
    beforehand, so that a disk that is full says so before anything is written.
    """

    def __init__(self, folder: Folder, record: Record, heads: int, slots: int) -> None:
        self.folder, self.record, self.heads = folder, record, heads
        self.path, self.bytes = folder.new_file(), 0
        self._gone = finalize(self, _unlink, self.path)
        self.reserve(slots)

    @property
    def page_bytes(self) -> int:
        return self.record.page * self.record.size

    def reserve(self, slots: int) -> None:
        """Make room for so many slots of each KV head; raises UserError when the disk is full."""
        size = self.record.slots(slots) * self.heads * self.record.size
        if size <= self.bytes:
            return
        with self._open() as file:
            os.posix_fallocate(file, self.bytes, size - self.bytes)
        self.bytes = size

    def pages(self, heads: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The numbers of the pages in which slots of KV heads are."""
        record = self.record
        block, within = slots // record.block, slots % record.block
        return (block * self.heads + heads) * (record.block // record.page) + within // record.page

    def read_range(self, out: np.ndarray, start: int) -> int:
        """Fill ``out [H, n, size]`` uint8, whole blocks, with slots from ``start`` on; returns the bytes read."""
        self._range(os.preadv, out, start)
        return out.nbytes

    def write_range(self, data: np.ndarray, start: int) -> None:
        """Write ``data [H, n, size]`` uint8, whole blocks, to slots from ``start`` on."""
        self._range(os.pwritev, data, start)

    def _range(self, call: Callable[..., int], data: np.ndarray, start: int) -> None:
        block = self.record.block
        step = max(1, PIECES // self.heads) * block
        with self._open() as file:
            for at in range(0, data.shape[1], step):
                pieces = [
                    data[h, i : i + block]
                    for i in range(at, min(at + step, data.shape[1]), block)
                    for h in range(self.heads)
                ]
                _all(call, file, pieces, (start + at) * self.heads * self.record.size)

    def read_pages(self, numbers: np.ndarray, out: np.ndarray) -> int:
        """Pages (ascending) into ``out [n, page_bytes]`` uint8; returns the bytes read."""
        self._pages(os.preadv, numbers, out)
        return out.nbytes

    def write_pages(self, numbers: np.ndarray, data: np.ndarray) -> None:
        """Pages (ascending) from ``data [n, page_bytes]`` uint8."""
        self._pages(os.pwritev, numbers, data)

    def _pages(self, call: Callable[..., int], numbers: np.ndarray, data: np.ndarray) -> None:
        """One call for pages that follow one another."""
        ends = np.append(np.flatnonzero(np.diff(numbers) != 1) + 1, len(numbers)).tolist()
        with self._open() as file:
            start = 0
            for end in ends if len(numbers) else ():
                _all(call, file, [data[start:end]], int(numbers[start]) * self.page_bytes)
                start = end

    def copy(self) -> SlotFile:
        """Another file of the same content."""
        other = SlotFile(self.folder, self.record, self.heads, self.bytes // (self.heads * self.record.size))
        try:
            with open(self.path, "rb") as source, open(other.path, "r+b") as target:
                shutil.copyfileobj(source, target, 1 << 22)
        except OSError as error:
            raise self.folder.explained(error) from error
        return other

    @contextmanager
    def _open(self) -> Iterator[int]:
        """Opened for each use: a cache has more files than a process may hold open."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self.folder.direct else 0)
        try:
            file = os.open(self.path, flags, 0o600)
            try:
                yield file
            finally:
                os.close(file)
        except OSError as error:
            raise self.folder.explained(error) from error


def _all(call: Callable[..., int], file: int, pieces: list[np.ndarray], at: int) -> None:
    """Repeat until every byte has passed."""
    left = [piece.reshape(-1) for piece in pieces]
    while left:
        done = call(file, left, at)
        if done <= 0:
            raise OSError(errno.EIO, "the file ended too early")
        at += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if left and done:
            left[0] = left[0][done:]


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
