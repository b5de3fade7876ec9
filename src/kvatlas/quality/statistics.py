"""Statistics of stored samples: bootstrap intervals, paired tests against a reference, Holm's correction, breakdowns.

All resampling is seeded: the same samples give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvatlas.measure.figure import Figure, wilson
from kvatlas.quality.bins import binned, splits
from kvatlas.quality.cell import MetricPart, QualityRecord, SamplePart

if TYPE_CHECKING:
    from kvatlas.quality.task import Metric, Sample

Floats = NDArray[np.float64]
ALPHA = 0.05
MOST, FEWEST, DRAWS = 10_000, 2_000, 20_000_000
"""Resamples at most and at least, and how many draws they may take together."""
CHUNK = 1_000_000


# Resampling


def resamples_for(n: int) -> int:
    """How many resamples of n samples: fewer where there are many samples, so that it stays a matter of seconds."""
    return int(min(MOST, max(FEWEST, DRAWS // max(n, 1))))


def draws(n: int, resamples: int, seed: int = 0) -> Iterator[NDArray[np.int64]]:
    """Indices of samples drawn with replacement: chunks ``[r, n]`` of together ``resamples`` rows."""
    random = np.random.default_rng([seed, n])
    rows = max(1, CHUNK // n)
    for start in range(0, resamples, rows):
        yield random.integers(0, n, (min(rows, resamples - start), n))


def resampled_means(values: ArrayLike, seed: int = 0, resamples: int | None = None) -> Floats:
    """Means of resamples of ``values [n]`` -> ``[resamples]``, or of ``[n, k]`` -> ``[resamples, k]``.

    The columns of one call are resampled jointly: the same samples are drawn for all of them.
    """
    columns = np.asarray(values, dtype=np.float64)
    if not len(columns):
        raise ValueError("there is nothing to resample")
    count = resamples_for(len(columns)) if resamples is None else resamples
    # one column at a time and no matrix product: its rounding would depend on the number of threads
    means = [
        np.stack([column[rows].mean(-1) for column in np.atleast_2d(columns.T)], -1)
        for rows in draws(len(columns), count, seed)
    ]
    found = np.concatenate(means)
    return found if columns.ndim == 2 else found[:, 0]


def bootstrap_mean(
    values: ArrayLike,
    seed: int = 0,
    resamples: int | None = None,
    method: Literal["bca", "percentile"] = "bca",
) -> tuple[float, float]:
    """95 % interval of the mean of ``values [n]`` by the bootstrap. It always holds the mean itself.

    ``bca`` corrects for bias and skew (Efron 1987, "Better bootstrap confidence intervals"): KL divergences and ranks
    are skewed. Raises ValueError for no values, or values that are not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        raise ValueError("a bootstrap needs finite values")
    means, middle = resampled_means(sample, seed, resamples), float(sample.mean())
    if np.ptp(sample) == 0:
        return middle, middle
    levels = (ALPHA / 2, 1 - ALPHA / 2) if method == "percentile" else _bca_levels(sample, means)
    low, high = np.quantile(means, levels)
    return min(float(low), middle), max(float(high), middle)


def _bca_levels(sample: Floats, means: Floats) -> tuple[float, float]:
    """The quantiles of the resampled means that BCa reads instead of 2.5 % and 97.5 %."""
    normal, middle = NormalDist(), sample.mean()
    below = ((means < middle).sum() + 0.5 * (means == middle).sum()) / len(means)
    bias = normal.inv_cdf(float(np.clip(below, 0.5 / len(means), 1 - 0.5 / len(means))))
    off = (sample - middle) / np.abs(sample - middle).max()  # its cubes must not vanish
    skew = float((off**3).sum() / (6 * (off**2).sum() ** 1.5))
    levels = []
    for z in (normal.inv_cdf(ALPHA / 2), normal.inv_cdf(1 - ALPHA / 2)):
        levels.append(normal.cdf(bias + (bias + z) / (1 - skew * (bias + z))))
    return levels[0], levels[1]


# Pairs


@dataclass(frozen=True, slots=True)
class Negatives:
    """Samples by who got them right: both, the reference alone (``lost``), the strategy alone (``won``), neither."""

    both: int
    lost: int
    won: int
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.lost + self.won + self.neither

    @classmethod
    def of(cls, own: ArrayLike, reference: ArrayLike) -> Negatives:
        """From 0 or 1 for each sample ``[n]`` of both, in the same order."""
        mine, theirs = _rights(own), _rights(reference)
        if len(mine) != len(theirs):
            raise ValueError(f"{len(mine)} samples cannot be paired with {len(theirs)}")
        both, lost, won = ((mine & theirs).sum(), (~mine & theirs).sum(), (mine & ~theirs).sum())
        return cls(int(both), int(lost), int(won), int((~mine & ~theirs).sum()))

    def p(self) -> float:
        """McNemar's exact test, two-sided."""
        return mcnemar(self.lost, self.won)

    def difference(self) -> Figure:
        """Strategy minus reference, a share of n, with Newcombe's interval."""
        low, high = newcombe(self.both, self.won, self.lost, self.neither)
        return Figure(value=(self.won - self.lost) / self.n, unit="share", n=self.n, low=low, high=high,
                      interval="95% Newcombe")  # fmt: skip


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p of McNemar's test: how likely ``lost`` and ``won`` are as heads and tails, or farther apart."""
    n, fewer = lost + won, min(lost, won)
    if fewer < 0:
        raise ValueError("counts cannot be negative")
    ways, term = 0, 1
    for i in range(fewer + 1):
        ways += term
        term = term * (n - i) // (i + 1)
    return min(1.0, 2 * ways / 2**n)  # whole numbers up to the last division: exact for any n


