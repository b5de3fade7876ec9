"""An inspection in numbers: a row a layer, sentences, and JSON for machines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvatlas.quality.inspect import FIGURES, Inspection, Spread
from kvatlas.quality.watched import RECENT, SINKS, ZONES
from kvatlas.version import __version__

FORMAT, VERSION = "kvatlas inspection", 1
BINS = 64
"""Places of equal width that the context is divided into for a map."""
PLACES = ("kept", "read", "mass", "missed")

WORDS = {
    "covered": "Of full attention’s softmax mass at a step (the strategy’s own query over every key it was ever "
    "given), the share on the tokens that were read. Mean over steps and the query heads of a KV head.",
    "KV heads": "The lowest and the highest KV head of the layer.",
    "worst": "The lowest of any single step and query head.",
    "best": "The most that as many tokens could cover, were they chosen perfectly. What is missing to 100 % is lost to "
    "the budget; what covered lacks to best is lost to the choice.",
    "overlap": "Of as many best keys (by the mean mass of a KV head’s queries) as were read, the share that was read.",
    "error": "Distance of a head’s attention output from full attention’s, relative to the length of the latter. "
    "Encoding loses nothing in coverage and shows only here.",
    "kept": "Share of all tokens so far that the cache holds, at the time of the step.",
    "read": "Share of all tokens so far that the step attended to.",
    "mass": "Share of full attention’s mass that falls on tokens of this place.",
    "missed": "Mass that falls on tokens of this place that were not read, as a share of all mass.",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One layer: means over KV heads, ``low`` and ``high`` being the KV heads' lowest and highest mean."""

    layer: int
    window: int | None
    covered: float
    covered_low: float
    covered_high: float
    worst: float
    best: float
    overlap: float
    overlap_low: float
    overlap_high: float
    error: float
    kept: float
    read: float
    sink_mass: float
    sinks_read: float


def rows(found: Inspection) -> list[Row]:
    """A row a layer."""
    means = {name: found.heads(name) for name in FIGURES}
    return [_row(found, {name: mean[i] for name, mean in means.items()}, i) for i in range(len(found.windows))]


def _row(found: Inspection, means: dict[str, Tensor], layer: int) -> Row:
    covered, overlap = means["covered"], means["overlap"]
    return Row(
        layer, found.windows[layer],
        float(covered.mean()), float(covered.min()), float(covered.max()), float(found.covered[layer].min()),
        float(means["best"].mean()), float(overlap.mean()), float(overlap.min()), float(overlap.max()),
        float(means["error"].mean()), float(means["kept"].mean()), float(means["read"].mean()),
        float(found.zones[2, layer, :, 0].mean()), float(found.zones[1, layer, :, 0].mean()),
    )  # fmt: skip


def summary(found: Inspection) -> dict[str, float]:
    """Means over the layers that the strategy works in."""
    return {name: float(found.heads(name)[found.layers].mean()) for name in FIGURES}


def zones(found: Inspection) -> dict[str, list[float]]:
    """The four ``PLACES`` figures of each zone, over layers and KV heads; NaN where a zone has no tokens."""
    return {name: found.zones[i][found.layers].mean((0, 1)).tolist() for i, name in enumerate(PLACES)}


def zone_heads(found: Inspection) -> list[str]:
    """What the zones are called in a table."""
    return [f"first {SINKS}", *(str(i + 1) for i in range(len(ZONES) - 2)), f"last {RECENT}"]


def title(found: Inspection) -> str:
    """What was done, in a line."""
    fed = "the model’s most likely tokens" if found.greedy else "the text’s next tokens"
    steps = f"{found.steps} step{'s' * (found.steps > 1)} fed with {fed}"
    return f"{found.strategy.name}: {found.prompt_tokens:,} prompt tokens, then {steps}"


