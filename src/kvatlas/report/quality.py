"""The battery on the terminal: a table a task, then what the caches held, in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvatlas.advise.against import Against, against
from kvatlas.advise.curves import AXES, Asked, Battery, batteries, bytes_of
from kvatlas.advise.match import Match, MatchTable
from kvatlas.quality.cell import MetricPart, QualityRecord
from kvatlas.report.cells import STATUS
from kvatlas.report.quality_show import (
    asked,
    budget_span,
    budget_text,
    by_budget,
    bytes_unit,
    ends,
    longest,
    match_title,
    matched,
    metric_label,
    metric_unit,
    short,
    span_text,
    whole,
)
from kvatlas.report.show import Unit, number, plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COLUMNS = 6
"""Budgets beside each other; more go into a second table."""
MARK = "*"


def quality_block(records: Sequence[QualityRecord]) -> RenderableType:
    """What `kvatlas quality` prints when it ends: for each model its tasks, its footprint, and what it was."""
    from rich.console import Group
    from rich.text import Text

    if not records:
        return Text("No quality records to show.")
    parts: list[RenderableType] = []
    for battery in batteries(records):
        for task in battery.tasks:
            parts += [*_task(task), Text("")]
        parts += [*_footprint(battery), Text(_about(battery)), Text("")]
    return Group(*parts[:-1])


def quality_text(records: Sequence[QualityRecord], width: int = 80) -> str:
    """The block as plain text."""
    return _text(quality_block(records), width)


def match_text(table: MatchTable, width: int = 80) -> str:
    """Matched points as plain text: a row a family, one table a model and task."""
    return _text(match_block(table), width)


def _text(block: RenderableType, width: int) -> str:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
    console.print(block)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"  # type: ignore[attr-defined]


def _new(first: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(Text(first), overflow="fold", min_width=8, max_width=18)
    return table


# Tasks


def _task(task: Asked) -> list[RenderableType]:
    """Title, full's figures, a table for the leading metric with intervals, one without for each other."""
    from rich.text import Text

    parts: list[RenderableType] = [Text(plain(task.name), style="bold"), Text(asked(task), style="dim")]
    for place, metric in enumerate(task.task.metrics):
        if not any(metric.name in record.figures for record in task.ok):
            continue
        better = "" if metric.higher_is_better else ", lower is better"
        parts.append(Text(f"{metric_label(metric)}{better}; full: {_reference(task, metric)}"))
        parts += _tables(task, _cells(task, metric, intervals=place == 0))
        if place == 0 and (line := _counts(task, metric)):
            parts.append(Text(line, style="dim"))
    return [*parts, *(Text(f"✗ {failure(record)}", style="red") for record in task.failed)]


def failure(record: QualityRecord) -> str:
    """What became of a cell that did not finish."""
    return f"{plain(record.strategy.asked)} {STATUS[record.status]}: {plain(record.error or '')}"


def _reference(task: Asked, metric: MetricPart) -> str:
    figure = None if task.reference is None else task.reference.figures.get(metric.name)
    return "not measured" if figure is None else whole(figure, metric_unit(metric))


def _cells(task: Asked, metric: MetricPart, intervals: bool) -> Callable[[QualityRecord], str]:
    """What a record's cell says: value, mark, and its interval below."""
    unit, found = metric_unit(metric), against(task, metric)

    def say(record: QualityRecord) -> str:
        figure = record.figures.get(metric.name)
        if figure is None:
            return "–"
        other = found.get(record.strategy.normalised)
        value = f"{short(figure.value, unit)}{MARK if other and other.differs else ' '}"
        return f"{value}\n{ends(figure, unit)} " if intervals else value

    return say


def _tables(task: Asked, say: Callable[[QualityRecord], str]) -> list[RenderableType]:
    """Families down, budgets across."""
    from rich.text import Text

    heads, cells = by_budget(task.curves)
    tables: list[RenderableType] = []
    for start in range(0, len(heads), COLUMNS):
        part = heads[start : start + COLUMNS]
        table = _new("budget")
        for head in part:
            table.add_column(Text(f"{head} "), justify="right", no_wrap=True)
        for family, points in cells.items():
            if any(head in points for head in part):
                table.add_row(
                    Text(plain(family)), *(Text(say(points[head])) if head in points else "–" for head in part)
                )
        tables.append(table)
    return tables


def _counts(task: Asked, metric: MetricPart) -> str:
    """n, and what the mark and the small numbers mean."""
    sizes = sorted({figure.n for record in task.ok if (figure := record.figures.get(metric.name))})
    n = f"n = {sizes[0]:,}" if len(sizes) == 1 else f"n = {sizes[0]:,} to {sizes[-1]:,}"
    test = "McNemar" if metric.kind == "right" else "paired sign-flip test"
    kind = "Wilson" if metric.kind == "right" else "bootstrap"
    found = list(against(task, metric).values())
    compared = f"; {MARK} differs from full ({test}, Holm over {len(found)}, 5 %)" if found else ""
    return f"{n}; below: 95 % interval ({kind}){compared}{_lost(found)}"


