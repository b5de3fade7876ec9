"""`kvatlas compare`: every strategy, several times, each in a process of its own; what is there is not done again."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from kvatlas.errors import UserError
from kvatlas.measure.record import Quality, Record
from kvatlas.measure.sample import Sample
from kvatlas.measure.schema import Environment, Workload
from kvatlas.study.assemble import record
from kvatlas.study.child import ChildFailed, Workers
from kvatlas.study.plan import NO_TEXT, Plan
from kvatlas.study.progress import QUALITY, Course, Watcher
from kvatlas.study.store import Store


@dataclass
class Outcome:
    """The plan's records in its order, how many repeats were measured now, and what to tell the user."""

    records: list[Record]
    measured: int
    notes: list[str] = field(default_factory=list)
    quality_failed: bool = False


@dataclass
class Study:
    """A comparison under way."""

    plan: Plan
    store: Store
    workers: Workers
    watcher: Watcher
    prepared: dict[str, Any]
    workload: Workload
    samples: dict[str, dict[int, Sample]]
    course: Course = field(default_factory=lambda: Course([]))
    measured: int = 0

    def run(self, cells: list[tuple[str, int]], scored: list[str]) -> str | None:
        """Measure these repeats, then the quality of these strategies. Returns why quality failed, if it did."""
        self.store.open()
        self.course = Course([written for written, _ in cells] + [QUALITY] * bool(scored))
        self.watcher.say(_announce(self.plan, self.samples, cells, scored))
        self.measure(cells)
        known = self.store.records()
        scored = [written for written in scored if written in known and known[written].status == "ok"]
        problem = self.quality(scored) if scored else None
        self.store.close()
        return problem

    def measure(self, cells: list[tuple[str, int]]) -> None:
        """Run the cells in this order. A strategy that fails is recorded as failed and not repeated."""
        failed: set[str] = set()
        for order, (written, repeat) in enumerate(cells):
            if written in failed:
                continue
            self.course.start(written, f"repeat {repeat + 1} of {self.plan.repeats}")
            self.watcher.update(self.course)
            sample = self._sample(written, repeat, order)
            self.samples[written][repeat] = sample
            self.course.finish()
            self.measured += 1
            if sample.status != "ok":
                failed.add(written)
                self.course.skip(written)
            elif len(self.samples[written]) < self.plan.repeats:
                self.store.keep_sample(written, sample)
            self.watcher.done(self.course, f"{written}, repeat {repeat + 1}: {summary(sample)}")
            self._finish_if_complete(written, written in failed)

    def _sample(self, written: str, repeat: int, order: int) -> Sample:
        plan, began = self.plan, time.perf_counter()
        cell = {"strategy": written, "repeat": repeat, "order": order}
        job = {**plan.job(), **cell, "prompts": self.prepared["prompts"], "follow": self.prepared["follow"]}
        try:
            sample = Sample.model_validate(self.workers.run("measure", job, plan.timeout))
        except ChildFailed as error:
            sample = Sample(
                status=error.status,  # type: ignore[arg-type]
                error=error.error,
                repeat=repeat,
                order=order,
                seconds=0.0,
                environment=Environment.model_validate(self.prepared["environment"]),
                dtype=plan.dtype,
                threads=plan.threads,
            )
        return sample.model_copy(update={"seconds": time.perf_counter() - began})

    def _finish_if_complete(self, written: str, failed: bool) -> None:
        samples = [sample for _, sample in sorted(self.samples[written].items())]
        if failed or len(samples) >= self.plan.repeats:
            made = record(self.plan, written, samples, self.workload, self.store.quality(written))
            self.store.finish(written, made)

    def quality(self, wanted: list[str]) -> str | None:
        """Measure it for these strategies, in one process. Returns why it could not be, if so."""
        self.course.start(QUALITY, f"of {len(wanted)} strategies")
        self.watcher.update(self.course)

        def progress(share: float, text: str) -> None:
            self.course.share, self.course.note = share, text
            self.watcher.update(self.course)

        try:
            found = self.workers.run("quality", {**self.plan.job(), "strategies": wanted}, self.plan.timeout, progress)
        except (ChildFailed, UserError) as error:
            self.course.finish()
            return str(error)
        for written in wanted:
            self.store.keep_quality(written, Quality.model_validate(found[written]))
        self.course.finish()
        self.watcher.done(self.course, f"quality of {len(wanted)} strategies, in {self.plan.quality_dtype}")
        return None


