"""Charts of the battery (Vega-Lite, through Altair): curves over budget, and breakdowns by a label."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.advise.curves import AXES, Asked, Curve, bytes_of, in_points
from kvatlas.measure.figure import Figure
from kvatlas.quality.cell import MetricPart, QualityRecord
from kvatlas.quality.statistics import breakdown, labels
from kvatlas.report.charts import HEIGHT, SHAPES, WIDE, Row, Spec, _linear, _plain, colour
from kvatlas.report.quality_show import AXIS_LABELS, by_budget, bytes_unit, metric_label, metric_unit
from kvatlas.report.show import Unit, details, number, plain, with_unit

BUDGET = "budget"
BREAKDOWN_HEIGHT = 300


# Curves


def curves(task: Asked, tones: Mapping[str, int]) -> dict[str, Any]:
    """All charts of a task: a spec for each axis (bytes of three kinds, the budget) and each metric, and its note."""
    metrics = [one for one in task.task.metrics if any(one.name in record.figures for record in task.ok)]
    unit = bytes_unit([bytes_of(record, axis) for record in task.ok for axis in AXES])
    xs = [{"key": axis, "label": f"{AXIS_LABELS[axis]} ({unit.name})"} for axis in AXES if _has(task, axis)]
    if any(_x(record, BUDGET, unit) is not None for curve in task.curves for record in curve.points):
        xs.append({"key": BUDGET, "label": "Budget (share of the tokens)"})
    panel: dict[str, Any] = {
        "x": xs, "y": [{"key": one.name, "label": metric_label(one)} for one in metrics], "specs": {}, "notes": {},
    }  # fmt: skip
    for x in xs:
        for metric in metrics:
            rows, left_out = _rows(task, tones, metric, x["key"], unit)
            key = f"{x['key']}|{metric.name}"
            panel["notes"][key] = _note(metric, left_out)
            if rows:
                panel["specs"][key] = _curve_spec(rows, metric, x["label"])
    return panel


def _has(task: Asked, axis: Any) -> bool:
    return any(bytes_of(record, axis) is not None for record in task.ok)


def _note(metric: MetricPart, left_out: Sequence[str]) -> str:
    better = f"Left and {'higher' if metric.higher_is_better else 'lower'} is better."
    told = f"{better} Bands: 95 % intervals; the dashed line and its band are full's."
    return f"{told} Not drawn, for want of a figure on this axis: {', '.join(left_out)}." if left_out else told


def _x(record: QualityRecord, axis: str, unit: Unit) -> float | None:
    """A record's place on an axis; budgets in tokens are not drawn beside shares."""
    if axis == BUDGET:
        return record.budget if isinstance(record.budget, float) else None
    size = bytes_of(record, axis)  # type: ignore[arg-type]
    return None if size is None else unit.of(size)


def _rows(
    task: Asked, tones: Mapping[str, int], metric: MetricPart, axis: str, unit: Unit
) -> tuple[list[Row], list[str]]:
    rows, left_out = [], []
    if task.reference is not None and (row := _row(task.reference, metric, 1.0 if axis == BUDGET else
                                                   _x(task.reference, axis, unit), tones, 0)):  # fmt: skip
        rows.append({**row, "reference": True})
    for curve in task.curves:
        found = [_row(point, metric, _x(point, axis, unit), tones, place) for place, point in enumerate(curve.points)]
        known = [row for row in found if row is not None]
        if len(known) < len(found):
            left_out.append(plain(curve.family))
        rows += _labelled(known, curve)
    return rows, left_out


def _labelled(rows: list[Row], curve: Curve) -> list[Row]:
    """The smallest point carries the family's name. Where points lie above each other a band would be none: bars."""
    if not rows:
        return []
    wide = max(row["x"] for row in rows) - min(row["x"] for row in rows)
    bars = wide <= 0.01 * max(abs(row["x"]) for row in rows)
    return [{**row, "bar": bars, "name": plain(curve.family) if place == 0 else ""} for place, row in enumerate(rows)]


