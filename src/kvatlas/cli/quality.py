"""``kvatlas quality`` and ``kvatlas match``: from options to a battery, and from its cells to what a person reads."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.cli.output import check_file, stopped, write_json
from kvatlas.errors import UserError
from kvatlas.quality.cell import QualityRecord
from kvatlas.quality.cells import read_cells

if TYPE_CHECKING:
    from kvatlas.study.battery_run import BatteryCourse

EVERY = 30.0
"""Seconds between two lines of progress where there is no terminal."""


class Shown(AbstractContextManager["Shown"]):
    """The course of a battery: a line that is drawn again on a terminal, else a line for each task and now and then."""

    def __init__(self) -> None:
        self.live, self._task, self._said = sys.stderr.isatty(), "", 0.0

    def __call__(self, course: BatteryCourse) -> None:
        now = time.monotonic()
        if self.live:
            if now - self._said > 0.2:
                self._said = now
                print(f"\r\033[K{course.words()}"[:160], end="", file=sys.stderr, flush=True)
        elif course.task != self._task or now - self._said > EVERY:
            self._task, self._said = course.task, now
            print(course.words(), file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        print(f"\r\033[K{line}" if self.live else line, file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run_quality(json_file: str | None, **options: Any) -> int:
    """Measure, write the page, show the result block. The exit code: 1 where a cell failed."""
    from kvatlas.study.battery import make_battery
    from kvatlas.study.battery_run import run_quality_battery

    if json_file is not None:
        check_file("--json", json_file)
    plan = make_battery(**options)
    cells, tasks = len(plan.points) * len(plan.tasks), "1 task" if len(plan.tasks) == 1 else f"{len(plan.tasks)} tasks"
    print(f"{len(plan.points)} points of curves x {tasks} = {cells} cells, into {plan.out}", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # being asked to end is as good as Ctrl-C
    try:
        with Shown() as shown:
            outcome = run_quality_battery(plan, shown, shown.say)
    except KeyboardInterrupt:
        return stopped(plan.out)
    for line in outcome.warnings:
        print(line, file=sys.stderr)
    if outcome.measured == 0:
        print("nothing is missing: every cell was measured before", file=sys.stderr)
    if json_file is not None:
        write_json(json_file, outcome.records)
    _show(outcome.records, plan.out / "quality.html", read_cells(plan.out).records)
    return 0 if all(record.status == "ok" for record in outcome.records) else 1


def run_match(folder: str, metric: str, within: float, by: str, as_json: bool) -> None:
    """For each family the smallest bytes at which it stays within so many points of ``full``."""
    from kvatlas.advise.match import match
    from kvatlas.report.quality import match_block, match_text

    records = _records(folder)
    table = match(records, metric=metric, within=within, by=by)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps(_plain(asdict(table)), indent=1))
    else:
        _print(lambda: match_block(table), lambda: match_text(table))


def _show(records: list[QualityRecord], page: Path, reported: list[QualityRecord]) -> None:
    from kvatlas.report.quality import quality_block, quality_text
    from kvatlas.report.quality_page import write_quality_page

    write_quality_page(reported, page)
    _print(lambda: quality_block(records), lambda: quality_text(records))
    print(f"page: {page}")


def _print(block: Callable[[], Any], text: Callable[[], str]) -> None:
    """To a terminal with its width and colours, else as plain text."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(block())
    else:
        print(text())


def _records(folder: str) -> list[QualityRecord]:
    found = read_cells(folder)
    for warning in found.warnings:
        print(warning, file=sys.stderr)
    if not found.records:
        raise UserError(f"{folder} has no quality records; run `kvatlas quality --out {folder}` first")
    return found.records


def _plain(value: Any) -> Any:
    """For JSON, which has no infinities: as words."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "beyond" if value > 0 else "below"
    return value
