"""Each cell of a task against ``full`` on the same samples: what it lost and won, and whether that is chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvatlas.advise.curves import Asked
from kvatlas.measure.figure import Figure
from kvatlas.quality.cell import MetricPart, QualityRecord
from kvatlas.quality.statistics import ALPHA, Floats, Negatives, holm, paired_shift


@dataclass(frozen=True, slots=True)
class Against:
    """One cell against the reference on the samples that both have.

    Attributes:
        difference: strategy minus reference, in the metric's unit.
        p: two-sided, of one comparison: McNemar's exact test for right or wrong, a sign-flip test for values.
        adjusted: ``p`` after Holm's correction over all cells of the task.
        negatives: for right or wrong: who got which samples right.
    """

    record: QualityRecord
    metric: str
    difference: Figure
    p: float
    adjusted: float
    negatives: Negatives | None

    @property
    def differs(self) -> bool:
        """Whether it differs from the reference at 5 %, all cells of the task taken together."""
        return self.adjusted < ALPHA


def against(task: Asked, metric: MetricPart) -> dict[str, Against]:
    """All cells of a task but the reference, by their normalised specs; none where there is no reference.

    A cell without a common sample is left out.
    """
    if task.reference is None:
        return {}
    found = []
    for record in (point for curve in task.curves for point in curve.points):
        own, theirs = paired([record, task.reference], metric.name).T
        if len(own):
            found.append((record, *_compared(own, theirs, metric, task.task.seed)))
    adjusted = holm([p for _, _, p, _ in found])
    return {
        record.strategy.normalised: Against(record, metric.name, difference, p, corrected, negatives)
        for (record, difference, p, negatives), corrected in zip(found, adjusted)
    }


def _compared(own: Floats, theirs: Floats, metric: MetricPart, seed: int) -> tuple[Figure, float, Negatives | None]:
    if metric.kind == "right":
        negatives = Negatives.of(own, theirs)
        return negatives.difference(), negatives.p(), negatives
    shift = paired_shift(own, theirs, metric.unit, seed)
    return shift.difference, shift.p, None


def paired(records: Sequence[QualityRecord], metric: str) -> Floats:
    """``[n, records]`` values of the samples that every record has, paired by name, in the first record's order."""
    tables = [
        {sample.name: sample.metrics[metric] for sample in record.samples if metric in sample.metrics}
        for record in records
    ]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    return np.array([[table[name] for table in tables] for name in names], dtype=np.float64).reshape(-1, len(tables))
