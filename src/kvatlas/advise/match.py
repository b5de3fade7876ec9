"""The smallest bytes at which each family stays near ``full``: the operating points at which strategies compare.

A curve is walked from its largest budget down; the point looked for lies between the last measured budget that is
within and the first that is not, found there by a straight line. So it is the smallest budget from which on ALL larger
measured ones are within: a curve that dips and recovers is taken at its word only above the dip. Nothing is ever
extrapolated:

- ``not bracketed``: even the smallest measured budget is within; its bytes are an upper bound;
- ``not reached``: no measured budget is within, or not the largest.

Differences of shares (right or wrong, or any metric in ``share``) are in percentage points, those of others in the
metric's own unit. A strategy that is better than ``full`` is within.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from kvatlas.advise.against import paired
from kvatlas.advise.crossing import SLACK, Span, Status, along, crossings, reached_of, span_of, status_of
from kvatlas.advise.curves import AXES, Asked, Axis, Battery, Curve, batteries, bytes_of, in_points
from kvatlas.errors import UserError, nearest
from kvatlas.quality.cell import MetricPart, QualityRecord
from kvatlas.quality.statistics import Floats, resampled_means

ALL, ONCE = "all", "all at once"
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Match:
    """One family on one metric of one task, or on all of them at once.

    Attributes:
        model: the model, how its weights were stored, and the dtype.
        task: as it was asked, or ``all at once``.
        unit: of ``within``: ``points``, or the metric's.
        bytes: of one sequence, on the table's axis. None when it was not reached, and for all at once: the tasks'
            contexts differ in length, so only a share of ``full``'s bytes can be said of all.
        share: of ``full``'s bytes on the same axis. For all at once that of the task that needs most (``binding``).
        budget: there, by the same straight line; None where the family's budgets do not compare.
        reached: share of the bootstrap's resamples in which it was reached (or not bracketed); None for one sample.
        n: samples that ``full`` and all points of the family have (for all at once: of the task with fewest).
        note: what else has to be known.
    """

    model: str
    task: str
    metric: str
    unit: str
    family: str
    status: Status
    bytes: Span | None = None
    share: Span | None = None
    budget: Span | None = None
    reached: float | None = None
    n: int = 0
    binding: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class MatchTable:
    """What was asked, and a row for each model, task and family. ``notes``: what was left out, and why."""

    metric: str
    within: float
    by: Axis
    rows: tuple[Match, ...]
    notes: tuple[str, ...] = ()


def match(
    records: Sequence[QualityRecord], metric: str = "retention", within: float = 5.0, by: Axis = "device"
) -> MatchTable:
    """For each family the smallest bytes at which it stays within ``within`` of ``full``; see above.

    The interval is a paired bootstrap's: samples are drawn jointly for ``full`` and all points of the family, and the
    point is looked for anew in each resample.

    Args:
        records: cells of any tasks and models.
        metric: a task (its first metric that is a share, or else its leading one), ``TASK.METRIC``, or ``all``: each
            task's first share, and one row more for all of them at once.
        within: percentage points for shares, else in the metric's unit.
        by: ``device``, ``total`` (all tiers) or ``read`` (by one step).

    Raises:
        UserError: no such task or metric, nothing to compare with, a ``within`` below 0 or another ``by``.
    """
    if by not in get_args(Axis):
        raise UserError(f"--by {by} is no axis: {nearest(str(by), AXES)}")
    if not (math.isfinite(within) and within >= 0):
        raise UserError(f"--within {within} must be a number of 0 or more")
    rows: list[Match] = []
    notes: list[str] = []
    chosen = [(battery, _choose(battery, metric, notes)) for battery in batteries(records)]
    if not any(pairs for _, pairs in chosen):
        raise UserError(_nothing(records, metric, notes))
    for battery, pairs in chosen:
        found = {family: [_look(battery, task, one, family, within, by) for task, one in pairs]
                 for family in battery.families}  # fmt: skip
        rows += [looks[i].row for i in range(len(pairs)) for looks in found.values()]
        if metric == ALL and len(pairs) > 1:
            rows += [_at_once(looks) for looks in found.values()]
    return MatchTable(metric, within, by, tuple(rows), tuple(dict.fromkeys(notes)))


def _choose(battery: Battery, wanted: str, notes: list[str]) -> list[tuple[Asked, MetricPart]]:
    """The tasks and metrics that are meant, without those that have no reference; why goes into ``notes``."""
    chosen = []
    for task in battery.tasks:
        one = _metric(task, wanted)
        if one is None:
            if wanted == ALL:
                lead = task.task.metrics[0]
                notes.append(f"{task.name} is left out: it has no metric in percentage points. Ask for it with a bound "
                             f"in {lead.unit}: {task.task.name}.{lead.name}")  # fmt: skip
        elif task.reference is None:
            notes.append(f"{task.name} is left out: it has no finished cell of full to compare with")
        else:
            chosen.append((task, one))
    return chosen


def _metric(task: Asked, wanted: str) -> MetricPart | None:
    metrics = task.task.metrics
    shares = [one for one in metrics if in_points(one)]
    if wanted == ALL:
        return shares[0] if shares else None
    if wanted in (task.name, task.task.name):
        return (shares or metrics)[0]
    return next((one for one in metrics if wanted == f"{task.task.name}.{one.name}"), None)


def _nothing(records: Sequence[QualityRecord], metric: str, notes: Sequence[str]) -> str:
    """Why there is nothing to match."""
    if notes:
        return f"nothing to match: {notes[0]}"
    tasks = {record.task.name: record.task for record in records}
    if not tasks:
        return "there are no quality records to match: run `kvatlas quality` first"
    finer = [f"{name}.{one.name}" for name, task in tasks.items() for one in task.metrics]
    return f"no record has the metric '{metric}': {nearest(metric, [ALL, *tasks, *finer])}"


# One family on one task


@dataclass(frozen=True, slots=True)
class _Look:
    """A row, and what the row for all at once is made of (entry 0: of the samples as they are; then of the resamples).

    Attributes:
        rank: ``[1 + R]`` the budget that is needed, or the share of full's bytes where budgets do not compare.
        share: ``[1 + R]`` the share of full's bytes that is needed.
        smallest: share of full's bytes at the smallest measured budget, ``least``.
    """

    row: Match
    rank: Floats | None = None
    share: Floats | None = None
    by_budget: bool = False
    smallest: float = 0.0
    least: float = 0.0


def _look(battery: Battery, task: Asked, metric: MetricPart, family: str, within: float, by: Axis) -> _Look:
    unit = "points" if in_points(metric) else metric.unit
    bare = Match(battery.title, task.name, metric.name, unit, family, "not measured")
    curve = next((curve for curve in task.curves if curve.family == family), None)
    xs = _bytes(curve, by)
    if curve is None or xs is None or task.reference is None:
        return _Look(bare)
    loss = _losses(task.reference, curve, metric)
    if not len(loss):
        return _Look(replace(bare, note="no sample that full and all its points have"))
    means = loss.mean(0, keepdims=True)
    if len(loss) > 1:
        means = np.concatenate([means, resampled_means(loss, zlib.crc32(task.task.name.encode()), RESAMPLES)])
    where, whole, budgets = crossings(means, within), bytes_of(task.reference, by), _budgets(curve)
    share = None if not whole else along(where, xs / whole)
    budget = None if budgets is None else along(where, budgets)
    row = replace(
        bare,
        status=status_of(where[0]),
        bytes=span_of(along(where, xs), xs[0]),
        share=None if share is None or not whole else span_of(share, xs[0] / whole),
        budget=None if budgets is None or budget is None else span_of(budget, budgets[0]),
        reached=reached_of(where),
        n=len(loss),
        note=_note(means[0], within, curve),
    )  # fmt: skip
    least = 0.0 if budgets is None else float(budgets[0])
    return _Look(row, budget, share, budget is not None, xs[0] / whole if whole else 0.0, least)


def _bytes(curve: Curve | None, by: Axis) -> Floats | None:
    """``[points]`` on the axis, or None where a point has none."""
    found = [None] if curve is None else [bytes_of(point, by) for point in curve.points]
    known = [x for x in found if x is not None]
    return np.array(known, dtype=np.float64) if len(known) == len(found) else None


def _budgets(curve: Curve) -> Floats | None:
    """``[points]``, or None where no straight line can be drawn between them."""
    return None if curve.budgets is None or math.inf in curve.budgets else np.array(curve.budgets, dtype=np.float64)


def _losses(reference: QualityRecord, curve: Curve, metric: MetricPart) -> Floats:
    """``[n, points]`` what each sample loses against full; above 0 is worse."""
    values = paired([reference, *curve.points], metric.name)
    lost = values[:, :1] - values[:, 1:] if metric.higher_is_better else values[:, 1:] - values[:, :1]
    return lost * 100 if in_points(metric) else lost


def _note(loss: Floats, within: float, curve: Curve) -> str:
    """What the one number hides: a curve that comes within, leaves again, or has one point only."""
    good = loss <= within + SLACK
    if len(good) == 1:
        return "one measured point"
    lost = np.flatnonzero(~good)
    if len(lost) and good[: lost[-1]].any():
        smaller = curve.points[int(np.argmax(good))].strategy.asked
        return f"not monotone: {smaller} is within, larger ones are not"
    return ""


# All at once


def _at_once(looks: Sequence[_Look]) -> Match:
    """The row of a family for all tasks together: it needs what the task needs that needs most."""
    rows = [look.row for look in looks]
    bare = replace(rows[0], task=ONCE, metric=ALL, unit="points", status="not measured", bytes=None, share=None,
                   budget=None, reached=None, n=0, note="")  # fmt: skip
    missing = [look.row.task for look in looks if look.share is None]
    if missing:
        return replace(bare, note=f"not measured on {', '.join(missing)}")
    shares = _stack([look.share for look in looks])
    by_budget = all(look.by_budget for look in looks)
    ranks = _stack([look.rank for look in looks]) if by_budget else shares
    most = ranks.argmax(0)
    worst = np.take_along_axis(shares, most[None], 0)[0]
    smallest = max(look.smallest for look in looks)
    row = rows[int(most[0])]
    status = status_of(worst[0])
    return replace(
        bare,
        status=status,
        share=span_of(worst, smallest),
        budget=span_of(ranks.max(0), max(look.least for look in looks)) if by_budget else None,
        reached=reached_of(worst),
        n=min(row.n for row in rows),
        binding="" if status == "not bracketed" else _binding(rows, row),
    )


def _binding(rows: Sequence[Match], most: Match) -> str:
    """The task that needs most, or all that were not reached."""
    never = [row.task for row in rows if row.status == "not reached"]
    return ", ".join(never) or most.task


def _stack(parts: Sequence[Floats | None]) -> Floats:
    """``[tasks, 1 + R]``; a task of one sample has no resamples, and repeats its value."""
    known = [part for part in parts if part is not None]
    length = max(map(len, known))
    return np.stack([part if len(part) == length else np.full(length, part[0]) for part in known])