def _row(
    record: QualityRecord, metric: MetricPart, x: float | None, tones: Mapping[str, int], place: int
) -> Row | None:
    figure = record.figures.get(metric.name)
    if x is None or figure is None or not math.isfinite(figure.value):
        return None
    unit, tone = metric_unit(metric), tones[record.family]
    low, high = _ends(figure, unit)
    return {
        "name": plain(record.family), "family": record.family, "spec": plain(record.strategy.asked), "place": place,
        "ink": f"tone-{colour(tone)}", "shape": SHAPES[tone % len(SHAPES)], "dx": 9, "dy": 0, "align": "left",
        "far": False, "reference": False, "bar": False, "x": x, "x_low": x, "x_high": x, "label_x": x,
        "y": unit.of(figure.value), "y_low": low, "y_high": high, "label_y": unit.of(figure.value),
        "x_told": number(x), "y_told": _told(figure, unit),
    }  # fmt: skip


def _ends(figure: Figure, unit: Unit) -> tuple[float, float]:
    low, high = (figure.value if end is None or not math.isfinite(end) else end for end in (figure.low, figure.high))
    return unit.of(low), unit.of(high)


def _told(figure: Figure, unit: Unit) -> str:
    more = details(figure, unit)
    return with_unit(figure.value, unit) + (f" [{more}]" if more else "")


def _scale(rows: Sequence[Row], metric: MetricPart) -> dict[str, Any]:
    """Type and domain of the vertical axis."""
    low, high = min(row["y_low"] for row in rows), max(row["y_high"] for row in rows)
    if in_points(metric):
        return _linear(max(0.0, low - 6), min(102.0, high + 6))
    if low > 0 and high / low >= WIDE:
        room = (high / low) ** 0.06
        return {"type": "log", "domain": [low / room, high * room], "nice": False}
    bottom = low - 0.06 * (high - low) if low < 0 or low > 0.6 * high else 0.0
    return _linear(bottom, high + 0.06 * (high - bottom or 1.0))


def _curve_spec(rows: list[Row], metric: MetricPart, across: str) -> Spec:
    """The chart with these rows, scales and titles."""
    spec, scale = copy.deepcopy(_curves()), _scale(rows, metric)
    title = metric_label(metric) + (", log scale" if scale["type"] == "log" else "")
    right = max(row["x"] for row in rows)
    for layer in spec["layer"]:
        channels = layer["encoding"]
        for axis, one, name in (("x", _linear(0.0, 1.04 * right or 1.0), across), ("y", scale, title)):
            if axis in channels:
                channels[axis]["scale"] = one
                channels[axis]["axis"] = {"title": name, "format": ",~r", "tickCount": 6, "labelOverlap": True}
        for told in channels.get("tooltip", []):
            told["title"] = {"x_told": across, "y_told": metric_label(metric)}.get(told["field"], told["title"])
    return {**spec, "data": {"name": "points", "values": rows}}


@functools.cache
def _curves() -> Spec:
    """The chart without data, scales and titles."""
    import altair as alt

    ink = alt.Color("color:N", scale=None, legend=None)
    each = alt.Detail("family:N")
    own = alt.Chart().transform_filter("!datum.reference")
    full = alt.Chart().transform_filter("datum.reference")
    told = [alt.Tooltip("spec:N", title="strategy"), *(alt.Tooltip(f"{axis}_told:N", title=axis) for axis in "xy")]
    across, up = "x:Q", "y:Q"
    layers = [
        full.mark_rect(opacity=0.1).encode(y="y_low:Q", y2="y_high", color=ink),
        full.mark_rule(strokeDash=[5, 4], strokeWidth=1.5).encode(y=up, color=ink),
        own.transform_filter("!datum.bar").mark_area(opacity=0.12).encode(
            x=across, y="y_low:Q", y2="y_high", color=ink, detail=each),
        own.transform_filter("datum.bar").mark_rule(opacity=0.5, strokeWidth=1.5).encode(
            x=across, y="y_low:Q", y2="y_high", color=ink),
        own.mark_line(strokeWidth=2).encode(x=across, y=up, color=ink, detail=each, order=alt.Order("place:Q")),
        alt.Chart().transform_filter("datum.far").mark_rule(strokeWidth=0.75, opacity=0.8).encode(
            x=across, y=up, x2="label_x", y2="label_y"),
        alt.Chart().mark_point(filled=True, size=75, opacity=1).encode(
            x=across, y=up, color=ink, shape=alt.Shape("shape:N", scale=None, legend=None), tooltip=told),
        alt.Chart().mark_text(dx=alt.expr("datum.dx"), dy=alt.expr("datum.dy"), align=alt.expr("datum.align"),
                              baseline="middle", fontSize=13).encode(x=across, y=up, text="name:N"),
    ]  # fmt: skip
    return _plain(alt.layer(*layers).properties(width="container", height=HEIGHT))


