"""Tables of the quality page: figures and negatives by family and budget, matched points by family and task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvatlas.advise.against import Against, against
from kvatlas.advise.curves import Asked
from kvatlas.advise.match import ONCE, Match, MatchTable
from kvatlas.quality.cell import MetricPart, QualityRecord
from kvatlas.report.charts import colour
from kvatlas.report.quality_charts import glyph
from kvatlas.report.quality_show import (
    budget_span,
    budget_text,
    by_budget,
    bytes_unit,
    ends,
    matched,
    metric_label,
    metric_unit,
    short,
    span_text,
    whole,
)
from kvatlas.report.show import Unit, details, plain

Said = Mapping[str, Any]
EMPTY: Said = {"text": "–", "small": [], "details": "not measured"}


def named(family: str, tones: Mapping[str, int]) -> dict[str, Any]:
    """A family with its colour and mark, for legends and rows."""
    return {"name": plain(family), "tone": colour(tones[family]), "glyph": glyph(tones[family])}


def task_tables(task: Asked, tones: Mapping[str, int]) -> list[Said]:
    """The leading metric's figures, its negatives, then the other metrics."""
    tables: list[Said] = []
    for place, metric in enumerate(task.task.metrics):
        if not any(metric.name in record.figures for record in task.ok):
            continue
        found = against(task, metric)
        tables.append({**_figures(task, metric, found, tones), "lead": place == 0})
        if metric.kind == "right" and found:
            tables.append({**_negatives(task, metric, found, tones), "lead": place == 0})
    return tables


def _matrix(task: Asked, tones: Mapping[str, int], say: Callable[[QualityRecord], Said]) -> dict[str, Any]:
    heads, cells = by_budget(task.curves)
    rows = [
        {**named(family, tones), "cells": [say(points[head]) if head in points else EMPTY for head in heads]}
        for family, points in cells.items()
    ]
    return {"heads": [{"name": head} for head in ("budget", *heads)], "rows": rows}


def _figures(task: Asked, metric: MetricPart, found: Mapping[str, Against], tones: Mapping[str, int]) -> Said:
    unit = metric_unit(metric)

    def say(record: QualityRecord) -> Said:
        figure = record.figures.get(metric.name)
        if figure is None:
            return EMPTY
        other = found.get(record.strategy.normalised)
        mark = " *" if other and other.differs else ""
        more = f"; p = {other.p:.2g}, with Holm’s correction {other.adjusted:.2g}" if other else ""
        small = [line for line in (ends(figure, unit),) if line]
        return {"text": short(figure.value, unit) + mark, "small": small, "details": details(figure, unit) + more}

    sizes = sorted({figure.n for record in task.ok if (figure := record.figures.get(metric.name))})
    n = f"n = {sizes[0]:,}" if len(sizes) == 1 else f"n = {sizes[0]:,} to {sizes[-1]:,}"
    test = "McNemar’s exact test" if metric.kind == "right" else "a paired sign-flip test"
    kind = "Wilson" if metric.kind == "right" else "bootstrap"
    told = f"{n} in every cell. Small: the 95 % interval ({kind})."
    if found:
        told += f" * differs from full by {test} at 5 %, corrected for {len(found)} comparisons (Holm)."
    return {**_matrix(task, tones, say), "title": metric_label(metric) + _better(metric), "note": told}


def _better(metric: MetricPart) -> str:
    return "" if metric.higher_is_better else ", lower is better"


def _negatives(task: Asked, metric: MetricPart, found: Mapping[str, Against], tones: Mapping[str, int]) -> Said:
    """How many samples it gets wrong that full gets right, and the reverse."""

    def say(record: QualityRecord) -> Said:
        other = found.get(record.strategy.normalised)
        if other is None or other.negatives is None:
            return EMPTY
        lost, won = other.negatives.lost, other.negatives.won
        value, low, high = (100 * (end or 0.0) for end in
                            (other.difference.value, other.difference.low, other.difference.high))  # fmt: skip
        points = f"{value:+.0f} points ({low:+.0f} to {high:+.0f})".replace("-", "−")
        return {"text": f"−{lost} +{won}", "small": [points], "details": f"n = {other.negatives.n:,}"}

    first = next(one.negatives for one in found.values() if one.negatives is not None)
    right = first.both + first.lost
    title = f"Negatives: {plain(metric.name)} of full, lost and won"
    told = (f"−: samples that full gets right and the strategy gets wrong, of {right:,}; +: the reverse, of "
            f"{first.n - right:,}. Small: the difference with Newcombe’s 95 % interval.")  # fmt: skip
    return {**_matrix(task, tones, say), "title": title, "note": told}


def match_table(table: MatchTable, tones: Mapping[str, int]) -> Said:
    """Tasks down, all at once first, families across: there are more tasks than families."""
    tasks = sorted(dict.fromkeys(row.task for row in table.rows), key=lambda task: task != ONCE)
    families = list(dict.fromkeys(row.family for row in table.rows))
    units = {task: bytes_unit([row.bytes.value for row in table.rows if row.task == task and row.bytes])
             for task in tasks}  # fmt: skip
    at = {(row.family, row.task): row for row in table.rows}
    rows = [
        {"name": plain(task), "cells": [_point(at[family, task], units[task]) for family in families]} for task in tasks
    ]
    return {"heads": [{"name": ""}, *(named(family, tones) for family in families)], "rows": rows}


def _point(row: Match, unit: Unit) -> Said:
    if row.status not in ("reached", "not bracketed"):
        return {"text": row.status, "small": [plain(row.binding)] if row.binding else [], "details": _sure(row)}
    share = f"· {row.share.value:.0%} of full" if row.share and row.bytes else ""
    budget = f"budget {budget_text(row)}" if row.budget else ""
    span = span_text(row.bytes, unit) if row.bytes else span_text(row.share, Unit(0.01, "%")).replace("–", " – ")
    within = f"({budget_span(row)})" if row.budget and budget_span(row) else ""
    lines = ((span, share), (budget, within), (f"for {plain(row.binding)}," if row.binding else "", f"n = {row.n:,}"))
    small = [" ".join(filter(None, parts)) for parts in lines]
    return {"text": matched(row, unit), "small": [line for line in small if line], "details": _sure(row)}


def _sure(row: Match) -> str:
    """n, in how many resamples, and what else has to be known."""
    sure = "" if row.reached is None else f"reached in {row.reached:.0%} of the resamples"
    said = [f"n = {row.n:,}", sure, plain(row.note)]
    return ", ".join(part for part in said if part)


def full_figures(task: Asked) -> str:
    """The reference's figures, all metrics."""
    if task.reference is None:
        return "not measured"
    return "; ".join(
        f"{plain(metric.name)} {whole(figure, metric_unit(metric))}"
        for metric in task.task.metrics
        if (figure := task.reference.figures.get(metric.name))
    )


def strategies(records: Sequence[QualityRecord], tones: Mapping[str, int]) -> list[Said]:
    """One row a family: the answers of its first record."""
    first: dict[str, QualityRecord] = {}
    for record in records:
        first.setdefault(record.family, record)
    return [
        {**named(family, tones), "normalised": plain(record.strategy.normalised),
         "answers": [plain(getattr(record.strategy, word)) for word in ("keep", "read", "place", "encode")]}
        for family, record in first.items()
    ]  # fmt: skip