def _lost(found: Sequence[Against]) -> str:
    """The cell that loses most samples which full gets right."""
    counted = [(one.negatives.lost, one) for one in found if one.negatives is not None]
    if not counted or not max(lost for lost, _ in counted):
        return ""
    lost, worst = max(counted, key=lambda pair: pair[0])
    assert worst.negatives is not None
    return (f". Most lost: {plain(worst.record.strategy.asked)} gets {lost} of the {lost + worst.negatives.both} wrong "
            f"that full gets right, and {worst.negatives.won} right that full gets wrong")  # fmt: skip


# What the caches held


def _footprint(battery: Battery) -> list[RenderableType]:
    """Bytes of one sequence on the three axes, on the task with the longest contexts."""
    from rich.text import Text

    task = longest(battery.tasks)
    if task is None or task.reference is None or not task.reference.footprint:
        return []
    sizes = [bytes_of(record, axis) for record in task.ok for axis in AXES]
    unit = bytes_unit(sizes)
    full = {axis: bytes_of(task.reference, axis) for axis in AXES}
    held = ", ".join(f"{axis} {number(unit.of(size))}" for axis, size in full.items() if size is not None)
    parts: list[RenderableType] = [
        Text(f"KV bytes of one sequence, {unit.name}, on {plain(task.name)}", style="bold"),
        Text(f"full: {held}. Device, total (all tiers), read (by one step)"),
    ]
    heads, cells = by_budget(task.curves)
    for start in range(0, len(heads), COLUMNS):
        table = _footprint_table(heads[start : start + COLUMNS], cells, unit)
        parts.append(table)
    return parts


def _footprint_table(heads: Sequence[str], cells: dict[str, dict[str, QualityRecord]], unit: Unit) -> Table:
    from rich.text import Text

    table = _new("budget")
    table.add_column("")
    for head in heads:
        table.add_column(Text(head), justify="right", no_wrap=True)
    for family, points in cells.items():
        for axis in AXES:
            sizes = [bytes_of(points[head], axis) if head in points else None for head in heads]
            if any(size is not None for size in sizes):
                told = ("–" if size is None else number(unit.of(size)) for size in sizes)
                table.add_row(Text(plain(family) if axis == "device" else ""), axis, *told)
    return table


def _about(battery: Battery) -> str:
    samples = max((figure.n for task in battery.tasks for record in task.ok for figure in record.figures.values()),
                  default=0)  # fmt: skip
    return f"Measured on {plain(battery.title)}; n up to {samples:,}."


# Matched points


def match_block(table: MatchTable) -> RenderableType:
    """Matched points: bytes, share of full's, interval, budget, how surely."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(f"{match_title(table)}", style="bold"), Text("")]
    for model in dict.fromkeys(row.model for row in table.rows):
        for task in dict.fromkeys(row.task for row in table.rows if row.model == model):
            rows = [row for row in table.rows if row.model == model and row.task == task]
            parts += [*_matched_task(rows, table.within), Text("")]
        parts += [Text(f"Measured on {plain(model)}."), Text("")]
    parts.append(Text(f"{LEGEND} {SURE}", style="dim"))
    parts += [Text(plain(note), style="dim") for note in table.notes]
    return Group(*parts)


LEGEND = (
    "By straight lines between measured budgets, from the largest down, so that all larger measured ones are within. "
    "95 % intervals: a paired bootstrap over samples; below and beyond are outside of the measured points. "
    "≤: even the smallest measured budget is within, the true point lies below it (not bracketed)."
)
SURE = "Sure: the share of resamples in which it was reached."


def _matched_task(rows: Sequence[Match], bound: float) -> list[RenderableType]:
    from rich.text import Text

    at_once = rows[0].bytes is None and rows[0].metric == "all"
    unit = bytes_unit([row.bytes.value for row in rows if row.bytes])
    what = "every task above" if at_once else f"{plain(rows[0].metric)}, within {bound:g} {plain(rows[0].unit)}"
    table = _new("")
    for head in ("point", "of full", f"95 % ({'% of full' if at_once else unit.name})", "budget", "95 %", "sure", "n"):
        table.add_column(Text(head), justify="right")
    for row in rows:
        table.add_row(Text(plain(row.family)), *map(Text, _matched_row(row, unit, at_once)))
    said = [f"{plain(row.family)}: {plain(row.note)}" for row in rows if row.note]
    said += [f"{plain(row.family)} is held back by {plain(row.binding)}" for row in rows if row.binding]
    return [Text(f"{plain(rows[0].task)} ({what})", style="bold"), table, *(Text(line, style="dim") for line in said)]


def _matched_row(row: Match, unit: Unit, at_once: bool) -> list[str]:
    known = row.status in ("reached", "not bracketed")
    span = span_text(row.share, Unit(0.01, "%")) if at_once else span_text(row.bytes, unit)
    share = f"{row.share.value:.0%}" if known and row.share else "–"
    return [
        matched(row, unit),
        "" if at_once else share,
        span if known and span else "–",
        budget_text(row),
        budget_span(row) or "–",
        "–" if row.reached is None else f"{row.reached:.0%}",
        f"{row.n:,}",
    ]
