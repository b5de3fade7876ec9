"""Quality records put in order: by model, by task as it was asked, by family, along each family's budgets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvatlas.measure.figure import Figure
from kvatlas.measure.schema import REFERENCE, Model
from kvatlas.quality.cell import MetricPart, QualityRecord, TaskPart

Axis = Literal["device", "total", "read"]
AXES: dict[Axis, str] = {"device": "device bytes", "total": "bytes in all tiers", "read": "bytes read a step"}


@dataclass(frozen=True, slots=True)
class Curve:
    """A family's finished cells of one task, from the smallest budget to the largest.

    ``budgets`` are those by which the points are ordered: fractions of the prompt, or tokens (unlimited is infinite).
    None where they do not compare (fractions beside tokens, or no budget at all); then the device bytes are the order.
    """

    family: str
    points: tuple[QualityRecord, ...]
    budgets: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One task as it was asked of one model. ``name`` tells it from the same task with other parameters."""

    name: str
    task: TaskPart
    reference: QualityRecord | None
    curves: tuple[Curve, ...]
    failed: tuple[QualityRecord, ...]

    @property
    def ok(self) -> list[QualityRecord]:
        """All finished cells, the reference first."""
        points = [point for curve in self.curves for point in curve.points]
        return points if self.reference is None else [self.reference, *points]


@dataclass(frozen=True, slots=True)
class Battery:
    """All that was asked of one model: these weights, stored so, computed in this dtype."""

    model: Model
    dtype: str
    tasks: tuple[Asked, ...]

    @property
    def title(self) -> str:
        """The model, how it was stored (or where it came from), and the dtype."""
        return ", ".join(filter(None, (self.model.name, self.model.stored or self.model.source, self.dtype)))

    @property
    def families(self) -> list[str]:
        """Families of all tasks, each once, in the order of their first records."""
        return list(dict.fromkeys(curve.family for task in self.tasks for curve in task.curves))


def batteries(records: Iterable[QualityRecord]) -> list[Battery]:
    """Records by model and task, in the order in which they come. Of two records of one cell the newer counts."""
    models: dict[str, list[QualityRecord]] = {}
    for record in records:
        model = record.model
        same = json.dumps([model.name, model.weights, model.stored, record.dtype])
        models.setdefault(same, []).append(record)
    return [Battery(group[0].model, group[0].dtype, tuple(_tasks(group))) for group in models.values()]


def _tasks(records: Sequence[QualityRecord]) -> list[Asked]:
    groups: dict[str, list[QualityRecord]] = {}
    for record in records:
        task = record.task
        groups.setdefault(json.dumps([task.name, task.parameters, task.limit, task.seed], sort_keys=True), []).append(
            record
        )
    names = _names([group[0].task for group in groups.values()])
    return [_asked(name, group) for name, group in zip(names, groups.values())]


def _names(tasks: Sequence[TaskPart]) -> list[str]:
    """Names, with what tells tasks apart that were asked in several ways: ``retention (question=before)``."""
    whole = [{**task.parameters, "limit": task.limit, "seed": task.seed} for task in tasks]
    return [
        _with(task.name, mine, [other for twin, other in zip(tasks, whole) if twin.name == task.name])
        for task, mine in zip(tasks, whole)
    ]


def _with(name: str, mine: Mapping[str, object], twins: Sequence[Mapping[str, object]]) -> str:
    differ = [key for key in mine if any(other.get(key) != mine[key] for other in twins)]
    return f"{name} ({', '.join(f'{key}={mine[key]}' for key in differ)})" if differ else name


def _asked(name: str, records: Sequence[QualityRecord]) -> Asked:
    newest: dict[str, QualityRecord] = {}
    for record in sorted(records, key=lambda record: record.environment.time):
        newest[record.strategy.normalised] = record
    kept = [record for record in records if newest[record.strategy.normalised] is record]
    ok = [record for record in kept if record.status == "ok"]
    families: dict[str, list[QualityRecord]] = {}
    for record in ok:
        if record.family != REFERENCE:
            families.setdefault(record.family, []).append(record)
    return Asked(
        name,
        kept[0].task,
        next((record for record in ok if record.family == REFERENCE), None),
        tuple(_curve(family, points) for family, points in families.items()),
        tuple(record for record in kept if record.status != "ok"),
    )


def _curve(family: str, points: Sequence[QualityRecord]) -> Curve:
    budgets = _comparable([point.budget for point in points])
    if budgets is None:
        return Curve(family, tuple(sorted(points, key=lambda point: bytes_of(point, "device") or 0.0)), None)
    order = sorted(range(len(points)), key=budgets.__getitem__)
    return Curve(family, tuple(points[i] for i in order), tuple(budgets[i] for i in order))


def _comparable(budgets: Sequence[float | int | None]) -> list[float] | None:
    """Fractions as they are; whole numbers of tokens beside an unlimited 1.0, which is infinite; else None."""
    if any(budget is None for budget in budgets):
        return None
    tokens = [isinstance(budget, int) for budget in budgets]
    if not any(tokens):
        return [float(budget) for budget in budgets if budget is not None]
    if all(whole or budget == 1.0 for whole, budget in zip(tokens, budgets)):
        return [float(budget) if whole else math.inf for whole, budget in zip(tokens, budgets) if budget is not None]
    return None


def bytes_of(record: QualityRecord, by: Axis) -> float | None:
    """Mean bytes of one sequence on an axis, or None where the cell has no footprint."""
    return None if record.footprint is None else getattr(record.footprint, by).value


def in_points(metric: MetricPart) -> bool:
    """Whether a metric is a share, so that its differences are read in percentage points."""
    return metric.kind == "right" or metric.unit == "share"


def figure_of(record: QualityRecord, metric: str) -> Figure | None:
    """A record's figure of a metric."""
    return record.figures.get(metric)
