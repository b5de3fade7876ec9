"""Bins of samples by a label: context lengths, distances in turns, depths, kinds.

The bins of known labels are fixed, so that they mean the same in every run: ``tokens`` up to 1K, 1-2K, 2-4K and so on
(1K is 1,024 tokens), ``turns`` 1, 2-3, 4-6, 7-12, and many different ``depth``s in quarters (a depth is a number from 0
to 1, or text such as ``40%``). Other numbers have a bin each where there are few, else four of about equal numbers of
samples; words have one each.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from kvatlas.quality.cell import SamplePart, Value

TOKENS = tuple(1024 << i for i in range(11))
TURNS = (1, 3, 6, 12, 24, 48)
DEPTHS = (0.25, 0.5, 0.75, 1.0)
FEW, WORDS = 8, 24
"""So many different numbers, or words, have a bin each."""


def binned(samples: Sequence[SamplePart], label: str) -> dict[str, list[SamplePart]]:
    """Samples by bin, in the bins' order, without empty ones. Samples that lack the label are left out."""
    having = [sample for sample in samples if label in sample.labels]
    known = [_number(sample.labels[label]) for sample in having]
    numbers = [number for number in known if number is not None]
    if len(numbers) < len(having) or not having:
        return _by_word(having, label)
    edges, names = _edges(label, numbers)
    groups: dict[str, list[SamplePart]] = {name: [] for name in names}
    for sample, number in zip(having, numbers):
        groups[names[bisect_left(edges, number)]].append(sample)
    return {name: group for name, group in groups.items() if group}


def splits(samples: Sequence[SamplePart], label: str) -> bool:
    """Whether a breakdown by the label says something: several bins, not all of single samples, not too many words."""
    words = {sample.labels[label] for sample in samples if label in sample.labels}
    groups = binned(samples, label)
    if len(words) > WORDS and any(_number(word) is None for word in words):
        return False
    return len(groups) > 1 and max(map(len, groups.values())) > 1


def _number(value: Value) -> float | None:
    """Numbers and percentages; None for words."""
    if isinstance(value, str):
        return float(value[:-1]) / 100 if re.fullmatch(r"\d+(\.\d+)?%", value) else None
    return None if isinstance(value, bool) else float(value)


def _natural(word: str) -> tuple[bool, list[tuple[bool, float, str]]]:
    """Sorts ``up to 1K``, ``1-2K``, ``10-20K``: numbers by their size, what is up to something first."""
    parts = re.findall(r"\d+(?:\.\d+)?|\D+", word)
    return not word.startswith("up to"), [(not p[0].isdigit(), float(p) if p[0].isdigit() else 0.0, p) for p in parts]


def _by_word(samples: Sequence[SamplePart], label: str) -> dict[str, list[SamplePart]]:
    """Words in order; of too many, the rarest share one bin."""
    groups: dict[str, list[SamplePart]] = {}
    for sample in samples:
        groups.setdefault(str(sample.labels[label]), []).append(sample)
    if len(groups) <= WORDS:
        return {word: groups[word] for word in sorted(groups, key=_natural)}
    common = sorted(sorted(groups), key=lambda word: -len(groups[word]))[: WORDS - 1]
    rest = [sample for sample in samples if str(sample.labels[label]) not in common]
    return {**{word: groups[word] for word in sorted(common, key=_natural)}, "others": rest}


def _edges(label: str, numbers: Sequence[float]) -> tuple[list[float], list[str]]:
    """Upper edges of the bins, each inside its bin, and their names. The last bin has no edge: the rest is in it."""
    different = sorted(set(numbers))
    if label in ("tokens", "context_tokens"):
        return list(map(float, TOKENS)), _token_names()
    if label == "turns":
        return list(map(float, TURNS)), _between(TURNS, "1" if different[0] >= 1 else "up to 1")
    depth = label == "depth" and different[0] >= 0 and different[-1] <= 1
    if len(different) <= FEW:
        return different[:-1], [f"{100 * number:.3g} %" if depth else _short(number) for number in different]
    if depth:
        return list(DEPTHS[:-1]), ["0-25 %", "25-50 %", "50-75 %", "75-100 %"]
    ordered = sorted(numbers)
    cuts = sorted({ordered[len(ordered) * i // 4 - 1] for i in (1, 2, 3)} - {different[-1]})
    ends = [different[0], *cuts, different[-1]]
    names = [f"{_short(a)} to {_short(b)}" if i == 0 else f"above {_short(a)} to {_short(b)}"
             for i, (a, b) in enumerate(pairwise(ends))]  # fmt: skip
    return cuts, names


def _token_names() -> list[str]:
    thousands = [edge // 1024 for edge in TOKENS]
    return ["up to 1K", *(f"{a}-{b}K" for a, b in pairwise(thousands)), f"above {thousands[-1]}K"]


def _between(edges: Sequence[int], first: str) -> list[str]:
    between = [str(b) if a + 1 == b else f"{a + 1}-{b}" for a, b in pairwise(edges)]
    return [first, *between, f"above {edges[-1]}"]


def _short(number: float) -> str:
    return f"{number:,.6g}" if number != int(number) else f"{int(number):,}"
