"""Charts of an inspection (Vega-Lite, through Altair): layers by KV heads, layers by places in the context."""

from __future__ import annotations

import functools
import math
from typing import Any

from kvatlas.quality.inspect import FIGURES, Inspection
from kvatlas.report.inspection import bins

Spec = dict[str, Any]

HEADS = {
    "covered": "Attention mass covered, %",
    "overlap": "Overlap with the best keys, %",
    "error": "Error of the output, %",
}
PLACES = {
    "kept": "Kept: share of the tokens there, %",
    "read": "Read: share of the tokens there, %",
    "mass": "Full attention’s mass, % of all",
    "missed": "Mass that was not read, % of all",
}
BLUES, REDS = ("#f4f7fb", "#9cc3e4", "#2c7bb6", "#08306b"), ("#fdf5f2", "#f7a98b", "#d7301f", "#7f0000")
COLOURS: dict[str, dict[str, Any]] = {
    "covered": {"scheme": "viridis"}, "overlap": {"scheme": "viridis"},
    "kept": {"range": BLUES}, "read": {"range": BLUES}, "missed": {"range": REDS},
    "error": {"range": ("#fdf7f0", "#fdb97d", "#e6731f", "#7f2704")},
    "mass": {"range": ("#f7f5fb", "#b9add6", "#7a5cab", "#3f007d")},
}  # fmt: skip
ROW, CELL, NARROWEST, WIDEST = 15, 46, 240, 300
"""Height of a layer; width of a KV head's cell, and of all of them at least and at most; in pixels."""


def head_rows(found: Inspection) -> list[dict[str, Any]]:
    """One for each layer and KV head, in per cent."""
    means = {name: found.heads(name) for name in FIGURES}
    layers, heads = means["covered"].shape
    return [
        {"layer": i, "head": h, **{name: round(100 * float(mean[i, h]), 2) for name, mean in means.items()}}
        for i in range(layers)
        for h in range(heads)
    ]


def place_rows(found: Inspection) -> list[dict[str, Any]]:
    """One for each layer and place of the context, in per cent.

    A cell is drawn ``until`` a bit past its end, and the next one over it: otherwise seams show between them.
    """
    at = bins(found)
    return [
        {
            "layer": i, "from": start, "until": stop + (stop - start) / 2, "tokens": f"{start:,} to {stop - 1:,}",
            **{name: round(100 * at[name][i][b], 3) for name in PLACES},
        }
        for i in range(len(found.windows))
        for b, (start, stop) in enumerate(zip(at["from"], at["to"]))
    ]  # fmt: skip


def specs(found: Inspection) -> dict[str, Spec]:
    """Every chart by its figure, for a page: as wide as its place there."""
    made = {name: _heads(found, name) for name in HEADS} | {name: _places(found, name) for name in PLACES}
    data = {"heads": head_rows(found), "places": place_rows(found)}
    return {name: _plain(chart.properties(width="container"), data) for name, chart in made.items()}


