"""The schema of a result record: one strategy on one model, workload and setting.

- a `Figure` is anything that was timed, sampled or estimated: it says its unit, its n, its interval, and whether it was
  measured or modelled. A plain ``int`` is an exact count (bytes by tensor storage, numbers of layers);
- units are plain: ``s``, ``bytes``, ``tokens/s``, ``share`` (0 to 1), ``nats``, ``count``, and ``ppl`` for perplexity;
- every section after `environment` may be missing: a run that failed has none, a run without quality lacks that one;
- GB is 10^9 bytes. Bytes are those of the whole batch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from kvatlas.measure.figure import Figure, Part

SCHEMA_VERSION = 1
FORMAT = "kvatlas-record"
REFERENCE = "full"  # what quality is compared with unless a record says otherwise

Status = Literal["ok", "out_of_memory", "timeout", "failed"]


class Strategy(Part):
    """What was asked, as the user wrote it and in normal form, and the four answers in words."""

    asked: str
    normalised: str
    keep: str
    read: str
    place: str
    encode: str


class Model(Part):
    """The model, which weights exactly (a hash, or the seed of random ones), and how they were stored.

    A run that failed before it had the model knows only its name.
    """

    name: str
    source: str = ""
    weights: str = ""
    stored: str = ""
    architecture: str = ""
    layers: int | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int | None = None
    parameters: int | None = None


class Workload(Part):
    """The text and the shape of the run. `beyond_trained`: the prompt passes the model's trained positions."""

    text: str
    text_sha256: str
    calibration_sha256: str | None = None
    prompt_tokens: int
    new_tokens: int
    batch: int
    seed: int
    beyond_trained: bool = False


class Setting(Part):
    """How it was run. `native_kernel`: whether the compiled C++ tile kernel was in use. `link`: an emulated link."""

    dtype: str
    prefill: str
    device: str
    threads: int
    native_kernel: bool
    link_gb_per_s: float | None = None


class Environment(Part):
    """Versions, hardware and the time (ISO 8601, UTC) at which the record was written."""

    kvatlas: str
    torch: str
    transformers: str
    python: str
    system: str = ""
    cpu: str
    cores: int
    memory_bytes: int
    accelerator: str | None = None
    time: str


class StepSplit(Part):
    """One decode step's time by what it was spent on, in seconds; `other` is the model itself."""

    append: Figure
    select: Figure
    fetch: Figure
    attend: Figure
    drop: Figure
    other: Figure


class Timing(Part):
    """TTFT includes `compression`; `setup` (once a model) is in neither. `tpot` is the median of the steps."""

    ttft: Figure
    compression: Figure | None = None
    setup: Figure | None = None
    tpot: Figure
    tpot_p95: Figure
    tokens_per_s: Figure
    step: StepSplit | None = None


class Tier(Part):
    """Bytes that one tier holds at the end of the run, and the most it held (`peak`)."""

    payload: int = Field(ge=0)
    metadata: int = Field(default=0, ge=0)
    padding: int = Field(default=0, ge=0)
    peak: int | None = None

    @property
    def held(self) -> int:
        return self.payload + self.metadata + self.padding


class PerGB(Part):
    """tokens/s for each GB (10^9 bytes), by which GB."""

    device_kv: Figure | None = None
    all_tiers: Figure | None = None
    process_peak: Figure | None = None


class Memory(Part):
    """Process peaks, bytes held by tier (``device``, ``host``, ...), bytes one decode step reads and scans."""

    prefill_peak: Figure | None = None
    decode_peak: Figure | None = None
    tiers: dict[str, Tier]
    tiers_logical: bool = False
    read_per_step: Figure | None = None
    scanned_per_step: Figure | None = None
    tokens_per_s_per_gb: PerGB = PerGB()


class Transfers(Part):
    """Copies between tiers for one decode step: how many, their bytes, and the time that computing waited for them."""

    count: Figure
    bytes: Figure
    blocked: Figure


class Realised(Part):
    """What the budget became: share of tokens kept, share of the sequence that a step attended to."""

    kept: Figure
    read: Figure


class Quality(Part):
    """What was lost, measured apart from the timing. `reference` is the spec that KL and top-1 compare with.

    The reference's own record says 0 nats and a share of 1, so that it stands in the charts.
    """

    reference: str = REFERENCE
    dtype: str = "float32"
    text_sha256: str | None = None
    context_tokens: int | None = None
    question: str = "after"
    turns: str = "one-prefill"
    perplexity: Figure | None = None
    kl: Figure | None = None
    top1: Figure | None = None
    recall: Figure | None = None
    realised: Realised | None = None


class Record(Part):
    """One strategy on one model, workload and setting.

    `asked` is everything that was asked for but the strategy. Records with the same `asked` are compared.
    """

    format: Literal["kvatlas-record"] = "kvatlas-record"
    schema_version: Literal[1] = 1
    status: Status
    error: str | None = None
    asked: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    strategy: Strategy
    model: Model
    workload: Workload
    setting: Setting
    environment: Environment
    timing: Timing | None = None
    memory: Memory | None = None
    transfers: Transfers | None = None
    realised: Realised | None = None
    quality: Quality | None = None
    repeats: list[dict[str, Any]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _says_why(self) -> Record:
        if (self.status == "ok") != (self.error is None):
            raise ValueError("a record is ok, or it says in `error` why it is not")
        return self

    @property
    def key(self) -> str:
        """The file name under which this record belongs."""
        return key(self.strategy.normalised, self.asked)


def key(strategy: str, asked: Mapping[str, Any]) -> str:
    """File name of a record from the normalised spec and what was asked (JSON values only; their order is no matter).

    Known before the run, so a second run finds what is done. Put in `asked` all that must lead to a new measurement.
    """
    text = json.dumps([SCHEMA_VERSION, strategy, dict(asked)], sort_keys=True, separators=(",", ":"), allow_nan=False)
    slug = re.sub(r"[^A-Za-z0-9.=+]+", "-", strategy).strip("-.")[:40] or "strategy"
    return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
