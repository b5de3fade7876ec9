"""`kvatlas quality`: the battery in a process of its own, started again without what ended it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvatlas.errors import UserError
from kvatlas.quality.cell import QualityRecord
from kvatlas.quality.cells import read_cells
from kvatlas.strategy.spec import parse
from kvatlas.study.battery import Battery
from kvatlas.study.child import ChildFailed, Workers
from kvatlas.study.progress import clock

Shown = Callable[["BatteryCourse"], None]
Say = Callable[[str], None]


@dataclass
class BatteryCourse:
    """How far a battery is: which task and strategy, the share of all that is done, and what the rest will take."""

    task: str = ""
    what: str = "starting"
    share: float = 0.0
    began: float = field(default_factory=lambda: time.monotonic())
    first: float | None = None  # when the first share was done

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def move(self, share: float, text: str) -> None:
        """A message of the process: ``task|spec|what``, or what it does before the first task."""
        parts = text.split("|")
        self.task, self.what = (parts[0], parts[2]) if parts[2:] else ("", text)
        if share > 0 and self.first is None:
            self.first = time.monotonic()
        self.share = share

    def left(self) -> float | None:
        """Seconds that the rest will take, by what was done; None while too little was."""
        if self.first is None or self.share < 0.02:
            return None
        return (time.monotonic() - self.first) / self.share * (1 - self.share)

    def words(self) -> str:
        """In one line."""
        left = self.left()
        now = f"{self.task}: {self.what}" if self.task else self.what
        rest = "" if left is None else f", about {clock(left)} to go"
        return f"[{self.share:4.0%}] {now} · {clock(self.elapsed)} so far{rest}"


@dataclass
class BatteryOutcome:
    """The battery's records, how many were measured now, and what could not be read."""

    records: list[QualityRecord]
    measured: int  # by the last process, if it had to be started again
    warnings: list[str]


def run_quality_battery(plan: Battery, shown: Shown, say: Say = lambda line: None) -> BatteryOutcome:
    """Measure every cell of the plan that is not in ``plan.out`` yet.

    A process that ends without a word (out of memory) is started again with that task's strategies one by one; a cell
    that ends it even so is recorded as failed.

    Raises:
        UserError: a task without its data, samples that do not fit the model, a process that ends before any task.
        KeyboardInterrupt: what was finished is kept.
    """
    apart: list[str] = []
    lost: list[list[str]] = []
    course = BatteryCourse()
    with Workers(plan.device, plan.threads) as workers:
        while True:
            at: list[str] = []

            def progress(share: float, text: str, at: list[str] = at) -> None:
                at[:] = text.split("|")
                course.move(share, text)
                shown(course)

            try:
                job = {**plan.job(), "apart": apart, "lost": lost}
                done = workers.run("battery", job, plan.timeout, progress)
                break
            except ChildFailed as error:
                if len(at) < 3:
                    raise UserError(f"the battery could not be started: {error.error}") from error
                task, spec = at[0], at[1]
                say(f"{task}: the process ended ({error.error}); starting it again")
                if task not in apart:
                    apart.append(task)
                elif spec and [task, spec] not in [one[:2] for one in lost]:
                    lost.append([task, spec, error.status, error.error])
                else:
                    raise UserError(
                        f"the battery stopped in {task}: {error.error}; what was finished is kept"
                    ) from error
    records, warnings = _records(plan)
    return BatteryOutcome(records, done["measured"], warnings)


def _records(plan: Battery) -> tuple[list[QualityRecord], list[str]]:
    """Those in the folder that belong to the plan's strategies and tasks."""
    if not plan.out.is_dir():
        return [], []
    found = read_cells(plan.out)
    names = {parse(point.spec).name for point in plan.points}
    mine = [r for r in found.records if r.strategy.normalised in names and r.task.name in plan.tasks]
    return [r for r in mine if r.task.limit == plan.limit_of(r.task.name) and r.task.seed == plan.seed], found.warnings
