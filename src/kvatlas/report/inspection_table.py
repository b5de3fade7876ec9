"""An inspection in the terminal: a row a layer, then where in the context, then what to look at first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvatlas.quality.inspect import Inspection
from kvatlas.report.inspection import PLACES, Row, percent, rows, sentences, title, zone_heads, zones

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

HEADS = ("layer", "covered\n%", "KV heads\n%", "worst\n%", "best\n%", "overlap\n%", "KV heads\n%", "error\n%",
         "kept\n%", "read\n%", "sinks\nmass", "sinks\nread")  # fmt: skip
WHERE = "Where in the context: the first and last tokens, ten equal parts between; mean of all layers"
POOR, BAD = 0.8, 0.5


def block(found: Inspection) -> Group:
    """What `kvatlas inspect` prints."""
    from rich.console import Group
    from rich.text import Text

    told = [Text(f"• {sentence}") for sentence in sentences(found)]
    small = [Text(note, style="dim") for note in notes(found)]
    head, where = Text(title(found), style="bold"), Text(WHERE, style="bold")
    return Group(head, layers(found), Text(""), where, places(found), Text(""), *told, *small)


def text(found: Inspection, width: int = 110) -> str:
    """The same as plain text."""
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
    console.print(block(found))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"  # type: ignore[attr-defined]


def layers(found: Inspection) -> Table:
    """A row a layer, in colour what is poorly covered."""
    from rich.text import Text

    table = _table(HEADS)
    for row in rows(found):
        tone = "red" if row.covered < BAD else "yellow" if row.covered < POOR else ""
        name, covered, *others = plain_cells(row)
        table.add_row(name, Text(covered, style=tone), *others)
    return table


def plain_cells(row: Row) -> list[str]:
    """A layer's row as text, in the order of ``HEADS``."""
    return [
        str(row.layer) if row.window is None else f"{row.layer} w",
        percent(row.covered), _range(row.covered_low, row.covered_high), percent(row.worst),
        percent(row.best), percent(row.overlap), _range(row.overlap_low, row.overlap_high),
        percent(row.error), percent(row.kept), percent(row.read), percent(row.sink_mass), percent(row.sinks_read),
    ]  # fmt: skip


def _range(low: float, high: float) -> str:
    """``16..38``, cut rather than rounded: 100 is all."""
    return f"{int(100 * low + 1e-4)}..{int(100 * high + 1e-4)}"


def places(found: Inspection) -> Table:
    """Kept, read, full attention's mass and what is missed of it, by place in the context."""
    table = _table(("%", *zone_heads(found)))
    shares = zones(found)
    for name in PLACES:
        table.add_row(name, *(percent(share) for share in shares[name]))
    return table


def _table(heads: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True, vertical="bottom")
    return table


def notes(found: Inspection) -> list[str]:
    """How many samples the figures have, and what else a reader must know."""
    group = found.covered.shape[-1]
    each = f" and {group} query heads of each KV head" if group > 1 else ""
    told = [f"covered, error: mean over {found.steps} steps{each}; best, overlap, kept, read: over {found.steps} steps"]
    if any(window is not None for window in found.windows):
        told.append("w: the layer keeps a window of the model's own, under every strategy; it is left out of the means")
    if found.strategy.place.archives:
        told.append("what was evicted lies in an archive: it can be read, and does not count as kept")
    return told
