"""Where a curve comes near enough: the numbers behind `kvatlas.advise.match`, for all resamples at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvatlas.quality.statistics import ALPHA, Floats

Status = Literal["reached", "not bracketed", "not reached", "not measured"]
SLACK = 1e-9  # 0.95 - 0.90 is a little more than 5 points


@dataclass(frozen=True, slots=True)
class Span:
    """A value and its 95 % interval: minus infinity is below the smallest measured point, infinity beyond the last."""

    value: float
    low: float
    high: float


def crossings(loss: Floats, within: float) -> Floats:
    """Where each row of ``loss [R, points]`` (small to large budget) comes within: a place ``[R]`` along the points.

    2.5 is half way between the points 2 and 3. Minus infinity: all points are within; infinity: the last one is not.
    """
    good = loss <= within + SLACK
    count = loss.shape[1]
    last = count - 1 - np.argmax(~good[:, ::-1], axis=1)  # the largest budget that is not within
    rows = np.arange(len(loss))
    above, below = loss[rows, last], loss[rows, np.minimum(last + 1, count - 1)]
    with np.errstate(invalid="ignore", divide="ignore"):
        step = np.where(np.isfinite(above), (above - within) / (above - below), 1.0)
    place = np.where(last == count - 1, np.inf, last + np.clip(step, 0.0, 1.0))
    return np.where(good.all(1), -np.inf, place)


def along(where: Floats, values: Floats) -> Floats:
    """``values [points]`` at places ``[R]`` along them, by straight lines; infinite places stay infinite."""
    inside = np.interp(np.clip(where, 0, len(values) - 1), np.arange(len(values)), values)
    return np.where(np.isfinite(where), inside, where)


def status_of(where: float) -> Status:
    """In words."""
    return "reached" if math.isfinite(where) else "not reached" if where > 0 else "not bracketed"


def span_of(values: Floats, smallest: float) -> Span | None:
    """From the value (first) and its resamples; ``smallest`` bounds what is not bracketed. None if not reached."""
    if values[0] == math.inf:
        return None
    value = smallest if values[0] == -math.inf else float(values[0])
    ordered = np.sort(values[1:])
    if not len(ordered):
        return Span(value, -math.inf if values[0] == -math.inf else value, value)
    low, high = (ALPHA / 2) * (len(ordered) - 1), (1 - ALPHA / 2) * (len(ordered) - 1)
    return Span(value, float(ordered[math.floor(low)]), float(ordered[math.ceil(high)]))


def reached_of(where: Floats) -> float | None:
    """Share of the resamples ``where[1:]`` in which it was reached or not bracketed."""
    return float((where[1:] < math.inf).mean()) if len(where) > 1 else None
