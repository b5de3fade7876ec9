"""How far a comparison is and how long it will still take; how that is shown is the caller's."""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

QUALITY = "quality"


class Watcher(Protocol):
    """Shows a comparison's course."""

    def wait(self, what: str) -> None:
        """Something is done that takes a moment, and may yet fail."""

    def say(self, line: str) -> None:
        """One line for the user."""

    def update(self, course: Course) -> None:
        """Something has begun or gone on."""

    def done(self, course: Course, line: str) -> None:
        """Something is finished."""


class Course:
    """What is to do, by label (a strategy's spec for each of its repeats, ``quality``), and what the rest will take."""

    def __init__(self, labels: list[str]) -> None:
        self.todo, self.total = Counter(labels), len(labels)
        self.finished, self.label, self.note = 0, "", ""
        self.share = 0.0  # of what is running
        self._began = self._since = time.monotonic()
        self._spent: dict[str, list[float]] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def start(self, label: str, note: str = "") -> None:
        """``label`` is running now."""
        self.label, self.note, self.share, self._since = label, note, 0.0, time.monotonic()

    def finish(self) -> None:
        """It is done."""
        self._spent.setdefault(self.label, []).append(time.monotonic() - self._since)
        self.todo[self.label] -= 1
        self.finished += 1
        self.label = ""

    def skip(self, label: str) -> None:
        """What is left of a label will not be done."""
        self.total -= self.todo.pop(label, 0)

    def left(self) -> float | None:
        """Seconds that the rest will take, from what was done; None while nothing tells."""
        if not self._spent:
            return None
        known = [sum(times) / len(times) for label, times in self._spent.items() if label != QUALITY]
        usual = sum(known) / len(known) if known else 0.0
        rest = sum(n * self._guess(label, usual) for label, n in self.todo.items() if label != self.label)
        return rest + (self._running(usual) if self.label else 0.0)

    def _guess(self, label: str, usual: float) -> float:
        times = self._spent.get(label)
        if times:
            return sum(times) / len(times)
        return usual * len(self.todo) if label == QUALITY else usual

    def _running(self, usual: float) -> float:
        """Of what is running, and of its further repeats."""
        spent, whole = time.monotonic() - self._since, self._guess(self.label, usual)
        now = spent / self.share - spent if self.share > 0.1 else max(0.0, whole - spent)
        return now + (self.todo[self.label] - 1) * whole


def clock(seconds: float | None) -> str:
    """``1:07`` or ``2:03:40``; nothing for None."""
    if seconds is None:
        return ""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
