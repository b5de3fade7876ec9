"""quality.html: one file, no network, from quality records only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from kvatlas.advise.curves import Axis, Battery, batteries
from kvatlas.advise.match import ALL, ONCE, Match, MatchTable, match
from kvatlas.errors import UserError
from kvatlas.measure.files import write_whole
from kvatlas.measure.schema import REFERENCE
from kvatlas.quality.cell import QualityRecord
from kvatlas.report import quality_charts
from kvatlas.report.html import html
from kvatlas.report.quality import LEGEND, failure
from kvatlas.report.quality_show import AXIS_LABELS, asked
from kvatlas.report.quality_tables import full_figures, match_table, named, strategies, task_tables
from kvatlas.report.show import plain, size

BOUND = 5.0
WORDS = [
    ("full", "The reference: nothing is evicted, everything is read, as the model stores it."),
    ("family, budget", "A strategy without its budget is a family; its budgets make a curve."),
    ("Bytes on the device", "Keys, values and metadata of one sequence that lie on the device after compression: the "
     "mean over the task’s samples."),
    ("Bytes in all tiers", "The same with all other tiers. A strategy that reads selectively holds everything."),
    ("Bytes read a step", "What attention reads to make one token."),
    ("Compress, then answer", "All of the context but its last token is prefilled and compressed; the rest goes "
     "through the cache, so that the first token of an answer feels the compression too."),
    ("Intervals", "Of shares: Wilson’s, 95 %. Of means: the BCa bootstrap’s, 95 %. Of matched points: a paired "
     "bootstrap over samples, 95 %."),
    ("Points", "Percentage points of a share."),
]  # fmt: skip


def write_quality_page(records: Sequence[QualityRecord], path: str | os.PathLike[str]) -> None:
    """Write the page, atomically. Raises `UserError` when there is nothing to report or no place for it."""
    if not records:
        raise UserError("there are no quality records to report: run `kvatlas quality` first")
    write_whole(path, render(records), "the report ")


def render(records: Sequence[QualityRecord]) -> str:
    """The page as a string."""
    found = batteries(records)
    colours = tones(found)
    drawn: list[dict[str, Any]] = []
    models = [_model(battery, colours, drawn) for battery in found]
    scripts = ("redraw.js", "page.js", "quality.js")
    return html("quality.html.j2", scripts, drawn, models=models, bound=f"{BOUND:g}", match_legend=LEGEND, words=WORDS)


def tones(found: Sequence[Battery]) -> dict[str, int]:
    """A colour number for each family, the same everywhere on the page. 0 is the reference's."""
    families = dict.fromkeys(family for battery in found for family in battery.families)
    return {REFERENCE: 0} | {family: 1 + place for place, family in enumerate(families)}


def _model(battery: Battery, colours: dict[str, int], drawn: list[dict[str, Any]]) -> Mapping[str, Any]:
    """What the template shows of one model; its charts go into ``drawn``."""
    records = [record for task in battery.tasks for record in (*task.ok, *task.failed)]
    tables = _matches(records)
    legend = [named(family, colours) for family in (REFERENCE, *battery.families)]
    return {
        "headline": f"What {_count(len(battery.families))} lose on {plain(battery.model.name)}",
        "title": plain(battery.title),
        "families": battery.families,
        "legend": legend,
        "findings": findings(tables),
        "failed": [{"task": plain(task.name), "told": failure(record)}
                   for task in battery.tasks for record in task.failed],
        "matches": [
            {"by": table.by, "label": AXIS_LABELS[table.by], "table": match_table(table, colours),
             "notes": [plain(note) for note in table.notes]}
            for table in tables
        ],
        "tasks": [_task(task, colours, drawn) for task in battery.tasks],
        "strategies": strategies([record for record in records if record.family in colours], colours),
        "facts": _facts(battery, records),
    }  # fmt: skip


def _count(families: int) -> str:
    return f"{families} cache strategies" if families != 1 else "a cache strategy can"


