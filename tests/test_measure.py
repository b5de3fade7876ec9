"""What a measurement says: peaks of phases, times that fit together, bytes that are the cache's, figures of repeats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, tiny_model

from kvatlas.engine.lm import LM
from kvatlas.measure import environment as surroundings
from kvatlas.measure import memory
from kvatlas.measure.clocks import Stopwatch, percentile
from kvatlas.measure.memory import PeakMemory
from kvatlas.measure.sample import SECTIONS, Measured, Sample
from kvatlas.measure.schema import Workload
from kvatlas.measure.system import Load, measure_system
from kvatlas.strategy.spec import parse
from kvatlas.study.assemble import record
from kvatlas.study.plan import Plan

CPU = torch.device("cpu")
PROMPT, STEPS, BATCH = 64, 6, 2
TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4  # bytes of one token of one sequence in float32


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(tiny_model("llama"))


@pytest.fixture(scope="module")
def load() -> Load:
    ids = torch.randint(2, VOCAB, (BATCH, PROMPT + STEPS), generator=torch.Generator().manual_seed(3))
    return Load(ids[:, :PROMPT].tolist(), ids[:, PROMPT:].T.tolist())


@pytest.fixture(scope="module")
def measured(lm: LM, load: Load) -> Callable[[str], Measured]:
    known: dict[str, Measured] = {}

    def of(spec: str) -> Measured:
        if spec not in known:
            known[spec] = measure_system(lm, parse(spec), load)
        return known[spec]

    return of


@pytest.mark.parametrize(
    "spec", ["full", "paged", "streaming:0.5", "h2o:0.5", "infinigen:0.3", "oracle:0.1", "random:0.5"]
)
def test_every_strategy_is_measured(spec: str, measured: Callable[[str], Measured]):
    run = measured(spec)
    assert len(run.steps) == STEPS and min(run.steps) > 0
    assert 0 < run.compression < run.ttft
    assert run.split is not None and set(run.split) == {*SECTIONS, "other"} and run.split["attend"] > 0
    assert run.prefill_peak > 1e7 and run.decode_peak > 1e7
    assert 0 < run.kept <= 1 and 0 < run.read <= 1
    assert (run.setup is not None) == spec.startswith("infinigen")


def test_bytes_are_the_cache_s(measured: Callable[[str], Measured]):
    full, half = measured("full"), measured("h2o:0.5")
    assert full.tiers["device"].payload == BATCH * (PROMPT + STEPS) * TOKEN
    assert full.tiers["device"].padding == 0 and set(full.tiers) == {"device"}
    assert half.tiers["device"].payload == BATCH * (PROMPT // 2) * TOKEN  # one slot is free after each step
    assert full.read_bytes > half.read_bytes > 0 and full.scanned_bytes == 0 < measured("oracle:0.1").scanned_bytes
    assert all((tier.peak or 0) >= tier.held for tier in (*full.tiers.values(), *half.tiers.values()))


def test_a_chunk_counts_in_the_peak(measured: Callable[[str], Measured]):
    """Without eviction between chunks, the whole prompt is held until the last of them."""
    whole, early = measured("h2o:0.5,prefill=chunked:16"), measured("h2o:0.5,prefill=chunked:16,evict=chunk")
    assert (whole.tiers["device"].peak or 0) > 1.2 * (early.tiers["device"].peak or 0)


def test_transfers_are_those_of_a_step(measured: Callable[[str], Measured]):
    run = measured("infinigen:0.3")
    assert run.tiers["host"].payload == BATCH * (PROMPT + STEPS) * TOKEN
    assert run.copies is not None and run.copied_bytes is not None and run.blocked is not None
    assert run.copies >= LAYERS - 2 and 0 < run.copied_bytes < run.tiers["host"].payload
    assert measured("full").copies is None


def test_learned_positions_have_no_split(load: Load):
    run = measure_system(LM(tiny_model("opt", max_position_embeddings=PROMPT + STEPS)), parse("full"), load)
    assert run.split is None and run.split_steps == 0 and len(run.steps) == STEPS


# Memory and clocks


def _phases(peak: PeakMemory) -> tuple[int, int, int]:
    """Peaks of a phase that holds 100 MB for a moment, of one that holds nothing, and of one with 20 MB."""
    peaks = []
    for size in (100, 0, 20):
        peak.reset()
        held = torch.ones(size * 250_000)
        held += 1
        del held
        peaks.append(peak.read())
    return peaks[0], peaks[1], peaks[2]


@pytest.mark.parametrize("kept", [True, False], ids=["by the system", "by looking"])
def test_each_phase_has_a_peak_of_its_own(kept: bool, monkeypatch: pytest.MonkeyPatch):
    if not kept:
        monkeypatch.setattr(memory, "_reset_peak", lambda: False)
        monkeypatch.setattr(memory, "EVERY", 0.0002)
    peak = PeakMemory(CPU)
    assert ("VmHWM" in peak.how) == (kept and memory.CLEAR.exists())
    large, nothing, small = _phases(peak)
    assert large - nothing > 60e6 and small < large


def test_percentiles_are_values():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.95) == 95.0
    assert percentile([7.0], 0.95) == 7.0


def test_a_stopwatch_keeps_its_time():
    with Stopwatch(CPU) as watch:
        torch.ones(1000).sum()
    assert 0 < watch.seconds < 5


# Surroundings


def test_environment_is_whole():
    here = surroundings.environment()
    assert here.cores >= 1 and here.memory_bytes > 1e8 and here.cpu and here.torch == torch.__version__
    assert here.accelerator is None and here.time.endswith("Z")


def test_speed_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert surroundings.speed_dtype("float32", "cpu") == "float32"
    for flags, dtype in (("fpu avx2", "float32"), ("fpu avx512_bf16", "bfloat16"), ("amx_bf16 amx_tile", "bfloat16")):
        monkeypatch.setattr(surroundings, "_cpu_field", lambda *names, flags=flags: flags)
        assert surroundings.speed_dtype("auto", "cpu") == dtype


# Records


def sample(run: Measured, repeat: int, **changes: object) -> Sample:
    base = {"status": "ok", "repeat": repeat, "order": repeat, "seconds": 1.0, "dtype": "float32", "threads": 1}
    return Sample(**{**base, "environment": surroundings.environment(), "measured": run, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    specs = ("full", "h2o:0.5", "infinigen:0.3")
    return Plan("tiny", {spec: parse(spec) for spec in specs}, Path(), PROMPT, STEPS, BATCH)


WORKLOAD = Workload(
    text="a text", text_sha256="0", calibration_sha256="1", prompt_tokens=PROMPT, new_tokens=STEPS, batch=BATCH, seed=0
)


def test_figures_are_medians_of_repeats(measured: Callable[[str], Measured], plan: Plan):
    run = measured("full")
    runs = [run.model_copy(update={"ttft": ttft, "steps": [ttft / 10] * STEPS}) for ttft in (3.0, 1.0, 2.0)]
    made = record(plan, "full", [sample(one, i) for i, one in enumerate(runs)], WORKLOAD)
    assert made.timing is not None and made.memory is not None and made.status == "ok"
    ttft = made.timing.ttft
    assert (ttft.value, ttft.low, ttft.high, ttft.n, ttft.interval) == (2.0, 1.0, 3.0, 3, "min-max")
    assert made.timing.tokens_per_s.value == pytest.approx(BATCH / 0.2)
    per_gb = made.memory.tokens_per_s_per_gb.device_kv
    assert per_gb is not None and per_gb.value == pytest.approx(BATCH / 0.2 / (run.tiers["device"].held / 1e9))
    assert made.memory.read_per_step is not None and made.memory.read_per_step.interval is None  # the same each time
    assert made.transfers is None and made.timing.setup is None and made.workload.calibration_sha256 is None
    assert made.memory.tiers_logical and len(made.repeats) == 3


def test_a_calibrated_strategy_says_so(measured: Callable[[str], Measured], plan: Plan):
    made = record(plan, "infinigen:0.3", [sample(measured("infinigen:0.3"), 0)], WORKLOAD)
    assert made.timing is not None and made.timing.setup is not None and made.workload.calibration_sha256 == "1"
    assert made.transfers is not None and made.transfers.count.unit == "count"


def test_one_failure_fails_the_record(measured: Callable[[str], Measured], plan: Plan):
    bad = sample(measured("full"), 1, status="timeout", error="not done after 5 s", measured=None)
    made = record(plan, "h2o:0.5", [sample(measured("h2o:0.5"), 0), bad], WORKLOAD)
    assert (made.status, made.error, made.timing) == ("timeout", "not done after 5 s", None)
    assert len(made.repeats) == 2


@pytest.mark.gpu
def test_peaks_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch sees no CUDA device")
    device = torch.device("cuda")
    peak = PeakMemory(device)
    peak.reset()
    before = peak.read()
    held = torch.ones(50_000_000, device=device)
    del held
    assert peak.read() - before >= 200_000_000
    peak.reset()
    assert peak.read() <= before + 10_000_000