def compare(plan: Plan, watcher: Watcher) -> Outcome:
    """Measure what is missing in ``plan.out``.

    Raises:
        UserError: when the model, the text or a strategy does not fit; before anything is measured.
        KeyboardInterrupt: what was finished is kept.
    """
    store = Store(plan)
    samples = {written: store.samples(written) for written in plan.strategies}
    cells = plan.order([cell for written in plan.strategies for cell in _missing(plan, store, written, samples)])
    scored = _unscored(plan, store)
    for line in store.warnings:
        watcher.say(line)
    if not cells and not scored:
        store.close()
        return _outcome(plan, store, 0, ["nothing is missing: every strategy was measured before"])
    with Workers(plan.device, plan.threads) as workers:
        watcher.wait("loading the model, checking the text and every strategy")
        study = _prepare(plan, store, workers, watcher, samples)
        notes, why = [], no_quality(plan, study.workload)
        if why and scored:
            notes, scored = [f"quality was not measured: {why}"], []
        problem = study.run(cells, scored)
    if problem:
        notes.append(f"quality could not be measured: {problem}")
    return _outcome(plan, store, study.measured, notes, bool(problem))


def _prepare(
    plan: Plan, store: Store, workers: Workers, watcher: Watcher, samples: dict[str, dict[int, Sample]]
) -> Study:
    job = {**plan.job(), "strategies": list(plan.strategies)}
    try:
        prepared = workers.run("prepare", job, plan.timeout)
    except ChildFailed as error:
        raise UserError(f"cannot prepare {plan.model}: {error.error}") from error
    workload = Workload.model_validate(prepared["workload"])
    return Study(plan, store, workers, watcher, prepared, workload, samples)


def _outcome(plan: Plan, store: Store, measured: int, notes: list[str], failed: bool = False) -> Outcome:
    known = store.records()
    return Outcome([known[written] for written in plan.strategies if written in known], measured, notes, failed)


def _missing(plan: Plan, store: Store, written: str, samples: dict[str, dict[int, Sample]]) -> list[tuple[str, int]]:
    """The repeats to run of one strategy: none once it failed, unless asked to try again."""
    known = store.records().get(written)
    if known is not None and known.status != "ok" and not plan.retry:
        return []
    return [(written, repeat) for repeat in range(plan.repeats) if repeat not in samples[written]]


def _unscored(plan: Plan, store: Store) -> list[str]:
    """Strategies whose quality is wanted and missing."""
    known = store.records()
    if not plan.quality or plan.load_format == "dummy":
        return []
    return [
        written
        for written in plan.strategies
        if store.quality(written) is None
        and not (written in known and (known[written].status != "ok" and not plan.retry))
        and not (written in known and no_quality(plan, known[written].workload))
    ]


def no_quality(plan: Plan, workload: Workload) -> str:
    """Why quality cannot be measured; empty when it can."""
    if plan.load_format == "dummy":
        return "random weights know nothing"
    if workload.text == NO_TEXT:
        return "the model has no tokenizer"
    if workload.beyond_trained:
        return "the prompt is longer than the model was trained on"
    return ""


def _announce(
    plan: Plan, samples: dict[str, dict[int, Sample]], cells: list[tuple[str, int]], scored: list[str]
) -> str:
    there = sum(min(len(some), plan.repeats) for some in samples.values())
    kept = f"{there} of {plan.repeats * len(plan.strategies)} runs are there already; " if there else ""
    what = [f"{len(cells)} runs, each in a process of its own"] if cells else []
    what += [f"the quality of {len(scored)} strategies"] if scored else []
    return f"{kept}measuring {', then '.join(what) or 'nothing'}, into {plan.out}"


def summary(sample: Sample) -> str:
    """What one run gave, in a few words."""
    run = sample.measured
    if run is None:
        return f"{sample.status.replace('_', ' ')}: {sample.error}"
    return f"TTFT {run.ttft:.2f} s, {statistics.median(run.steps) * 1e3:.1f} ms a step"
