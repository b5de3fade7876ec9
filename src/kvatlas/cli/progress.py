"""How a comparison's course is shown: a live line on a terminal, plain lines in a log. Both go to stderr."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from kvatlas.study.progress import QUALITY, Course, clock

QUARTER = 0.25


class Lines(AbstractContextManager["Lines"]):
    """One line for whatever is finished."""

    def __init__(self) -> None:
        self._next = QUARTER

    def __exit__(self, *exc: object) -> None:
        """Nothing is open."""

    def wait(self, what: str) -> None:
        """Nothing: a line is for what is known."""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def update(self, course: Course) -> None:
        if course.label == QUALITY and course.share >= self._next:
            self._next = course.share + QUARTER
            self.say(f"       quality {course.share:.0%} ({course.note}){_left(course)}")

    def done(self, course: Course, line: str) -> None:
        self.say(f"{_place(course)} {line} · {clock(course.elapsed)} so far{_left(course)}")


class Live(AbstractContextManager["Live"]):
    """A bar at the foot of the terminal, finished things above it."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(24), TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False), console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=None, left="")

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def wait(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def say(self, line: str) -> None:
        from rich.text import Text

        self._bar.console.print(Text(line))

    def update(self, course: Course) -> None:
        now = f"{course.label}, {course.note}" if course.note else course.label
        self._bar.update(
            self._task,
            description=f"{_place(course, 1)} {now}",
            total=course.total,
            completed=course.finished + course.share,
            left=_left(course).lstrip(", "),
        )

    def done(self, course: Course, line: str) -> None:
        self.say(f"{_place(course)} {line}")


def watcher() -> Lines | Live:
    """Live on a terminal, else lines."""
    if not sys.stderr.isatty():
        return Lines()
    from rich.console import Console

    console = Console(stderr=True)
    return Live(console) if console.is_terminal and not console.is_dumb_terminal else Lines()


def _place(course: Course, ahead: int = 0) -> str:
    width = len(str(course.total))
    return f"[{min(course.finished + ahead, course.total):>{width}}/{course.total}]"


def _left(course: Course) -> str:
    left = course.left()
    return "" if left is None or course.finished == course.total else f", about {clock(left)} to go"
