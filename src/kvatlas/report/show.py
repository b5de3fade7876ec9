"""Numbers as readers see them: units, digits, intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.measure.record import Figure, Record
from kvatlas.report.metrics import Metric

BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


@dataclass(frozen=True, slots=True)
class Unit:
    """Divide a figure by `size` and write `name` behind it."""

    size: float
    name: str

    def of(self, value: float) -> float:
        return value / self.size


def unit(metric: Metric, records: Iterable[Record]) -> Unit:
    """The unit of a whole column, so that its numbers can be compared by eye."""
    fixed = {"s": Unit(1, "s"), "ms": Unit(1e-3, "ms"), "%": Unit(1e-2, "%"), "number": Unit(1, "")}
    if metric.shown != "bytes":
        return Unit(1, "nats") if metric.key == "kl" else fixed[metric.shown]
    values = [abs(figure.value) for record in records if (figure := metric.of(record)) and math.isfinite(figure.value)]
    top = max(values, default=0.0)
    size, name = next((pair for pair in BYTES if top >= (10 if pair[1] == "GB" else 1) * pair[0]), BYTES[-1])
    return Unit(size, name)


def number(value: float) -> str:
    """About three digits, never an exponent for sizes people read."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞" if value < 0 else "not a number"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.00995 else f"{value:.1g}" if size < 1e-4 else f"{value:.4f}"


def share(figure: Figure) -> str:
    """A proportion as ``14 of 24`` where n is small enough to be counted by people."""
    hits = figure.value * figure.n
    if figure.interval == "95% Wilson" and figure.n <= 200 and abs(hits - round(hits)) < 1e-6:
        return f"{round(hits)} of {figure.n}"
    return f"{number(figure.value * 100)} %"


def with_unit(value: float, one: Unit) -> str:
    return f"{number(one.of(value))} {one.name}".rstrip()


def interval(figure: Figure, one: Unit) -> str:
    """``41.0 to 44.2``, or nothing."""
    if figure.low is None or figure.high is None or figure.low == figure.high == figure.value:
        return ""
    return f"{number(one.of(figure.low))} to {number(one.of(figure.high))}"


def details(figure: Figure, one: Unit) -> str:
    """Interval, its kind, n and whether it was modelled, for a tooltip."""
    ends = interval(figure, one)
    said = [f"{ends} ({figure.interval})"] if ends else []
    if figure.n > 1:
        said.append(f"n = {figure.n:,}")
    if figure.kind == "modelled":
        said.append("modelled, not measured")
    return ", ".join(said)


def duration(value: float) -> str:
    return f"{number(value)} s" if value >= 1 else f"{number(value * 1e3)} ms"


def size(value: float) -> str:
    """Bytes on their own, outside a column."""
    scale, name = next((pair for pair in BYTES if value >= pair[0]), BYTES[-1])
    return f"{number(value / scale)} {name}"


def plain(text: str) -> str:
    """One line without control characters (a name may hold a terminal's escape codes)."""
    return " ".join("".join(char if char.isprintable() or char.isspace() else "�" for char in text).split())


def times(ratio: float) -> str:
    return f"{ratio:.1f} ×" if ratio >= 1.95 else f"{ratio:.2f} ×"
