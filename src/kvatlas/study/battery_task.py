"""What the battery's process does: one model, all tasks, every missing cell, each written when its task ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from kvatlas.engine.lm import LM
from kvatlas.measure.environment import environment
from kvatlas.measure.figure import Figure
from kvatlas.measure.schema import Model, Strategy
from kvatlas.quality.battery_tasks import make_task
from kvatlas.quality.cell import FootprintPart, MetricPart, QualityRecord, SamplePart, TaskPart
from kvatlas.quality.cells import cell_name, read_cells, write_cell
from kvatlas.quality.drift import FidelityTask
from kvatlas.quality.replies import Replies
from kvatlas.quality.statistics import figures
from kvatlas.quality.task import Found, QuestionTask, Task
from kvatlas.strategy.spec import parse

Progress = Callable[[float, str], None]
SINGLE = 1.5
"""What a token that goes in singly costs, in prefilled ones; for the time left only."""


class Cells:
    """The cells of a job: which there are, which are done, and how one is written.

    Raises:
        UserError: a task's option that is not allowed, or a task without its data.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job, self.out = job, Path(job["out"])
        self.families = {spec: (family, budget) for spec, family, budget in job["points"]}
        self.tasks = {name: make_task(name, **options) for name, options in job["tasks"].items()}
        self.parts = {name: self._part(name) for name in self.tasks}

    def of(self, model: Model) -> Self:
        """The same, of this model: only now is it known which are done."""
        self.model = model
        known = read_cells(self.out).records if self.out.is_dir() else []
        self.known = {self._name(r.strategy.normalised, r.task): r for r in known if r.model.name == model.name}
        return self

    def _name(self, strategy: str, task: TaskPart) -> str:
        return cell_name(strategy, task, self.model, self.job["dtype"])

    def _part(self, name: str) -> TaskPart:
        """What a record says of a task."""
        task = self.tasks[name]
        metrics = [
            MetricPart(name=m.name, kind=m.kind, unit=m.unit, higher_is_better=m.higher_is_better) for m in task.metrics
        ]
        limit, seed = self.job["limits"][name], self.job["seed"]
        return TaskPart(name=name, parameters=task.about(), limit=limit, seed=seed, metrics=metrics)

    def kept(self, name: str) -> Replies:
        """Where a task's finished batches wait until all of it is done."""
        return Replies(self.out / ".partial" / name, [self.model.name, self.model.weights, self.job["dtype"]])

    def missing(self, name: str) -> list[str]:
        """Specs whose cell of a task is still to be measured."""
        part = self.parts[name]
        return [spec for spec in self.families if self._todo(self.known.get(self._name(parse(spec).name, part)))]

    def _todo(self, record: QualityRecord | None) -> bool:
        return record is None or (record.status != "ok" and self.job["retry"])

    def write(self, name: str, spec: str, seconds: float, found: Found | None, error: tuple[str, str] | None) -> None:
        """A finished cell, or why it failed."""
        part, strategy = self.parts[name], parse(spec)
        family, budget = self.families[spec]
        base: dict[str, Any] = (
            {"status": "ok", "error": None} if error is None else dict(zip(("status", "error"), error))
        )
        if found is not None:
            base["figures"] = figures(part.metrics, found.samples)
            base["footprint"] = footprint(found)
            base["samples"] = [
                SamplePart(name=s.name, metrics=dict(s.metrics), labels=dict(s.labels)) for s in found.samples
            ]
        record = QualityRecord(
            **base,
            strategy=Strategy(asked=spec, normalised=strategy.name, **strategy.answers()),
            family=family,
            budget=budget,
            model=self.model,
            dtype=self.job["dtype"],
            threads=self.job["threads"],
            environment=environment(self.job["device"]),
            task=part,
            seconds=seconds,
        )
        write_cell(self.out, record)
        self.known[self._name(strategy.name, part)] = record


