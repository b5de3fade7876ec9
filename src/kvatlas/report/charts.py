"""Chart specifications (Vega-Lite, through Altair), one for each choice of axes. Colours come from the page's CSS."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

from kvatlas.measure.record import Figure, Record
from kvatlas.report.cells import Cell, name
from kvatlas.report.metrics import BY_KEY, Metric
from kvatlas.report.show import Unit, details, number, unit, with_unit

QUALITY = (("device", "all_tiers", "read"), ("kl", "top1", "perplexity", "recall"))
SPEED = (("device", "all_tiers", "peak_decode"), ("tokens_per_s", "tpot"))
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
STEP = ("append", "select", "fetch", "attend", "drop", "other")
HEIGHT = 400
WIDE = 6.0  # a ratio of largest to smallest from which a logarithmic axis helps

Row = dict[str, Any]
Spec = dict[str, Any]


def scatter(cell: Cell, tones: dict[str, int], axes: tuple[tuple[str, ...], tuple[str, ...]]) -> dict[str, Any]:
    """All charts of one panel: the choices for x and y, a spec for each pair, a sentence on what is not shown."""
    xs, ys = ([BY_KEY[key] for key in keys if _drawable(BY_KEY[key], cell)] for keys in axes)
    panel: dict[str, Any] = {"x": _choices(xs, cell), "y": _choices(ys, cell), "specs": {}, "notes": {}}
    for x in xs:
        for y in ys:
            rows, left_out = _rows(cell, tones, x, y)
            panel["notes"][f"{x.key}|{y.key}"] = _note(left_out, y, bool(rows))
            if rows:
                panel["specs"][f"{x.key}|{y.key}"] = _scatter_spec(rows, x, y, cell)
    return panel


def step_split(cell: Cell) -> Spec | None:
    """A decode step's time by part, a bar a strategy, or None where no record has it."""
    rows: list[Row] = []
    for place, record in enumerate(cell.ok):
        step = record.timing.step if record.timing else None
        for order, part in enumerate(STEP if step else ()):
            figure: Figure = getattr(step, part)
            rows.append({
                "name": name(record), "place": place, "order": order, "ms": figure.value * 1e3, "ink": f"part-{part}",
                "part": "model" if part == "other" else part,
                "told": " ".join(filter(None, (f"{number(figure.value * 1e3)} ms", details(figure, Unit(1e-3, ""))))),
            })  # fmt: skip
    return _bars_spec(rows) if any(row["ms"] > 0 for row in rows) else None


def _drawable(metric: Metric, cell: Cell) -> bool:
    return any(_finite(metric.of(record)) for record in cell.ok)


def _finite(figure: Figure | None) -> bool:
    return figure is not None and math.isfinite(figure.value)


def _choices(metrics: list[Metric], cell: Cell) -> list[dict[str, str]]:
    return [{"key": metric.key, "label": _label(metric, unit(metric, cell.ok))} for metric in metrics]


def _label(metric: Metric, one: Unit) -> str:
    return f"{metric.label} ({one.name})" if one.name else metric.label


def _rows(cell: Cell, tones: dict[str, int], x: Metric, y: Metric) -> tuple[list[Row], list[str]]:
    rows, left_out = [], []
    for record in cell.ok:
        if _finite(x.of(record)) and _finite(y.of(record)):
            rows.append(_row(record, cell, tones, x, y))
        else:
            left_out.append(name(record))
    return rows, left_out


def _row(record: Record, cell: Cell, tones: dict[str, int], x: Metric, y: Metric) -> Row:
    tone = tones[name(record)]
    row: Row = {
        "name": name(record), "ink": f"tone-{colour(tone)}", "shape": SHAPES[tone % len(SHAPES)],
        "dx": 9, "dy": 0, "align": "left", "far": False, "reference": record is cell.reference,
    }  # fmt: skip
    for axis, metric in (("x", x), ("y", y)):
        figure, one = metric.of(record), unit(metric, cell.ok)
        assert figure is not None
        row[axis] = one.of(figure.value)
        ends = (figure.low, figure.high) if _both_finite(figure) else (figure.value, figure.value)
        row[f"label_{axis}"] = row[axis]
        row[f"{axis}_low"], row[f"{axis}_high"] = (one.of(end) for end in ends)  # type: ignore[arg-type]
        more = details(figure, one)
        row[f"{axis}_told"] = with_unit(figure.value, one) + (f" [{more}]" if more else "")
    return row


def _both_finite(figure: Figure) -> bool:
    return figure.low is not None and figure.high is not None and math.isfinite(figure.low + figure.high)


def colour(tone: int) -> int:
    """Tone 0 is the reference's; eight further colours come round again, then shapes tell them apart."""
    return 0 if tone == 0 else 1 + (tone - 1) % 8


def _note(left_out: list[str], y: Metric, some: bool) -> str:
    if not some:
        return "Nothing to draw: no strategy has both figures."
    said = f"Left and {'higher' if y.better == 'more' else 'lower'} is better."
    return f"{said} Not drawn, for want of a figure: {', '.join(left_out)}." if left_out else said


def _scale(rows: list[Row], axis: str, metric: Metric) -> dict[str, Any]:
    """Type and domain of an axis, wide enough for error bars and labels."""
    values = [row[axis] for row in rows]
    ends = [row[f"{axis}_{end}"] for row in rows for end in ("low", "high")]
    low, high = min([*values, *ends]), max([*values, *ends])
    positive = [value for value in values if value > 0]
    uneven = bool(positive) and max(positive) / min(positive) >= WIDE
    if metric.shown == "%":
        return _linear(max(0.0, low - 8), 104.0 if high > 92 else high + 8)
    if uneven and low > 0:
        room = (high / low) ** 0.08
        return {"type": "log", "domain": [low / room, high * room], "nice": False}
    if uneven and metric.key == "kl":
        return {"type": "sqrt", "domain": [0, high * 1.08], "nice": False}
    bottom = 0.0 if low < 0.6 * high else low - 0.25 * (high - low or abs(high) or 1.0)
    return _linear(bottom, high + 0.08 * (high - bottom or 1.0))


