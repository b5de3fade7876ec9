"""Figures of the battery as readers see them: shares in per cent, bytes in one unit a table, cells by budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvatlas.advise.curves import Asked, Axis, Curve, bytes_of, in_points
from kvatlas.advise.match import Match, MatchTable, Span
from kvatlas.measure.figure import Figure
from kvatlas.quality.cell import MetricPart, QualityRecord
from kvatlas.report.show import BYTES, Unit, number, plain

AXIS_LABELS: dict[Axis, str] = {
    "device": "KV bytes on the device", "total": "KV bytes in all tiers", "read": "KV bytes read a step",
}  # fmt: skip


def metric_unit(metric: MetricPart) -> Unit:
    """Shares are shown in per cent, other metrics as they are."""
    return Unit(0.01, "%") if in_points(metric) else Unit(1.0, plain(metric.unit))


def metric_label(metric: MetricPart) -> str:
    """``recalled (%)``, ``kl (nats)``."""
    unit = metric_unit(metric).name
    return f"{plain(metric.name)} ({unit})" if unit else plain(metric.name)


def bytes_unit(values: Iterable[float | None]) -> Unit:
    """One unit for bytes that are read side by side."""
    top = max((abs(value) for value in values if value is not None), default=0.0)
    size, name = next((pair for pair in BYTES if top >= (10 if pair[1] == "GB" else 1) * pair[0]), BYTES[-1])
    return Unit(size, name)


def short(value: float, unit: Unit) -> str:
    """A figure in a narrow cell: per cent without decimals, other numbers with three digits."""
    return f"{unit.of(value):.0f}" if unit.name == "%" else number(unit.of(value))


def ends(figure: Figure, unit: Unit) -> str:
    """``85-96``, or nothing where a figure has no interval or none of any width."""
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return ""
    return f"{short(figure.low, unit)}–{short(figure.high, unit)}"


def whole(figure: Figure, unit: Unit) -> str:
    """``92 % (85–96), n = 100``."""
    between = ends(figure, unit)
    value = f"{short(figure.value, unit)} {unit.name}".rstrip()
    return f"{value} ({between}), n = {figure.n:,}" if between else f"{value}, n = {figure.n:,}"


def budget_name(record: QualityRecord) -> str:
    """``0.3``, ``512 tokens`` or ``as it is`` (a strategy without a budget)."""
    budget = record.budget
    if budget is None:
        return "as it is"
    return f"{budget} tokens" if isinstance(budget, int) else str(budget)


def by_budget(curves: Iterable[Curve]) -> tuple[list[str], dict[str, dict[str, QualityRecord]]]:
    """All budgets as column heads, the largest first, and each family's cells by them."""
    cells = {curve.family: {budget_name(point): point for point in curve.points} for curve in curves}
    order = {budget_name(point): _rank(point) for curve in curves for point in curve.points}
    return sorted(order, key=lambda head: order[head], reverse=True), cells


def _rank(record: QualityRecord) -> tuple[int, float]:
    budget = record.budget
    return (2, 0.0) if budget is None else (0 if isinstance(budget, int) else 1, float(budget))


def longest(tasks: Sequence[Asked]) -> Asked | None:
    """The task whose sequences hold most under full: that with the longest contexts."""
    sized = [(bytes_of(task.reference, "device") or 0.0, task) for task in tasks if task.reference is not None]
    return max(sized, key=lambda pair: pair[0])[1] if sized else None


def asked(task: Asked) -> str:
    """What was asked in a line: parameters, limit, seed."""
    said = [f"{plain(str(key))} {plain(str(value))}" for key, value in task.task.parameters.items()]
    return ", ".join([*said, f"limit {task.task.limit:,}", f"seed {task.task.seed}"])


# Matched points


def matched(row: Match, unit: Unit) -> str:
    """The point in a cell: bytes, or for all at once the share of full's bytes."""
    if row.status in ("not reached", "not measured"):
        return row.status
    at_most = "≤ " if row.status == "not bracketed" else ""
    if row.bytes is not None:
        return f"{at_most}{number(unit.of(row.bytes.value))} {unit.name}"
    return at_most + (f"{row.share.value:.0%} of full" if row.share else "–")


def budget_text(row: Match) -> str:
    """The budget at the point, or a dash."""
    if row.budget is None:
        return "–"
    return f"{row.budget.value:.2f}" if row.budget.value <= 1 else f"{row.budget.value:,.0f}"


def span_text(span: Span | None, scale: Unit, digits: int | None = None) -> str:
    """An interval, ``8.18–15.0``. Ends outside of all measured points are ``below`` and ``beyond``."""
    if span is None:
        return ""
    value, low, high = (_end(end, scale, digits) for end in (span.value, span.low, span.high))
    if low == high:
        return "" if low == value else low
    return f"{low}–{high}"


def _end(end: float, scale: Unit, digits: int | None) -> str:
    if math.isinf(end):
        return "below" if end < 0 else "beyond"
    return number(scale.of(end)) if digits is None else f"{scale.of(end):,.{digits}f}"


def budget_span(row: Match) -> str:
    """The interval of the budget at the point."""
    return span_text(row.budget, Unit(1.0, ""), 2 if row.budget and row.budget.value <= 1 else 0)


def match_title(table: MatchTable) -> str:
    """What the table says, in a sentence."""
    values = {row.unit for row in table.rows}
    unit = values.pop() if len(values) == 1 else "points"
    return f"Smallest {AXIS_LABELS[table.by]} (one sequence) that stay within {table.within:g} {unit} of full"