def sentences(found: Inspection) -> list[str]:
    """What to look at first."""
    mean = {name: percent(share) for name, share in summary(found).items()}
    told = [f"Reads {mean['read']} % of the tokens, which cover {mean['covered']} % of full attention."]
    covered, best = (summary(found)[name] for name in ("covered", "best"))
    if best < 1 - 1e-6:
        lost = f"{percent(1 - best)} points are lost to the budget, {percent(max(0.0, best - covered))} to the choice"
        told.append(f"As many tokens, perfectly chosen, would cover {mean['best']} %: {lost}.")
    told += _missed(found) + _weakest(found)
    if covered > 1 - 1e-6 and summary(found)["error"] > 1e-3:
        told.append(f"All is read, and yet the output is {mean['error']} % off: that is what encoding loses.")
    return told


def _missed(found: Inspection) -> list[str]:
    missed = zones(found)["missed"]
    total = sum(missed)
    if total < 5e-4:
        return []
    first, last = missed[0] / total, missed[-1] / total
    where = f"{percent(first)} % lies on the first {SINKS} tokens, {percent(last)} % on the last {RECENT}"
    return [f"Of the mass that is missed, {where}, {percent(1 - first - last)} % lies between."]


def _weakest(found: Inspection, most: int = 5) -> list[str]:
    covered = found.heads("covered")
    heads = [(float(covered[i, h]), i, h) for i in found.layers for h in range(covered.shape[1])]
    low = [f"layer {i} head {h} ({percent(value)} %)" for value, i, h in sorted(heads)[:most] if value < 0.999]
    return [f"Least covered KV heads: {', '.join(low)}."] if low else []


def percent(share: float) -> str:
    """``93.4``; ``100`` only where nothing is missing, ``–`` where there is no number."""
    if not math.isfinite(share):
        return "–"
    return "100" if abs(share - 1) < 5e-7 else f"{99.9 if 0.999 < share < 1 else 100 * share:.1f}"


def bins(found: Inspection) -> dict[str, Any]:
    """The context in places of equal width: ``from``, ``to`` (positions) and the ``PLACES`` figures, a row a layer.

    Kept and read are means over a place's tokens and the KV heads; of mass and missed mass each is the sum.
    """
    total = found.kept_at.shape[-1]
    n = min(BINS, total)
    edges = [i * total // n for i in range(n + 1)]
    out: dict[str, Any] = {"from": edges[:-1], "to": edges[1:]}
    for name in PLACES:
        per_layer = getattr(found, f"{name}_at").mean(1)  # [L, T]
        parts = [per_layer[:, a:b] for a, b in pairwise(edges)]
        per_bin = [part.mean(1) if name in ("kept", "read") else part.sum(1) for part in parts]
        out[name] = torch.stack(per_bin, 1).tolist()
    return out


def as_json(found: Inspection, **about: Any) -> dict[str, Any]:
    """All numbers, plain: ``about`` says what the model and the text were. What is not a number is null."""
    layers = [_layer(found, row) for row in rows(found)]
    told = {
        "format": FORMAT, "version": VERSION, "kvatlas": __version__, **about,
        "strategy": found.strategy.name, "answers": found.strategy.answers(), "prompt_tokens": found.prompt_tokens,
        "steps": found.steps, "greedy": found.greedy, "query_heads_per_kv_head": found.covered.shape[-1],
        "words": WORDS, "summary": summary(found), "sentences": sentences(found),
        "zones": {"names": list(ZONES), "tokens": found.zone_tokens.tolist(), **zones(found)},
        "layers": layers, "positions": bins(found),
    }  # fmt: skip
    plain: dict[str, Any] = _plain(told)
    return plain


def _layer(found: Inspection, row: Row) -> dict[str, Any]:
    heads = []
    for head in range(found.overlap.shape[-1]):
        spreads: dict[str, Spread] = found.head(row.layer, head)
        places = {name: found.zones[i, row.layer, head].tolist() for i, name in enumerate(PLACES)}
        heads.append({"head": head, **{name: asdict(s) for name, s in spreads.items()}, "zones": places})
    return {**asdict(row), "heads": heads}


def _plain(value: Any) -> Any:
    """The same with numbers of six digits; what is not finite is None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