def footprint(found: Found) -> FootprintPart:
    """Means over the samples."""
    pairs = (("kept", "kept", "share"), ("read_share", "read", "share"), ("device", "device_bytes", "bytes"),
             ("total", "total_bytes", "bytes"), ("read", "read_bytes", "bytes"))  # fmt: skip
    return FootprintPart(
        **{name: Figure.mean([getattr(f, field) for f in found.footprints], unit) for name, field, unit in pairs}
    )


def run_battery(lm: LM, cells: Cells, progress: Progress) -> dict[str, int]:
    """Measure what is missing. All tasks are made, and their data read, before the first is run.

    ``job["apart"]`` names tasks whose strategies are run one by one, ``job["lost"]`` the cells that ended the process:
    ``[task, spec, status, error]``.

    Returns:
        how many cells were measured now, and how many there are.

    Raises:
        UserError: samples that do not fit the model.
    """
    job = cells.job
    for name, spec, status, error in job.get("lost", ()):
        cells.write(name, spec, 0.0, None, (status, error))
    todo = {name: specs for name in cells.tasks if (specs := cells.missing(name))}
    progress(0.0, "checking every task")
    costs = {name: _cost(lm, cells.tasks[name], specs, job, name) for name, specs in todo.items()}
    total, done, count = sum(costs.values()) or 1.0, 0.0, 0
    for name, specs in todo.items():
        groups = [[spec] for spec in specs] if name in job.get("apart", ()) else [specs]
        for group in groups:
            part = costs[name] * len(group) / len(specs)
            count += _run(lm, cells, name, group, _scaled(progress, done / total, part / total, name, group))
            done += part
        cells.kept(name).clear()
    return {"measured": count, "cells": len(cells.tasks) * len(cells.families)}


def _run(lm: LM, cells: Cells, name: str, specs: list[str], progress: Callable[[str, float], None]) -> int:
    """These strategies of one task, together; one by one where one of them fails."""
    task, limit, seed = cells.tasks[name], cells.job["limits"][name], cells.job["seed"]
    began = time.perf_counter()
    try:
        found = task.run(lm, specs, limit, seed, progress, cells.kept(name))
    except Exception as error:
        if len(specs) > 1:
            return sum(_run(lm, cells, name, [spec], progress) for spec in specs)
        from kvatlas.study.worker import is_memory, one_line

        status = "out_of_memory" if is_memory(error) else "failed"
        cells.write(name, specs[0], time.perf_counter() - began, None, (status, one_line(error)))
        return 1
    seconds = (time.perf_counter() - began) / len(specs)
    for spec in specs:
        cells.write(name, spec, seconds, found[spec], None)
    return len(specs)


def _cost(lm: LM, task: Task, specs: list[str], job: Mapping[str, Any], name: str) -> float:
    """Tokens that a task will take, prefilled ones and single ones; makes its samples once, to see that they fit."""
    limit, seed = job["limits"][name], job["seed"]
    if isinstance(task, FidelityTask):
        windows = task.windows(lm, limit)
        return len(windows) * (task.context + SINGLE * len(specs) * task.read)
    assert isinstance(task, QuestionTask)
    cost = 0.0
    for q in task.questions(lm, limit, seed):
        single = 1 + len(q.after) + sum(len(choice.tokens) for choice in q.choices) + q.write
        cost += q.tokens + SINGLE * len(specs) * single
    return cost


def _scaled(progress: Progress, start: float, size: float, name: str, specs: list[str]) -> Callable[[str, float], None]:
    """Progress of one task as ``task|spec|what``; without a spec where several run together."""
    own = specs[0] if len(specs) == 1 else ""
    return lambda what, share: progress(start + size * share, f"{name}|{own}|{what}")


def battery(job: dict[str, Any], progress: Progress) -> Any:
    """The task of a worker process."""
    from kvatlas.study.tasks import model_of, model_part

    torch.set_num_threads(job["threads"])
    cells = Cells(job)  # before the model is loaded: what was asked wrongly is said at once
    progress(0.0, "loading the model")
    loaded, lm = model_of(job, job["dtype"])
    return run_battery(lm, cells.of(model_part(loaded, lm.facts)), progress)
