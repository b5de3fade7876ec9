"""The result block of the terminal: what fits in 100 columns, with units and n."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvatlas.measure.record import Record
from kvatlas.report.cells import STATUS, Cell, cautions, cells, name
from kvatlas.report.findings import findings, headline
from kvatlas.report.metrics import BY_KEY, Metric
from kvatlas.report.show import number, plain, unit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MAIN = ("ttft", "tpot", "tpot_p95", "tokens_per_s", "device", "all_tiers", "read", "kept", "read_fraction",
        "perplexity", "kl", "top1", "recall")  # fmt: skip
COST = ("compression", "peak_prefill", "peak_decode", "per_gb_device", "per_gb_all", "per_gb_peak", "scanned",
        "transfers", "moved", "blocked")  # fmt: skip
STEP = ("append", "select", "fetch", "attend", "drop", "other")
INLINE = {"kept", "read_fraction", "recall"}  # their unit stands in the cell
HEADS = {
    "tokens_per_s": "tok/s", "device": "KV\ndevice", "all_tiers": "KV\nall", "read": "read\n/step",
    "scanned": "scan\n/step", "moved": "moved\n/step", "blocked": "blocked\n/step",
    "peak_prefill": "peak\nprefill", "peak_decode": "peak\ndecode", "per_gb_device": "tok/s/GB\ndevice",
    "per_gb_all": "tok/s/GB\nall", "per_gb_peak": "tok/s/GB\nprocess", "compression": "com-\npress",
    "transfers": "copies\n/step", "perplexity": "PPL", "kept": "kept", "recall": "recall",
}  # fmt: skip


def result_block(records: list[Record]) -> RenderableType:
    """What `kvatlas compare` prints when it ends: the main table, the costs, the findings, the n's, the failures."""
    from rich.console import Group
    from rich.text import Text

    if not records:
        return Text("No records to show.")
    parts: list[RenderableType] = []
    for cell in cells(records):
        parts.append(Text(cell.title, style="bold"))
        for table in _tables(cell):
            parts += [table, Text("")]
        parts += _failures(cell)
        parts += [Text(f"• {sentence}") for sentence in (headline(cell) + ".", *findings(cell)) if cell.ok]
        parts += [Text(f"{line}", style="dim") for line in (*cautions(cell), counts(cell)) if line]
        parts.append(Text(""))
    return Group(*parts[:-1])


def result_text(records: list[Record], width: int = 100) -> str:
    """The result block as plain text."""
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
    console.print(result_block(records))
    return console.file.getvalue()  # type: ignore[attr-defined]


def _tables(cell: Cell) -> list[Table]:
    if not cell.ok:
        return []
    costs = _table(cell, COST, skip_empty=True)
    tables = [_table(cell, MAIN, skip_empty=True), costs, _steps(cell)]
    return [table for table in tables if table is not None and len(table.columns) > 1]


def _new() -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(Text("strategy"), overflow="fold", min_width=9, max_width=22, vertical="bottom")
    return table


def _table(cell: Cell, keys: tuple[str, ...], skip_empty: bool) -> Table:
    from rich.text import Text

    table = _new()
    metrics = [BY_KEY[key] for key in keys if _told(cell, BY_KEY[key]) or not skip_empty]
    for metric in metrics:
        units = "" if metric.key in INLINE else unit(metric, cell.ok).name
        head = f"{HEADS.get(metric.key, metric.short)}\n{units}".rstrip()
        table.add_column(Text(head), justify="right", no_wrap=True)
    for record in cell.ok:
        table.add_row(Text(name(record)), *(Text(_text(metric, record, cell)) for metric in metrics))
    return table


def _told(cell: Cell, metric: Metric) -> bool:
    return any((figure := metric.of(record)) is not None and figure.value != 0 for record in cell.ok)


def _text(metric: Metric, record: Record, cell: Cell) -> str:
    figure = metric.of(record)
    if figure is None:
        return "–"
    if metric.key == "recall":
        return f"{round(figure.value * figure.n)}/{figure.n}"
    if metric.key in INLINE:
        return f"{figure.value:.0%}" if figure.value >= 0.095 else f"{figure.value:.1%}"
    mark = "~" if figure.kind == "modelled" else ""
    return mark + number(unit(metric, cell.ok).of(figure.value))


def _steps(cell: Cell) -> Table | None:
    """One decode step's time by part, in ms."""
    from rich.text import Text

    timed = [record for record in cell.ok if record.timing and record.timing.step]
    if not timed:
        return None
    table = _new()
    for part in STEP:
        table.add_column(Text(f"{'model' if part == 'other' else part}\nms/step"), justify="right", no_wrap=True)
    for record in timed:
        values = [getattr(record.timing.step, part).value * 1e3 for part in STEP]  # type: ignore[union-attr]
        table.add_row(Text(name(record)), *(Text(number(value)) for value in values))
    return table


def _failures(cell: Cell) -> list[RenderableType]:
    from rich.text import Text

    return [
        Text(f"✗ {name(record)} {STATUS[record.status]}: {plain(record.error or '')}", style="red")
        for record in cell.failed
    ]


def counts(cell: Cell) -> str:
    """The n of every kind of figure, in a line."""
    kinds = (("tpot", "n = {} repeats (median)"), ("perplexity", "{} tokens (PPL)"), ("kl", "{} tokens (KL)"),
             ("top1", "{} tokens (top-1)"), ("recall", "{} facts (recall)"))  # fmt: skip
    said = []
    for key, text in kinds:
        figures = [figure for record in cell.ok if (figure := BY_KEY[key].of(record))]
        if sizes := sorted({figure.n for figure in figures}):
            said.append(text.format(f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"))
    modelled = any(
        (figure := metric.of(record)) and figure.kind == "modelled" for record in cell.ok for metric in BY_KEY.values()
    )
    return "; ".join(said) + (". ~ modelled, not measured" if modelled else "")
