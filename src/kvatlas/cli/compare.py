"""``kvatlas compare`` and ``kvatlas report``: from options to a study, and from its records to what a person reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvatlas.cli.output import check_file, stopped, write_json
from kvatlas.errors import UserError
from kvatlas.measure.record import Record, read_records


def run_compare(json: str | None, **options: Any) -> int:
    """Measure, write the report, show the result block. The exit code: 1 when nothing could be measured."""
    from kvatlas.cli.progress import watcher
    from kvatlas.study.compare import compare
    from kvatlas.study.plan import make_plan

    if json is not None:
        check_file("--json", json)
    plan = make_plan(**options)
    try:
        with watcher() as shown:
            outcome = compare(plan, shown)
    except KeyboardInterrupt:
        return stopped(plan.out)
    if json is not None:
        write_json(json, outcome.records)
    for note in outcome.notes:
        print(note, file=sys.stderr)
    if not outcome.records:
        return 1
    show(outcome.records, plan.out / "report.html", read_records(plan.out).records)
    ok = any(record.status == "ok" for record in outcome.records)
    return 0 if ok and not outcome.quality_failed else 1


def run_report(folder: str, out: str | None) -> None:
    """Report and result block from stored records."""
    if out is not None:
        check_file("--out", out)
    found = read_records(folder)
    for warning in found.warnings:
        print(warning, file=sys.stderr)
    if not found.records:
        raise UserError(f"{folder} has no records; run `kvatlas compare --out {folder}` first")
    show(found.records, Path(out) if out else Path(folder) / "report.html")


def show(records: list[Record], page: Path, reported: list[Record] | None = None) -> None:
    """The report as a file (of ``reported``, if that is more) and the result block on stdout."""
    from kvatlas.report import result_block, result_text, write_report

    write_report(reported or records, page)
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(result_block(records))
    else:
        print(result_text(records))
    print(f"report: {page}")
