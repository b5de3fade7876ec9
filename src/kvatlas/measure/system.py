"""Speed and memory of one strategy on one workload, in this process and once. Whoever calls it gives it a fresh one.

Order: compile, set up, warm up; prefill; decode steps without the section clock; a few more with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvatlas.engine.cache import KVCache, Realised
from kvatlas.engine.clock import Clock
from kvatlas.engine.lm import LM
from kvatlas.measure.clocks import Stopwatch
from kvatlas.measure.memory import PeakMemory
from kvatlas.measure.sample import SECTIONS, Measured
from kvatlas.measure.schema import Tier
from kvatlas.strategy.answers import Transfers
from kvatlas.strategy.place.store import Bytes
from kvatlas.strategy.strategy import Strategy

WARM_TOKENS, WARM_STEPS = 32, 3
SPLIT_STEPS = 8
LOOK_EVERY = 8
"""Decode steps between two looks at what is held, kept and read (outside the timed part of a step)."""
TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Load:
    """What goes through the model: prompts ``[B]`` of token ids, and the tokens ``[steps][B]`` that follow.

    They are the text's own, not the model's: so every strategy does the same work.
    """

    prompts: Sequence[Sequence[int]]
    follow: Sequence[Sequence[int]]


@dataclass
class Held:
    """The bytes of a cache, and the most that was seen of them."""

    now: Bytes = field(default_factory=Bytes)
    peaks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    def look(self, cache: KVCache) -> None:
        """Count again."""
        self.now = cache.bytes()
        for tier in TIERS:
            self.peaks[tier] = max(self.peaks[tier], getattr(self.now, tier))

    def tiers(self) -> dict[str, Tier]:
        """By tier; those beyond the device only where they were used."""
        kinds = ("payload", "metadata", "padding")
        return {
            tier: Tier(peak=peak, **{kind: getattr(self.now, f"{tier}_{kind}", 0) for kind in kinds})
            for tier, peak in self.peaks.items()
            if peak or tier == "device"
        }


@torch.no_grad()
def measure_system(lm: LM, strategy: Strategy, load: Load, loaded_in: float = 0.0) -> Measured:
    """Run it and say what it took. ``loaded_in``: seconds until ``lm`` was ready, for the record."""
    compiling = _compile(lm)
    setup = _set_up(lm, strategy)
    warmup = _warm_up(lm, strategy, load)
    memory, held = PeakMemory(lm.facts.device), Held()
    clock = Clock(True, lm.facts.device)
    memory.reset()
    cache, ttft = _prefill(lm, strategy, load, clock, held)
    prefill_peak, compression = memory.read(), clock.seconds["compress"]
    clock.on = False
    memory.reset()
    before = cache.transfers()
    steps, looks = _decode(lm, cache, load, held)
    decode_peak, moved = memory.read(), _per_step(before, cache.transfers(), len(steps), strategy)
    measured: dict[str, Any] = {
        "load": loaded_in, "compile": compiling, "setup": setup, "warmup": warmup, "ttft": ttft,
        "compression": compression, "steps": steps, "prefill_peak": prefill_peak, "decode_peak": decode_peak,
        "peak_how": memory.how, "tiers": held.tiers(), **_means(looks), **moved,
    }  # fmt: skip
    split = _split(lm, cache, load, clock)
    return Measured(**measured, split=split, split_steps=SPLIT_STEPS if split else 0)


def _compile(lm: LM) -> float:
    """Build the native kernels where they serve."""
    from kvatlas.attention import native

    began = time.perf_counter()
    if lm.facts.device.type == "cpu":
        native.available()
    return time.perf_counter() - began


def _set_up(lm: LM, strategy: Strategy) -> float | None:
    """What the strategy needs once a model."""
    if not strategy.calibrates:
        return None
    with Stopwatch(lm.facts.device) as watch:
        lm.constants(strategy)
    return watch.seconds


def _warm_up(lm: LM, strategy: Strategy, load: Load) -> float:
    """A short prefill and a few steps, so that no first call is timed. On CUDA one prompt goes through whole."""
    with Stopwatch(lm.facts.device) as watch:
        prompts = [ids[:WARM_TOKENS] for ids in load.prompts]
        if lm.facts.device.type == "cuda":
            prompts[0] = load.prompts[0]
        cache = lm.new_cache(strategy)
        logits = lm.prefill(cache, prompts, reserve=WARM_STEPS)
        for _ in range(WARM_STEPS):
            logits = lm.step(cache, logits.argmax(-1))
    return watch.seconds


def _prefill(lm: LM, strategy: Strategy, load: Load, clock: Clock, held: Held) -> tuple[KVCache, float]:
    """Cache and TTFT. After each forward (each chunk, each prompt) the bytes held are counted."""
    cache = lm.new_cache(strategy, clock)
    watcher = lm.model.register_forward_hook(lambda *_: held.look(cache))
    try:
        with Stopwatch(lm.facts.device) as watch:
            lm.prefill(cache, load.prompts, reserve=len(load.follow)).argmax(-1).tolist()
    finally:
        watcher.remove()
    return cache, watch.seconds


def _decode(lm: LM, cache: KVCache, load: Load, held: Held) -> tuple[list[float], list[Realised]]:
    """Seconds of every step (the token's choice included), and what it kept and read, looked at now and then."""
    steps, looks = [], []
    tokens = _tokens(lm, load)
    for i, row in enumerate(tokens):
        with Stopwatch(lm.facts.device) as watch:
            lm.step(cache, row).argmax(-1).tolist()
        steps.append(watch.seconds)
        if i % LOOK_EVERY == 0 or i + 1 == len(tokens):
            held.look(cache)
            looks.append(cache.realised())
    return steps, looks


def _split(lm: LM, cache: KVCache, load: Load, clock: Clock) -> dict[str, float] | None:
    """Mean seconds of a step by section, over a few more steps; the first, in which stores may grow, is left out."""
    if lm.facts.positions == "learned":  # a table of positions may end here
        return None
    tokens = _tokens(lm, load)[-1]
    try:
        lm.step(cache, tokens)
        clock.on = True
        clock.reset()
        with Stopwatch(lm.facts.device) as watch:
            for _ in range(SPLIT_STEPS):
                lm.step(cache, tokens).argmax(-1).tolist()
    except (MemoryError, torch.OutOfMemoryError):
        return None
    parts = {name: clock.seconds[name] / SPLIT_STEPS for name in SECTIONS}
    return {**parts, "other": max(0.0, watch.seconds / SPLIT_STEPS - sum(parts.values()))}


def _tokens(lm: LM, load: Load) -> Tensor:
    """``[steps, B]`` on the model's device."""
    return torch.tensor([list(row) for row in load.follow], device=lm.facts.device)


def _per_step(before: Transfers, after: Transfers, steps: int, strategy: Strategy) -> dict[str, float | None]:
    """Transfers of one step."""
    if strategy.place.tier == "device" and after.count == 0:
        return {"copies": None, "copied_bytes": None, "blocked": None}
    return {
        "copies": (after.count - before.count) / steps,
        "copied_bytes": (after.bytes - before.bytes) / steps,
        "blocked": (after.blocked - before.blocked) / steps,
    }


def _means(looks: list[Realised]) -> dict[str, float]:
    names = ("kept", "read", "read_bytes", "scanned_bytes")
    return {name: sum(getattr(look, name) for look in looks) / len(looks) for name in names}
