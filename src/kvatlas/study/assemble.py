"""From samples to a record: each figure is the median over the repeats, with their smallest and largest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kvatlas.measure.clocks import percentile
from kvatlas.measure.figure import Figure
from kvatlas.measure.record import (
    Memory,
    Model,
    PerGB,
    Quality,
    Realised,
    Record,
    Setting,
    StepSplit,
    Strategy,
    Tier,
    Timing,
    Transfers,
    Workload,
)
from kvatlas.measure.sample import SECTIONS, Measured, Sample
from kvatlas.strategy.strategy import Strategy as Answers
from kvatlas.study.plan import Plan

GB = 1e9


def record(
    plan: Plan, written: str, samples: Sequence[Sample], workload: Workload, quality: Quality | None = None
) -> Record:
    """The record of one strategy. One failed sample is enough to fail it: its reason is the record's."""
    answers = plan.strategies[written]
    failed = next((sample for sample in samples if sample.status != "ok"), None)
    last = failed or samples[-1]
    base: dict[str, Any] = {
        "status": last.status,
        "error": last.error,
        "asked": plan.asked(),
        "strategy": Strategy(asked=written, normalised=answers.name, **answers.answers()),
        "model": next((s.model for s in samples if s.model is not None), Model(name=plan.model)),
        "workload": _workload(workload, answers),
        "setting": _setting(plan, answers, last),
        "environment": last.environment,
        "repeats": [sample.model_dump(mode="json") for sample in samples],
    }
    if failed is None:
        base |= _figures(plan, [sample.measured for sample in samples if sample.measured is not None])
        base["quality"] = quality
    return Record(**base)


def _workload(workload: Workload, answers: Answers) -> Workload:
    """Only a strategy that is calibrated names the calibration text."""
    return workload if answers.calibrates else workload.model_copy(update={"calibration_sha256": None})


def _setting(plan: Plan, answers: Answers, sample: Sample) -> Setting:
    how = answers.prefill
    size = f":{how.chunk}" if how.chunk else ""
    evict = ", evict=chunk" if how.evict_chunks else ""
    return Setting(
        dtype=sample.dtype,
        prefill=f"{how.kind}{size}{evict}",
        device=plan.device,
        threads=sample.threads,
        native_kernel=sample.native_kernel,
        link_gb_per_s=getattr(answers.place, "link", None),
    )


def _figures(plan: Plan, runs: list[Measured]) -> dict[str, Any]:
    return {
        "timing": _timing(plan, runs),
        "memory": _memory(plan, runs),
        "transfers": _transfers(runs),
        "realised": Realised(kept=_of(runs, lambda r: r.kept, "share"), read=_of(runs, lambda r: r.read, "share")),
    }


def _of(runs: list[Measured], value: Callable[[Measured], float], unit: str) -> Figure:
    """Over the repeats; a number that never changes is said without an interval."""
    values = [value(run) for run in runs]
    if len(set(values)) == 1 and len(values) > 1:
        return Figure.exact(values[0], unit, n=len(values))
    return Figure.of(values, unit)


def _speed(plan: Plan, run: Measured) -> float:
    """New tokens of the whole batch in a second of decoding."""
    return plan.batch * len(run.steps) / sum(run.steps)


def _timing(plan: Plan, runs: list[Measured]) -> Timing:
    some = [run.setup for run in runs if run.setup is not None]
    return Timing(
        ttft=_of(runs, lambda r: r.ttft, "s"),
        compression=_of(runs, lambda r: r.compression, "s"),
        setup=Figure.of(some, "s") if some else None,
        tpot=_of(runs, lambda r: statistics.median(r.steps), "s"),
        tpot_p95=_of(runs, lambda r: percentile(r.steps, 0.95), "s"),
        tokens_per_s=_of(runs, lambda r: _speed(plan, r), "tokens/s"),
        step=_step([run.split for run in runs if run.split is not None]),
    )


def _step(splits: list[dict[str, float]]) -> StepSplit | None:
    if not splits:
        return None
    return StepSplit(**{part: Figure.of([split[part] for split in splits], "s") for part in (*SECTIONS, "other")})


def _memory(plan: Plan, runs: list[Measured]) -> Memory:
    return Memory(
        prefill_peak=_of(runs, lambda r: r.prefill_peak, "bytes"),
        decode_peak=_of(runs, lambda r: r.decode_peak, "bytes"),
        tiers=_tiers(runs),
        tiers_logical=not plan.device.startswith("cuda"),
        read_per_step=_of(runs, lambda r: r.read_bytes, "bytes"),
        scanned_per_step=_of(runs, lambda r: r.scanned_bytes, "bytes"),
        tokens_per_s_per_gb=PerGB(
            device_kv=_per_gb(plan, runs, lambda r: r.tiers["device"].held),
            all_tiers=_per_gb(plan, runs, lambda r: sum(tier.held for tier in r.tiers.values())),
            process_peak=_per_gb(plan, runs, lambda r: max(r.prefill_peak, r.decode_peak)),
        ),
    )


def _tiers(runs: list[Measured]) -> dict[str, Tier]:
    """Those of the run with the median number of bytes (all have the same, unless chance decides what is kept)."""
    ordered = sorted(runs, key=lambda run: sum(tier.held for tier in run.tiers.values()))
    return ordered[len(ordered) // 2].tiers


def _per_gb(plan: Plan, runs: list[Measured], held: Callable[[Measured], int]) -> Figure | None:
    if any(held(run) == 0 for run in runs):
        return None
    return _of(runs, lambda r: _speed(plan, r) / (held(r) / GB), "tokens/s/GB")


def _transfers(runs: list[Measured]) -> Transfers | None:
    if any(run.copies is None for run in runs):
        return None
    return Transfers(
        count=_of(runs, lambda r: r.copies or 0.0, "count"),
        bytes=_of(runs, lambda r: r.copied_bytes or 0.0, "bytes"),
        blocked=_of(runs, lambda r: r.blocked or 0.0, "s"),
    )
