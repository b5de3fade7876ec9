"""The record of one cell of the battery: one task under one strategy, every sample of it, on one model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from kvatlas.measure.figure import Figure, Part
from kvatlas.measure.schema import Environment, Model, Status, Strategy

FORMAT = "kvatlas-quality"
VERSION = 1
Value = str | int | float | bool


class MetricPart(Part):
    """See `kvatlas.quality.task.Metric`."""

    name: str
    kind: Literal["right", "value"]
    unit: str
    higher_is_better: bool


class TaskPart(Part):
    """What was asked: the task, its parameters, how many samples it was limited to. The first metric leads."""

    name: str
    parameters: dict[str, Value]
    limit: int
    seed: int
    metrics: list[MetricPart]


class SamplePart(Part):
    """One sample: the same name in every cell of the task pairs them."""

    name: str
    metrics: dict[str, float]
    labels: dict[str, Value] = Field(default_factory=dict)


class FootprintPart(Part):
    """Means over the samples: shares of all tokens, and bytes of one sequence.

    ``device``, ``total`` (all tiers) and ``read`` (by one step) are the three axes of a curve.
    """

    kept: Figure
    read_share: Figure
    device: Figure
    total: Figure
    read: Figure


class QualityRecord(Part):
    """One cell. ``family`` and ``budget`` say which curve its point is on: ``h2o`` and 0.3 for ``h2o:0.3``."""

    format: Literal["kvatlas-quality"] = "kvatlas-quality"
    version: Literal[1] = 1
    status: Status
    error: str | None = None
    strategy: Strategy
    family: str
    budget: float | int | None
    model: Model
    dtype: str
    threads: int
    environment: Environment
    task: TaskPart
    figures: dict[str, Figure] = Field(default_factory=dict)
    footprint: FootprintPart | None = None
    samples: list[SamplePart] = Field(default_factory=list)
    seconds: float = 0.0

    @model_validator(mode="after")
    def _says_why(self) -> QualityRecord:
        if (self.status == "ok") != (self.error is None):
            raise ValueError("a record is ok, or it says in `error` why it is not")
        if self.status == "ok" and not (self.figures and self.samples):
            raise ValueError("a record that is ok has figures and samples")
        return self


def cell_key(strategy: str, task: str, asked: Mapping[str, Any]) -> str:
    """File name of a cell from the normalised spec, the task and what was asked of it (JSON values only)."""
    text = json.dumps([VERSION, strategy, task, dict(asked)], sort_keys=True, separators=(",", ":"), allow_nan=False)
    slug = re.sub(r"[^A-Za-z0-9.=+]+", "-", f"{task}-{strategy}").strip("-.")[:60]
    return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
