"""The link between device and host: staged copies, started early where allowed, counted and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from weakref import finalize

import torch
from torch import Tensor

from kvatlas.strategy.answers import Shared, Transfers

STAGES = 2
"""Buffers in flight: the one that a layer reads and the one that is being filled."""


class Link(Shared):
    """Staging buffers on the device, shared by all layers, and the copies into them.

    With ``overlap`` a copy runs beside compute: on CUDA in a stream of its own from pinned memory, on the CPU (where
    tiers are logical) in a thread. ``speed`` in GB/s emulates a slower link: a copy takes at least its bytes over that.
    """

    def __init__(self, overlap: bool, speed: float | None) -> None:
        self.overlap, self.speed = overlap, speed
        self._buffers: dict[tuple[str, str, int], Tensor] = {}
        self._turns: dict[str, int] = {}
        self._done = Transfers()
        self._pool: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None

    def stage(
        self, use: str, name: str, shape: tuple[int, ...], size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer ``shape`` of the current stage of ``use``, cut from a flat one of ``size`` elements."""
        key = (use, name, self._turns.get(use, 0))
        if key not in self._buffers or self._buffers[key].numel() < size or self._buffers[key].dtype != dtype:
            self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return self._buffers[key][: torch.Size(shape).numel()].view(shape)

    def turn(self, use: str) -> None:
        """The next copy of this use goes to its other buffers."""
        self._turns[use] = (self._turns.get(use, 0) + 1) % STAGES

    def start(self, copy: Callable[[], int], device: torch.device, ahead: bool) -> Callable[[], None]:
        """Run ``copy`` (returns its bytes), beside compute if ``ahead`` and overlapping. The result waits for it."""
        if not (ahead and self.overlap):
            began = time.perf_counter()
            self._book(self._timed(copy))
            self._wait_device(device)
            self._done.blocked += time.perf_counter() - began
            return lambda: None
        if device.type == "cuda":
            return self._start_stream(copy, device)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "kvatlas-link")
            finalize(self, self._pool.shutdown, wait=False)
        return self._waiter(self._pool.submit(self._timed, copy))

    def _timed(self, copy: Callable[[], int]) -> int:
        began = time.perf_counter()
        moved = copy()
        if self.speed is not None:
            time.sleep(max(0.0, moved / (self.speed * 1e9) - (time.perf_counter() - began)))
        return moved

    def _waiter(self, future: Future[int]) -> Callable[[], None]:
        def wait() -> None:
            began = time.perf_counter()
            self._book(future.result())
            self._done.blocked += time.perf_counter() - began

        return wait

    def _start_stream(self, copy: Callable[[], int], device: torch.device) -> Callable[[], None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            moved = copy()
            done = torch.cuda.Event()
            done.record()
        self._book(moved)

        def wait() -> None:
            began = time.perf_counter()
            done.synchronize()
            self._done.blocked += time.perf_counter() - began

        return wait

    def _wait_device(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _book(self, moved: int) -> None:
        self._done.count += 1
        self._done.bytes += moved

    def transfers(self) -> Transfers:
        return replace(self._done)

    def device_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers.values())
