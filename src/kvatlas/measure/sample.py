"""What one run of one strategy measured, in plain numbers: the raw material of a record's figures."""

from __future__ import annotations

from typing import Literal

from kvatlas.measure.figure import Part
from kvatlas.measure.schema import Environment, Model, Tier

SECTIONS = ("append", "select", "fetch", "attend", "drop")
"""Where a decode step's time can go; the rest is the model."""


class Measured(Part):
    """Times in seconds, sizes in bytes, of the whole batch.

    Attributes:
        load: until the model was ready; compile: building the native kernels, nearly nothing once they are built.
        setup: what the strategy does once a model; None when it has nothing to do.
        warmup: a short run before anything was timed.
        ttft: from empty cache to the first token with the cache ready; compression is a part of it.
        steps: wall time of each decode step, taken without the section clock.
        split: mean of a few further steps by section and ``other``, taken with it; None where there was no room.
        prefill_peak, decode_peak: see ``peak_how``.
        tiers: held at the end of the timed steps, with the most seen.
        kept, read, read_bytes, scanned_bytes: mean over the steps that were looked at.
        copies, copied_bytes, blocked: transfers between tiers for one step; None when the strategy has no other tier.
    """

    load: float
    compile: float
    setup: float | None
    warmup: float
    ttft: float
    compression: float
    steps: list[float]
    split: dict[str, float] | None
    split_steps: int
    prefill_peak: int
    decode_peak: int
    peak_how: str
    tiers: dict[str, Tier]
    kept: float
    read: float
    read_bytes: float
    scanned_bytes: float
    copies: float | None
    copied_bytes: float | None
    blocked: float | None


class Sample(Part):
    """One repeat of one strategy in a process of its own, whatever became of it."""

    status: Literal["ok", "out_of_memory", "timeout", "failed"]
    error: str | None = None
    repeat: int
    order: int  # its place in the shuffled order of the run
    seconds: float  # of the whole process
    model: Model | None = None
    environment: Environment
    dtype: str
    threads: int
    native_kernel: bool = False
    measured: Measured | None = None
