"""report.html: one file, no network, from records only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvatlas.errors import UserError
from kvatlas.measure.files import write_whole
from kvatlas.measure.record import Record
from kvatlas.report import charts
from kvatlas.report.cells import STATUS, Cell, cautions, cells, facts, name, tones
from kvatlas.report.findings import findings, headline
from kvatlas.report.html import html
from kvatlas.report.metrics import GROUPS, METRICS, Metric, present
from kvatlas.report.show import details, interval, number, plain, unit

WORDS = [
    ("append", "Part of a decode step: putting the new token into the cache, encoded as the strategy stores it."),
    ("select", "Deciding which tokens this step reads, speculation included."),
    ("fetch", "Bringing keys and values from another tier, gathering or decoding them for attention."),
    ("attend", "Attention itself over what was selected, with the statistics that the strategy asked for."),
    ("drop", "Deciding what to evict after the step, and freeing it."),
    ("model", "All of the step that is not the cache: weights, norms, sampling."),
    ("Device, host", "Tiers of memory. On a CPU they are logical: the same memory, counted by where bytes are placed."),
    (
        "Reference",
        "The strategy whose output the others are compared with; its level is the dashed line in the charts.",
    ),
]


def write_report(records: list[Record], path: str | os.PathLike[str]) -> None:
    """Write the report, atomically. Raises `UserError` when there is nothing to report or no place for it."""
    if not records:
        raise UserError("there are no records to report: run `kvatlas compare` first")
    write_whole(path, render(records), "the report ")


def render(records: list[Record]) -> str:
    """The page as a string."""
    found = cells(records)
    colours = tones(found)
    drawn = [_charts(cell, colours) for cell in found]
    return html(
        "report.html.j2",
        ("redraw.js", "page.js"),
        drawn,
        cells=[_cell(cell, colours, panels) for cell, panels in zip(found, drawn)],
        definitions=[(metric.label, metric.means) for metric in present(records) or METRICS] + WORDS,
    )


def _charts(cell: Cell, colours: dict[str, int]) -> dict[str, Any]:
    return {
        "quality": charts.scatter(cell, colours, charts.QUALITY),
        "speed": charts.scatter(cell, colours, charts.SPEED),
        "steps": {"x": [], "y": [], "specs": {"": charts.step_split(cell)}, "notes": {"": ""}},
    }


def _cell(cell: Cell, colours: dict[str, int], panels: dict[str, Any]) -> Mapping[str, Any]:
    """What the template shows of one cell."""
    return {
        "title": cell.title,
        "headline": headline(cell),
        "findings": findings(cell),
        "cautions": cautions(cell),
        "strategies": [_strategy(record, colours) for record in cell.records],
        "failed": [_failure(record) for record in cell.failed],
        "tables": [table for group in GROUPS if (table := _table(cell, group, colours))],
        "facts": facts(cell),
        "samples": _samples(cell),
        "has": {key: any(panel["specs"].values()) for key, panel in panels.items()},
        "choices": panels,
        "parts": ["model" if part == "other" else part for part in charts.STEP],
    }


def _strategy(record: Record, colours: dict[str, int]) -> Mapping[str, Any]:
    spec = record.strategy
    answers = [(word, plain(getattr(spec, word))) for word in ("keep", "read", "place", "encode")]
    normal = plain(spec.normalised)
    return {"name": name(record), "tone": _tone(record, colours), "normalised": normal, "answers": answers}


def _tone(record: Record, colours: dict[str, int]) -> int:
    return charts.colour(colours[name(record)])


def _failure(record: Record) -> Mapping[str, str]:
    return {"name": name(record), "status": STATUS[record.status], "error": plain(record.error or "")}


def _table(cell: Cell, group: str, colours: dict[str, int]) -> Mapping[str, Any] | None:
    metrics = present(cell.ok, group)
    if not metrics:
        return None
    rows = [
        {
            "name": name(record),
            "tone": _tone(record, colours),
            "place": place,
            "cells": [_figure(record, metric, cell) for metric in metrics],
        }
        for place, record in enumerate(cell.ok)
    ]
    heads = [{"short": metric.short, "unit": unit(metric, cell.ok).name, "label": metric.label} for metric in metrics]
    return {"group": group, "heads": heads, "rows": rows}


def _figure(record: Record, metric: Metric, cell: Cell) -> Mapping[str, Any]:
    figure, one = metric.of(record), unit(metric, cell.ok)
    if figure is None:
        return {"value": None, "text": "–", "interval": "", "details": "not measured", "modelled": False}
    return {
        "value": one.of(figure.value),
        "text": number(one.of(figure.value)),
        "interval": interval(figure, one),
        "details": details(figure, one),
        "modelled": figure.kind == "modelled",
    }


def _samples(cell: Cell) -> list[tuple[str, str]]:
    """n and kind of interval of every metric, as (metric, sentence)."""
    told = []
    for metric in present(cell.ok):
        figures = [figure for record in cell.ok if (figure := metric.of(record))]
        sizes = sorted({figure.n for figure in figures})
        kinds = sorted({figure.interval for figure in figures if figure.interval})
        modelled = sorted({figure.kind for figure in figures}) if any(f.kind == "modelled" for f in figures) else []
        if sizes[-1] > 1 or kinds or modelled:
            n = f"n = {sizes[0]:,}" if len(sizes) == 1 else f"n = {sizes[0]:,} to {sizes[-1]:,}"
            told.append((metric.label, ", ".join([n, *kinds, *modelled])))
    return told
