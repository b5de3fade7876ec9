"""The most memory that a process held in a phase."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
EVERY = 0.005
"""Seconds between two looks, where the system does not keep the peak itself."""


def trim(device: torch.device) -> None:
    """Give back what is free: garbage, the heap's free pages, the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        return


class PeakMemory:
    """The peak since the last ``reset``: resident memory of the process, or on CUDA what its allocator reserved.

    Linux keeps a process's peak (VmHWM) and lets it be reset. Where that is not allowed, and elsewhere, a thread looks
    every few milliseconds (``how`` says which).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sampler: _Sampler | None = None
        if device.type == "cuda":
            self.how = "reserved by the CUDA allocator"
        elif _reset_peak():
            self.how = "resident, kept by the kernel (VmHWM)"
        else:
            self.how, self._sampler = f"resident, looked at every {EVERY * 1e3:g} ms", _Sampler()

    def reset(self) -> None:
        """Trim the heap and start a new phase."""
        trim(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._sampler is not None:
            self._sampler.reset()
        else:
            _reset_peak()

    def read(self) -> int:
        """Bytes at the peak of the phase."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return self._sampler.peak() if self._sampler is not None else _peak()


def _reset_peak() -> bool:
    """Set VmHWM to what is resident now; False where that is not possible."""
    try:
        CLEAR.write_text("5")
        return _peak() > 0
    except (OSError, ValueError):
        return False


def _peak() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no VmHWM in the process's status")


class _Sampler:
    """Looks at the resident memory from a thread that ends with the process."""

    def __init__(self) -> None:
        import psutil

        self._process, self._most, self._lock = psutil.Process(os.getpid()), 0, threading.Lock()
        self._rest = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="kvatlas-memory").start()

    def _look(self) -> None:
        now = self._process.memory_info().rss
        with self._lock:
            self._most = max(self._most, now)

    def _run(self) -> None:
        while not self._rest.wait(EVERY):
            self._look()

    def reset(self) -> None:
        with self._lock:
            self._most = 0
        self._look()

    def peak(self) -> int:
        self._look()
        return self._most