def newcombe(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """95 % interval of a difference of paired proportions, (both + first) / n - (both + second) / n.

    Method 10 of Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on
    paired data": Wilson's intervals of both, and their correlation with a continuity correction.
    """
    n = both + first + second + neither
    one, other = (both + first) / n, (both + second) / n
    (low1, high1), (low2, high2) = wilson(both + first, n), wilson(both + second, n)
    cross = float(both * neither - first * second)
    cross = max(cross - n / 2, 0.0) if cross > 0 else cross
    spread = (both + first) * (second + neither) * (both + second) * (first + neither)
    phi = cross / math.sqrt(spread) if spread else 0.0
    down, up = _side(one - low1, high2 - other, phi), _side(high1 - one, other - low2, phi)
    return max(-1.0, one - other - down), min(1.0, one - other + up)


def _side(a: float, b: float, phi: float) -> float:
    return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))


@dataclass(frozen=True, slots=True)
class Shift:
    """A paired difference of means, strategy minus reference, and the two-sided p of there being none."""

    difference: Figure
    p: float


def paired_shift(own: ArrayLike, reference: ArrayLike, unit: str, seed: int = 0, resamples: int | None = None) -> Shift:
    """Difference of means of two paired ``[n]``: its BCa interval, and p by flipping signs.

    Without differences p is 1; with n = 1, or where a value is not finite, there is no interval and p is 1.
    """
    mine, theirs = np.asarray(own, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if mine.shape != theirs.shape or not len(mine):
        raise ValueError(f"values of shapes {mine.shape} and {theirs.shape} cannot be paired")
    off = mine - theirs
    figure = mean_figure(off, unit, seed, resamples)
    if figure.low is None or not off.any():
        return Shift(figure, 1.0)
    return Shift(figure, sign_flips(off, seed, resamples))


EXACT_FLIPS = 13
"""Samples up to which all ways to flip signs are looked at."""


def sign_flips(off: ArrayLike, seed: int = 0, resamples: int | None = None) -> float:
    """Two-sided p of paired differences ``[n]``: how often random signs give a mean as far from 0 as theirs.

    Fisher's permutation test (1935): exact up to 13 samples, else by random flips. Unlike a bootstrap it cannot call
    two or three samples significant.
    """
    values = np.asarray(off, dtype=np.float64)
    n, bar = len(values), abs(values.sum()) * (1 - 1e-12)
    if n <= EXACT_FLIPS:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float((abs((signs * values).sum(-1)) >= bar).mean())
    count = resamples_for(n) if resamples is None else resamples
    draw, hits = np.random.default_rng(seed), 0
    for _ in range(count):
        hits += abs(np.where(draw.random(n) < 0.5, values, -values).sum()) >= bar
    return (int(hits) + 1) / (count + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for being many (Holm 1979), in the order given: all below 0.05 hold together at 5 %."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


# Figures


def mean_figure(values: ArrayLike, unit: str, seed: int = 0, resamples: int | None = None) -> Figure:
    """Mean of ``values [n]`` with its BCa interval; none for n = 1, or where a value is not finite."""
    sample = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # infinity minus infinity is no number, and said so
        middle = float(sample.mean())
    if len(sample) < 2 or not np.isfinite(sample).all():
        return Figure.exact(middle, unit, n=len(sample))
    low, high = bootstrap_mean(sample, seed, resamples)
    return Figure(value=middle, unit=unit, n=len(sample), low=low, high=high, interval="95% bootstrap")


def figures(
    metrics: Sequence[Metric | MetricPart], samples: Sequence[Sample | SamplePart], seed: int = 0
) -> dict[str, Figure]:
    """Each metric over the samples that have it: a share with Wilson's interval, or a mean with a bootstrap interval.

    A metric that no sample has is left out. Raises ValueError where a right-or-wrong metric is neither 0 nor 1.
    """
    found = {}
    for metric in metrics:
        values = [sample.metrics[metric.name] for sample in samples if metric.name in sample.metrics]
        if not values:
            continue
        if metric.kind == "right":
            found[metric.name] = Figure.proportion(int(_rights(values).sum()), len(values))
        else:
            found[metric.name] = mean_figure(values, metric.unit, seed)
    return found


def _rights(values: ArrayLike) -> NDArray[np.bool_]:
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isin(numbers, (0.0, 1.0)).all():
        raise ValueError("a right-or-wrong metric is 0 or 1 for each sample")
    return numbers == 1.0


def breakdown(record: QualityRecord, label: str) -> dict[str, dict[str, Figure]]:
    """A record's figures by the bins of a label (see `kvatlas.quality.bins`), in their order; empty bins are left out.

    Samples without the label are not in it.
    """
    return {
        name: figures(record.task.metrics, samples, record.task.seed)
        for name, samples in binned(record.samples, label).items()
    }


def labels(record: QualityRecord) -> list[str]:
    """Labels by which a record can be broken down (see `kvatlas.quality.bins.splits`)."""
    names = dict.fromkeys(name for sample in record.samples for name in sample.labels)
    return [name for name in names if splits(record.samples, name)]
