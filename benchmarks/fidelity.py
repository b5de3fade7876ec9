"""What every strategy loses, at every budget: KL to `full` and top-1 agreement on real text, in one run.

    python benchmarks/fidelity.py [--context 2048 --continuation 128 --windows 2] [--only h2o,quest] [--json FILE]

Strategies are compared at what they really kept or read, not at what was asked: each point of one is held against the
other's curve, interpolated (log KL over log fraction) between its measured points. What is checked is printed at the
end: `oracle` best among readers, `random` worst or within noise of the worst among evictors, every reader at least as
good as every evictor, 4-bit kvquant better than int4 at no more bytes, int8 within 1e-3.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

import kvatlas
from kvatlas.quality.fidelity import fidelity
from kvatlas.strategy.spec import parse
from kvatlas.workload.text import default_text, prompts

BUDGETS = (0.5, 0.3, 0.2, 0.1, 0.05)
EVICTORS = ("streaming", "h2o", "scissorhands", "snapkv", "alisa", "random")
READERS = ("oracle", "quest", "infinigen", "pqcache", "infllm", "squeezed")
ENCODERS = ("int8", "int4", "kvquant", "kvquant:bits=3", "kvquant:bits=2")
TOGETHER = ("recall:0.2", "recall:0.1", "snapkv:0.3+quest:0.5", "h2o:0.3+int4", "infinigen:0.2+int4")


@dataclass
class Point:
    """One strategy at one setting. ``kl`` in nats with its standard error; ``bytes`` a token of one KV head."""

    spec: str
    kept: float
    read: float
    kl: float
    error: float
    top1: float
    n: int
    bytes: int


def specs(only: set[str]) -> list[str]:
    """Everything that is measured. Squeezed attention has a threshold instead of a budget: its quantile."""
    out = []
    for name in (*EVICTORS, *READERS):
        if only and name not in only:
            continue
        if name == "squeezed":
            out += [f"squeezed:quantile={1 - b:g}" for b in BUDGETS]
        elif name == "infllm":  # blocks of 128 tokens would leave a small budget of so short a text no block at all
            out += [f"infllm:{b},block=32" for b in BUDGETS]
        else:
            out += [f"{name}:{b}" for b in BUDGETS]
    return out + [s for s in (*ENCODERS, *TOGETHER) if not only or s.split(":")[0] in only]


def measured(options: argparse.Namespace) -> list[Point]:
    lm = kvatlas.load(options.model, "float32")
    text = default_text().split()[1]
    windows = prompts(lm.tokenizer, text, options.windows, options.context, options.continuation)
    todo = specs(set(options.only.split(",")) - {""})
    points: list[Point] = []
    for start in range(0, len(todo), options.at_once):
        part = todo[start : start + options.at_once]
        for spec, found in fidelity(lm, part, windows).items():
            kl, top1 = found.divergence(), found.agreement()
            kept, read = (statistics.mean(f) for f in (found.fractions.kept, found.fractions.read))
            slot = sum(c.slot_bytes() for c in parse(spec).encode.columns(lm.facts.head_dim, torch.float32))
            error = 0.0 if kl.low is None else kl.value - kl.low
            points.append(Point(spec, kept, read, kl.value, error, top1.value, len(found.kl), slot))
            print(line(points[-1]), flush=True)
    return points


def line(p: Point) -> str:
    return (
        f"{p.spec:28} kept {p.kept:5.3f}  read {p.read:5.3f}  KL {p.kl:8.5f} +- {p.error:7.5f}  "
        f"top-1 {100 * p.top1:5.1f} %  n={p.n}  {p.bytes} B"
    )


def at(curve: list[Point], fraction: float) -> tuple[float, float] | None:
    """KL and its error of a curve at a fraction of tokens read; None outside of what was measured."""
    known = sorted((p.read, max(p.kl, 1e-9), p.error) for p in curve)
    for (x0, y0, e0), (x1, y1, e1) in pairwise(known):
        if x0 <= fraction <= x1:
            share = 0.0 if x1 == x0 else math.log(fraction / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * math.log(y1 / y0)), max(e0, e1)
    return None


def findings(points: list[Point]) -> list[str]:
    """What the bars say of these points, each with the points that break it."""
    curve = {name: [p for p in points if p.spec.split(":")[0] == name] for name in (*EVICTORS, *READERS)}
    out = []

    def worse(better: str, than: str) -> list[str]:
        """Points at which ``better`` is not within two standard errors of ``than`` or below."""
        breaks = []
        for p in curve[better]:
            other = at(curve[than], p.read)
            if other is not None and p.kl > other[0] + 2 * math.hypot(p.error, other[1]):
                breaks.append(f"{p.spec} ({p.kl:.4f}) above {than} ({other[0]:.4f}) at {p.read:.3f} read")
        return breaks

    def say(claim: str, breaks: list[str]) -> None:
        out.append(f"{'yes' if not breaks else 'NO '}  {claim}" + "".join(f"\n       {b}" for b in breaks))

    say("oracle is the best reader", [b for r in READERS if r != "oracle" for b in worse("oracle", r)])
    say("random is the worst evictor, or within noise of it",
        [b for e in EVICTORS if e != "random" for b in worse(e, "random")])  # fmt: skip
    say("every reader is at least as good as every evictor at equal tokens read",
        [b for r in READERS for e in EVICTORS for b in worse(r, e)])  # fmt: skip
    by = {p.spec: p for p in points}
    if {"int4", "kvquant"} <= set(by):
        four, other = by["kvquant"], by["int4"]
        good = four.kl < other.kl and four.bytes <= other.bytes
        say(f"4-bit kvquant ({four.kl:.5f}, {four.bytes} B) is better than int4 ({other.kl:.5f}, {other.bytes} B)",
            [] if good else ["it is not"])  # fmt: skip
    if "int8" in by:
        say(f"int8 is within 1e-3 of raw ({by['int8'].kl:.6f})", [] if by["int8"].kl < 1e-3 else ["it is not"])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--only", default="", help="names of presets, with commas")
    parser.add_argument("--at-once", type=int, default=8, help="strategies that share a prefill")
    parser.add_argument("--json", type=Path, help="also write the points here")
    parser.add_argument("--from-json", type=Path, help="judge points that were written before")
    options = parser.parse_args()
    stored = json.loads(options.from_json.read_text()) if options.from_json else None
    points = measured(options) if stored is None else [Point(**p) for p in stored]
    if options.json:
        options.json.write_text(json.dumps([asdict(p) for p in points], indent=1))
    print("\n".join(findings(points)))


if __name__ == "__main__":
    main()
