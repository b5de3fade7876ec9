"""A figure: one number with what is needed to believe it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Interval = Literal["min-max", "95% Wilson", "mean ± standard error", "95% interval", "95% bootstrap", "95% Newcombe"]


class Part(BaseModel):
    """Base of all parts of a record: unknown fields are errors, infinities survive JSON as strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings", protected_namespaces=())


class Figure(Part):
    """One number with what is needed to believe it. `low` and `high` are the ends of `interval`, both or neither."""

    value: float
    unit: str
    n: int = Field(default=1, ge=0)
    low: float | None = None
    high: float | None = None
    interval: Interval | None = None
    kind: Literal["measured", "modelled"] = "measured"

    @model_validator(mode="after")
    def _both_ends(self) -> Figure:
        given = {self.low is None, self.high is None, self.interval is None}
        if len(given) != 1:
            raise ValueError("low, high and interval come together or not at all")
        return self

    @classmethod
    def of(cls, samples: Iterable[float], unit: str, **extra: Any) -> Figure:
        """Median of repeats, with the smallest and the largest."""
        values = _some(samples)
        spread: dict[str, Any] = (
            {"low": min(values), "high": max(values), "interval": "min-max"} if len(values) > 1 else {}
        )
        return cls(value=statistics.median(values), unit=unit, n=len(values), **spread, **extra)

    @classmethod
    def mean(cls, samples: Iterable[float], unit: str, **extra: Any) -> Figure:
        """Mean of samples, plus and minus its standard error."""
        values = _some(samples)
        middle = math.fsum(values) / len(values)
        if len(values) < 2 or not math.isfinite(middle):
            return cls(value=middle, unit=unit, n=len(values), **extra)
        error = statistics.stdev(values) / math.sqrt(len(values))
        spread: dict[str, Any] = {"low": middle - error, "high": middle + error, "interval": "mean ± standard error"}
        return cls(value=middle, unit=unit, n=len(values), **spread, **extra)

    @classmethod
    def proportion(cls, hits: int, n: int, **extra: Any) -> Figure:
        """hits of n, with the Wilson interval at 95 %."""
        low, high = wilson(hits, n)
        return cls(value=hits / n, unit="share", n=n, low=low, high=high, interval="95% Wilson", **extra)

    @classmethod
    def exact(cls, value: float, unit: str, n: int = 1, **extra: Any) -> Figure:
        """A number without an interval."""
        return cls(value=value, unit=unit, n=n, **extra)


def _some(samples: Iterable[float]) -> list[float]:
    values = [float(sample) for sample in samples]
    if not values:
        raise ValueError("a figure needs at least one sample")
    return values


def wilson(hits: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a proportion: hits of n, n >= 1."""
    if not 0 <= hits <= n or n < 1:
        raise ValueError(f"{hits} of {n} is no proportion")
    p = hits / n
    middle = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, min(p, (middle - half) / scale)), min(1.0, max(p, (middle + half) / scale))
