"""Where a step's time goes. Off, it costs one attribute look-up per section."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


class Clock:
    """Adds up seconds by section (append, select, fetch, attend, drop, compress), nested time counted once.

    Args:
        on: measure at all.
        device: synchronised around each section when it is CUDA.
        diagnose: ask attention for weights even where no rule wants them.
    """

    def __init__(self, on: bool = True, device: torch.device | None = None, diagnose: bool = False) -> None:
        self.on, self.diagnose = on, diagnose
        self._sync = device is not None and device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[_Section] = []

    def __call__(self, section: str) -> AbstractContextManager[object]:
        return _Section(self, section) if self.on else _NOTHING

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds.clear()

    def now(self) -> float:
        if self._sync:
            torch.cuda.synchronize()
        return time.perf_counter()


class _Section(AbstractContextManager[object]):
    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name, self.inner = clock, name, 0.0

    def __enter__(self) -> _Section:
        self.clock._open.append(self)
        self.began = self.clock.now()
        return self

    def __exit__(self, *exc: object) -> None:
        spent = self.clock.now() - self.began
        self.clock._open.pop()
        self.clock.seconds[self.name] += spent - self.inner
        if self.clock._open:
            self.clock._open[-1].inner += spent