# Breakdowns


def breakdowns(task: Asked, tones: Mapping[str, int]) -> dict[str, Any] | None:
    """The leading metric by each label at each budget, full beside it; None where nothing is labelled."""
    metric = task.task.metrics[0]
    names = labels(task.ok[0]) if task.ok else []
    heads, cells = by_budget(task.curves)
    if not names or not heads:
        return None
    panel: dict[str, Any] = {
        "x": [{"key": name, "label": plain(name)} for name in names],
        "y": [{"key": head, "label": head} for head in reversed(heads)], "specs": {}, "notes": {},
    }  # fmt: skip
    split = {(record.strategy.normalised, label): breakdown(record, label) for record in task.ok for label in names}
    for label in names:
        for head in heads:
            chosen = [points[head] for points in cells.values() if head in points]
            if task.reference is not None:
                chosen.insert(0, task.reference)
            rows = [row for record in chosen
                    for row in _bins(record, metric, split[record.strategy.normalised, label], tones)]  # fmt: skip
            panel["notes"][f"{label}|{head}"] = "Bars: 95 % intervals. Under each bin, the samples in it."
            if rows:
                panel["specs"][f"{label}|{head}"] = _bins_spec(rows, metric, plain(label))
    return panel


def _bins(
    record: QualityRecord, metric: MetricPart, found: Mapping[str, Mapping[str, Figure]], tones: Mapping[str, int]
) -> list[Row]:
    rows = []
    for place, (name, figures) in enumerate(found.items()):
        figure = figures.get(metric.name)
        if figure is None or not math.isfinite(figure.value):
            continue
        unit, tone = metric_unit(metric), tones[record.family]
        low, high = _ends(figure, unit)
        rows.append({
            "name": "", "spec": plain(record.strategy.asked), "bin": [plain(name), f"n = {figure.n:,}"], "place": place,
            "tone": tone, "ink": f"tone-{colour(tone)}", "shape": SHAPES[tone % len(SHAPES)],
            "y": unit.of(figure.value), "y_low": low, "y_high": high, "y_told": _told(figure, unit),
        })  # fmt: skip
    return rows


def _bins_spec(rows: list[Row], metric: MetricPart, label: str) -> Spec:
    import altair as alt

    heads = {row["place"]: row["bin"] for row in rows}
    words = [{**row, "bin": " · ".join(row["bin"])} for row in rows]
    order = [" · ".join(heads[place]) for place in sorted(heads)]
    ink = alt.Color("color:N", scale=None, legend=None)
    lines = alt.Axis(title=label, labelAngle=0 if len(order) <= 8 else -40, labelLimit=200, ticks=False, grid=False,
                     labelExpr="split(datum.label, ' · ')")  # fmt: skip
    x = alt.X("bin:N", sort=order, axis=lines, scale=alt.Scale(paddingInner=0.35, paddingOuter=0.2))
    offset = alt.XOffset("tone:O")
    top = alt.Axis(title=metric_label(metric), format=",~r", tickCount=5)
    y = alt.Scale(domain=[-4, 104] if in_points(metric) else _scale(rows, metric)["domain"], nice=False)
    told = [alt.Tooltip("spec:N", title="strategy"), alt.Tooltip("bin:N", title=label),
            alt.Tooltip("y_told:N", title=metric_label(metric))]  # fmt: skip
    bars = alt.Chart().mark_rule(strokeWidth=1.5, opacity=0.55)
    bars = bars.encode(x=x, xOffset=offset, y=alt.Y("y_low:Q", scale=y, axis=top), y2="y_high", color=ink)
    shape = alt.Shape("shape:N", scale=None, legend=None)
    points = alt.Chart().mark_point(filled=True, size=75, opacity=1)
    points = points.encode(x=x, xOffset=offset, y=alt.Y("y:Q", scale=y, axis=top), color=ink, shape=shape, tooltip=told)
    spec = _plain(alt.layer(bars, points).properties(width="container", height=BREAKDOWN_HEIGHT))
    return {**spec, "data": {"name": "points", "values": words}}


def glyph(tone: int) -> str:
    """The character that looks like a tone's mark, for legends."""
    return "●■▲◆▼✚▶"[tone % len(SHAPES)]