def picture(found: Inspection, title: str) -> bytes:
    """All charts as one PNG."""
    import altair as alt
    import vl_convert

    wide = max(NARROWEST, min(WIDEST, found.overlap.shape[-1] * CELL))
    top = [_heads(found, name).properties(width=wide, title=label) for name, label in HEADS.items()]
    maps = [_places(found, name).properties(width=440, title=label) for name, label in PLACES.items()]
    parts = [alt.hconcat(*top, spacing=40), alt.concat(*maps, columns=2, spacing=40)]
    whole = alt.vconcat(*[part.resolve_scale(color="independent") for part in parts], spacing=36)
    whole = whole.properties(title=alt.Title(title, fontSize=18, offset=20), padding=24)
    spec = _plain(whole, {"heads": head_rows(found), "places": place_rows(found)})
    spec["config"] = {
        "background": "white", "font": "Liberation Sans, Arial, sans-serif", "view": {"stroke": None},
        "axis": {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal", "grid": False},
        "title": {"anchor": "start", "fontSize": 14}, "legend": {"labelFontSize": 11},
    }  # fmt: skip
    return vl_convert.vegalite_to_png(spec, vl_version=_version(), scale=1.5)


@functools.cache
def _version() -> str:
    import altair

    return altair.SCHEMA_VERSION.removeprefix("v").rsplit(".", 1)[0]


def _layer(found: Inspection) -> Any:
    import altair as alt

    step = max(1, math.ceil(len(found.windows) / 40))
    axis = alt.Axis(title="layer", ticks=False, domain=False, values=list(range(0, len(found.windows), step)))
    return alt.Y("layer:O", axis=axis)


def _heads(found: Inspection, name: str) -> Any:
    """Layers by KV heads; the number stands in the cell where there is room for it."""
    import altair as alt

    heads = found.overlap.shape[-1]
    x = alt.X("head:O", axis=alt.Axis(title="KV head", labelAngle=0, ticks=False, domain=False, labelOverlap=True))
    told = [alt.Tooltip("layer:O"), alt.Tooltip("head:O", title="KV head")]
    told += [alt.Tooltip(f"{figure}:Q", format=".1f", title=f"{figure} %") for figure in FIGURES]
    base = alt.Chart(alt.NamedData(name="heads")).encode(x=x, y=_layer(found)).properties(height=_height(found))
    cells = base.mark_rect().encode(color=_color(found, name), tooltip=told)
    if heads > 8:
        return cells
    light = f"datum.{name} > 60" if name != "error" else f"datum.{name} < 60"
    ink = alt.when(light).then(alt.value("#111")).otherwise(alt.value("#fff"))
    words = base.mark_text(fontSize=10).encode(text=alt.Text(f"{name}:Q", format=".0f"), color=ink, tooltip=told)
    return alt.layer(cells, words)


def _places(found: Inspection, name: str) -> Any:
    """Layers by places in the context."""
    import altair as alt

    end = found.kept_at.shape[-1]
    axis = alt.Axis(title="position in the context", format=",~r", tickCount=6, domain=False)
    x = alt.X("from:Q", axis=axis, scale=alt.Scale(domain=[0, end], nice=False))
    told = [alt.Tooltip("layer:O"), alt.Tooltip("tokens:N", title="positions")]
    told += [alt.Tooltip(f"{figure}:Q", format=".2f", title=f"{figure} %") for figure in PLACES]
    chart = alt.Chart(alt.NamedData(name="places")).mark_rect(clip=True)
    chart = chart.encode(x=x, x2="until:Q", y=_layer(found), color=_color(found, name), tooltip=told)
    return chart.properties(height=_height(found))


def _height(found: Inspection) -> int:
    return max(90, ROW * len(found.windows))


def _color(found: Inspection, name: str) -> Any:
    """Shares are on a scale from 0 to 100 %, the same for all strategies; masses on one of their own."""
    import altair as alt

    scale = alt.Scale(**COLOURS[name], domain=[0, 100], clamp=True)
    if name in PLACES:  # a root shows small shares too
        top = 100 if name in ("kept", "read") else max(0.01, 100 * max(map(max, bins(found)[name])))
        scale = alt.Scale(**COLOURS[name], domain=[0, top], type="sqrt", nice=False)
    legend = alt.Legend(title=None, gradientLength=min(200, _height(found) - 20), format=",~r", tickCount=5)
    return alt.Color(f"{name}:Q", scale=scale, legend=legend)


def _plain(chart: Any, data: dict[str, list[dict[str, Any]]]) -> Spec:
    """Altair's dictionary without its theme (fonts and colours are the page's), with the data that it names."""
    spec: Spec = chart.to_dict()
    text = str(spec)
    named = {name: values for name, values in data.items() if f"'name': '{name}'" in text}
    return {key: value for key, value in spec.items() if key != "config"} | {"datasets": named}