def _task(task: Any, colours: dict[str, int], drawn: list[dict[str, Any]]) -> Mapping[str, Any]:
    panels = {"curves": quality_charts.curves(task, colours), "breakdowns": quality_charts.breakdowns(task, colours)}
    shown = {key: panel for key, panel in panels.items() if panel and any(panel["specs"].values())}
    drawn.append(shown)
    return {
        "index": len(drawn) - 1, "name": plain(task.name), "asked": asked(task), "full": full_figures(task),
        "curves": shown.get("curves"), "breakdowns": shown.get("breakdowns"), "tables": task_tables(task, colours),
    }  # fmt: skip


def _matches(records: Sequence[QualityRecord]) -> list[MatchTable]:
    """On each axis, or none where there is nothing to match."""
    try:
        return [match(records, ALL, BOUND, by) for by in get_args(Axis)]
    except UserError:
        return []


def findings(tables: Sequence[MatchTable]) -> list[str]:
    """One sentence a family: from which share of full's bytes on it stays near full on all tasks."""
    if not tables:
        return ["There is nothing to compare with: no task has a finished cell of full."]
    rows = {(table.by, row.family): row for table in tables for row in table.rows if _summary(row, table)}
    asked_of = len({row.task for row in tables[0].rows} - {ONCE})
    where = f"all {asked_of} tasks" if asked_of > 1 else tables[0].rows[0].task
    families = dict.fromkeys(row.family for row in tables[0].rows)
    return [_sentence(family, plain(where), {by: rows[by, family] for by in get_args(Axis) if (by, family) in rows})
            for family in families]  # fmt: skip


def _summary(row: Match, table: MatchTable) -> bool:
    several = any(other.task == ONCE for other in table.rows)
    return row.task == ONCE if several else True


def _sentence(family: str, where: str, rows: Mapping[str, Match]) -> str:
    row = rows["device"]
    name, held = plain(family), f" ({plain(row.binding)} needs most)" if row.binding else ""
    if row.status == "not measured":
        return f"{name} was not measured on {where}."
    if row.status == "not reached":
        on = plain(row.binding) or where
        return f"{name} stays within {BOUND:g} points of full at no measured budget on {on}."
    words = (("device", "of full’s bytes on the device"), ("total", "in all tiers"), ("read", "of those read a step"))
    shares = [f"{100 * share.value:.0f} % {what}" for by, what in words if by in rows and (share := rows[by].share)]
    at_most = "at most " if row.status == "not bracketed" else ""
    return f"{name} needs {at_most}{', '.join(shares)} to stay within {BOUND:g} points of full on {where}{held}."


def _facts(battery: Battery, records: Sequence[QualityRecord]) -> list[tuple[str, list[str]]]:
    """The model, the hardware, the versions: every value once."""
    model = battery.model
    here = [record.environment for record in records]
    shape = f"{model.layers} layers, {model.query_heads} query / {model.kv_heads} KV heads of {model.head_dim}"
    told = [
        ("Model", [f"{model.name}{f' from {model.source}' if model.source else ''}"]),
        ("Architecture", [f"{model.architecture}: {shape}"] if model.layers else []),
        ("Weights", [model.weights]),
        ("Weights stored as", [model.stored]),
        ("Computed in", [battery.dtype]),
        ("Hardware", [f"{e.cpu}, {e.cores} cores, {size(e.memory_bytes)} memory"
                      f"{f', {e.accelerator}' if e.accelerator else ''}" for e in here]),
        ("Versions", [f"kvatlas {e.kvatlas}, torch {e.torch}, transformers {e.transformers}, Python {e.python}"
                      for e in here]),
        ("Threads", [str(record.threads) for record in records]),
        ("Cells", [f"{len(records):,}, {sum(record.seconds for record in records) / 60:.0f} minutes together"]),
        ("Written", sorted({e.time for e in here})[:1] + sorted({e.time for e in here})[1:][-1:]),
    ]  # fmt: skip
    return [(label, list(map(plain, dict.fromkeys(filter(None, values))))) for label, values in told if any(values)]
