"""Time around finished work: a device's queue is drained before a clock is read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

import torch


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all it was given. Nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """``with Stopwatch(device) as watch: ...``; then ``watch.seconds``."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def __enter__(self) -> Stopwatch:
        synchronise(self.device)
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            synchronise(self.device)
        self.seconds = time.perf_counter() - self._began


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not pass (nearest rank). ``values`` is not empty."""
    ordered = sorted(values)
    rank = -(-len(ordered) * share // 1)  # rounded up
    return ordered[min(len(ordered), max(1, int(rank))) - 1]