def _linear(low: float, high: float) -> dict[str, Any]:
    return {"type": "linear", "domain": [low, high], "nice": False}


def _title(metric: Metric, scale: dict[str, Any], one: Unit) -> str:
    kind = {"log": "log scale", "sqrt": "square-root scale"}.get(scale["type"])
    extra = ", ".join(filter(None, (one.name, kind)))
    return f"{metric.label} ({extra})" if extra else metric.label


def _scatter_spec(rows: list[Row], x: Metric, y: Metric, cell: Cell) -> Spec:
    """The scatter chart with these rows, scales and titles."""
    spec = copy.deepcopy(_scatter())
    for axis, metric in (("x", x), ("y", y)):
        scale = _scale(rows, axis, metric)
        title = _title(metric, scale, unit(metric, cell.ok))
        for layer in spec["layer"]:
            channels = layer["encoding"]
            if axis in channels:
                channels[axis]["scale"] = scale
                channels[axis]["axis"] = {"title": title, "format": ",~r", "tickCount": 6, "labelOverlap": True}
            for told in channels.get("tooltip", []):
                told["title"] = metric.label if told["field"] == f"{axis}_told" else told["title"]
    return {**spec, "data": {"name": "points", "values": rows}}


@functools.cache
def _scatter() -> Spec:
    """The chart without data, scales and titles: Altair takes longer to build it than to say it."""
    import altair as alt

    return _plain(alt.layer(*_backdrop(), *_marks()).properties(width="container", height=HEIGHT))


def _backdrop() -> list[Any]:
    """The reference's level, and error bars."""
    import altair as alt

    ink = alt.Color("color:N", scale=None, legend=None)
    chart = alt.Chart()
    level = chart.transform_filter("datum.reference").mark_rule(strokeDash=[3, 4], opacity=0.6)
    across = chart.transform_filter("datum.x_high > datum.x_low").mark_rule(opacity=0.55, strokeWidth=1.5)
    up = chart.transform_filter("datum.y_high > datum.y_low").mark_rule(opacity=0.55, strokeWidth=1.5)
    return [
        level.encode(y="y:Q"),
        across.encode(x="x_low:Q", x2="x_high", y="y:Q", color=ink),
        up.encode(x="x:Q", y="y_low:Q", y2="y_high", color=ink),
    ]


def _marks() -> list[Any]:
    """Points and their labels. The page's script moves labels that would overlap (`dx`, `dy`, `align`) and has a line
    drawn to those that came to stand `far` away."""
    import altair as alt

    told = [alt.Tooltip("name:N", title="strategy"), *(alt.Tooltip(f"{axis}_told:N", title=axis) for axis in "xy")]
    base = alt.Chart().encode(x="x:Q", y="y:Q", tooltip=told)
    points = base.mark_point(filled=True, size=120, opacity=1).encode(
        color=alt.Color("color:N", scale=None, legend=None), shape=alt.Shape("shape:N", scale=None, legend=None)
    )
    words = base.mark_text(
        dx=alt.expr("datum.dx"), dy=alt.expr("datum.dy"), align=alt.expr("datum.align"), baseline="middle", fontSize=13
    )
    leader = alt.Chart().transform_filter("datum.far").mark_rule(strokeWidth=0.75, opacity=0.8)
    lead = leader.encode(x="x:Q", y="y:Q", x2="label_x", y2="label_y")
    return [lead, points, words.encode(text="name:N")]


def _bars_spec(rows: list[Row]) -> Spec:
    """Stacked bars, and the sum at the end of each."""
    import altair as alt

    names = alt.Y(
        "name:N", sort=alt.EncodingSortField(field="place", op="min"), axis=alt.Axis(title=None, labelLimit=240)
    )
    across = alt.Axis(title="Time of one decode step (ms)", format=",~r", tickCount=6)
    tooltip = [alt.Tooltip("name:N", title="strategy"), alt.Tooltip("part:N"), alt.Tooltip("told:N", title="time")]
    bars = alt.Chart().mark_bar(height={"band": 0.72})
    bars = bars.encode(
        x=alt.X("ms:Q", axis=across, stack="zero"),
        y=names,
        color=alt.Color("color:N", scale=None, legend=None),
        order=alt.Order("order:Q"),
        tooltip=tooltip,
    )
    sums = alt.Chart().mark_text(align="left", dx=6, fontSize=13)
    sums = sums.encode(x=alt.X("sum(ms):Q", axis=across), y=names, text=alt.Text("sum(ms):Q", format=",.3~r"))
    height = 30 * len({row["name"] for row in rows})
    spec = _plain(alt.layer(bars, sums).properties(width="container", height=height))
    return {**spec, "data": {"name": "points", "values": rows}}


def _plain(chart: Any) -> Spec:
    """Altair's dictionary without its theme (fonts and colours are the page's) and without its empty data."""
    spec = chart.to_dict()
    spec.pop("config", None)
    return {**spec, "layer": [{key: layer[key] for key in layer if key != "data"} for layer in spec["layer"]]}


@functools.cache
def library() -> str:
    """Vega, Vega-Lite and vega-embed as one script that needs no network."""
    import altair
    import vl_convert

    version = altair.SCHEMA_VERSION.removeprefix("v").rsplit(".", 1)[0]
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
