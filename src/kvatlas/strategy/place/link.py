"""The link between device and host or disk: staged copies, started early where allowed, counted and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor

from kvatlas.errors import UserError
from kvatlas.strategy.answers import Shared, Transfers

if TYPE_CHECKING:
    from kvatlas.strategy.place.fetch import FetchingStore

STAGES = 2
"""Buffers in flight: the one that a layer reads and the one that is being filled."""

Wait = Callable[[], None]


def check_speed(link: float | None) -> None:
    """Raise UserError for an emulated link that moves nothing (None: no link is emulated)."""
    if link is not None and not link > 0:
        raise UserError(f"link must be above 0 GB/s, not {link:g}")


class Link(Shared):
    """Staging buffers on the device, shared by all layers, and the copies into them.

    On CUDA a copy that may overlap runs in a stream of its own, from pinned memory. A CPU has no other engine to copy
    with: there a copy is made at once, by all threads. ``speed`` in GB/s emulates a slower link, on which one transfer
    follows the other: none is there before its bytes could have come. Files are read in threads (``beside``).
    """

    def __init__(self, overlap: bool, speed: float | None, stages: int = STAGES) -> None:
        self.overlap, self.speed, self.stages = overlap, speed, stages
        self._buffers: dict[tuple[str, str, int], Tensor] = {}
        self._turns: dict[str, int] = {}
        self._done = Transfers()
        self._free_at = 0.0
        self._pool: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._reader: ReferenceType[FetchingStore] | None = None
        self._holder: ReferenceType[FetchingStore] | None = None

    # ------------------------------------------------------------------ buffers

    def stage(
        self, use: str, name: str, shape: tuple[int, ...], size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer ``shape`` of the current stage of ``use``, cut from a flat one of ``size`` elements."""
        key = (use, name, self._turns.get(use, 0))
        if key not in self._buffers or self._buffers[key].numel() < size or self._buffers[key].dtype != dtype:
            self._buffers[key] = self._new(name, size, dtype, device)
        return self._buffers[key][: torch.Size(shape).numel()].view(shape)

    def _new(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def turn(self, use: str) -> None:
        """The next copy of this use goes to its next buffers."""
        self._turns[use] = (self._turns.get(use, 0) + 1) % self.stages

    def device_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers.values())

    # ------------------------------------------------------------------- copies

    def moves(self, device: torch.device) -> bool:
        """False where host and device are the same memory and no link is emulated: nothing has to be copied."""
        return device.type == "cuda" or self.speed is not None

    def start(self, copy: Callable[[], int], device: torch.device, ahead: bool) -> Wait:
        """Run ``copy`` (returns its bytes), beside compute if ``ahead`` and overlapping. The result waits for it."""
        began = time.perf_counter()
        if ahead and self.overlap and device.type == "cuda":
            return self._until(self._start_stream(copy, device), began)
        moved = copy()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.count(1, moved, time.perf_counter() - began)
        wait = self._until(lambda: moved, began, counted=True)
        if not (ahead and self.overlap):
            wait()
        return wait

    def beside(self, copy: Callable[[], int], ahead: bool) -> Wait:
        """Run ``copy`` (reads files and keeps away from the device) in a thread. The result waits for it."""
        began = time.perf_counter()
        if not (ahead and self.overlap):
            moved = copy()
            self.count(1, moved, time.perf_counter() - began)
            return lambda: None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.stages, "kvatlas-link")
            finalize(self, self._pool.shutdown, wait=False)
        return self._until(self._pool.submit(copy).result, began)

    def _start_stream(self, copy: Callable[[], int], device: torch.device) -> Callable[[], int]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            moved = copy()
            done = torch.cuda.Event()
            done.record()

        def finished() -> int:
            done.synchronize()
            return moved

        return finished

    def _until(self, finished: Callable[[], int], began: float, counted: bool = False) -> Wait:
        """Wait for a copy, and for as long as the emulated link would have taken; what compute waits is counted."""
        over = False

        def wait() -> None:
            nonlocal over
            if over:
                return
            over, waiting = True, time.perf_counter()
            moved = finished()
            if self.speed is not None:
                self._free_at = max(began, self._free_at) + moved / (self.speed * 1e9)
                time.sleep(max(0.0, self._free_at - time.perf_counter()))
            self.count(0 if counted else 1, 0 if counted else moved, time.perf_counter() - waiting)

        return wait

    def count(self, copies: int, moved: int, blocked: float = 0.0) -> None:
        """Note transfers, their bytes, and seconds that compute waited for them."""
        self._done.count += copies
        self._done.bytes += moved
        self._done.blocked += blocked

    def transfers(self) -> Transfers:
        return replace(self._done)

    # ---------------------------------------------------------------- reading ahead

    @property
    def reader(self) -> FetchingStore | None:
        """The store that will be read after the one that is being read: idle buffers may be filled for it."""
        return None if self._reader is None else self._reader()

    def comes_next(self, store: FetchingStore) -> None:
        """All of ``store`` is going to be read after the layer that computes now."""
        self._reader = ref(store)

    def holds(self, store: FetchingStore) -> None:
        """``store`` has filled buffers ahead."""
        self._holder = ref(store)

    def claim(self, store: FetchingStore) -> None:
        """``store`` is read now: what was fetched ahead for another one is given up."""
        if self._reader is not None and self._reader() is store:
            self._reader = None
        holder = None if self._holder is None else self._holder()
        if holder is not None and holder is not store:
            holder.forget_ahead()
        self._holder = None
