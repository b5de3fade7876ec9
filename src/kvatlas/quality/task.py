"""A task of the battery: what it asks, how a reply is judged, and its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvatlas.engine.lm import LM
from kvatlas.quality.question import Footprint, Label, Question, Reply
from kvatlas.quality.reading import Progress
from kvatlas.quality.replies import Replies


@dataclass(frozen=True, slots=True)
class Metric:
    """What a task measures of a sample.

    ``right`` is 0 or 1 a sample (accuracy, recalled): a share with Wilson's interval, compared by McNemar's test. A
    ``value`` is any number (KL, rank, nats): a mean with a bootstrap interval, compared by flipping signs.
    """

    name: str
    kind: Literal["right", "value"] = "right"
    unit: str = "share"
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample's metrics and what it is broken down by. The same names at every strategy pair the samples."""

    name: str
    metrics: Mapping[str, float]
    labels: Mapping[str, Label] = field(default_factory=dict)


@dataclass(slots=True)
class Found:
    """One strategy's samples of a task, and its footprint in each batch of them."""

    samples: list[Sample] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)


class Task(ABC):
    """One task with its parameters. Makes the same samples at every run with the same ``limit`` and ``seed``."""

    name: str
    metrics: tuple[Metric, ...]
    """The first one leads."""

    def about(self) -> dict[str, str | int | float | bool]:
        """The parameters that make its results what they are (shots, question, format, data's hash); JSON values."""
        return {}

    @abstractmethod
    def run(
        self,
        lm: LM,
        specs: Sequence[str],
        limit: int,
        seed: int,
        progress: Progress | None,
        kept: Replies | None = None,
    ) -> dict[str, Found]:
        """All samples under every spec, those of batches that are ``kept`` without asking again.

        Raises UserError where the data or the model do not allow it.
        """


class QuestionTask(Task):
    """A task whose samples are questions to a compressed cache."""

    @abstractmethod
    def questions(self, lm: LM, limit: int, seed: int) -> list[Question]:
        """``limit`` samples (fewer only where the data has no more), drawn by ``seed``."""

    @abstractmethod
    def judge(self, lm: LM, question: Question, reply: Reply) -> dict[str, float]:
        """The metrics of one sample."""

    def run(
        self,
        lm: LM,
        specs: Sequence[str],
        limit: int,
        seed: int,
        progress: Progress | None,
        kept: Replies | None = None,
    ) -> dict[str, Found]:
        from kvatlas.quality.asking import ask

        asked = self.questions(lm, limit, seed)
        replied = ask(lm, specs, asked, progress, kept=kept)
        return {
            spec: Found(self.samples_of(lm, asked, replies), [reply.footprint for reply in replies])
            for spec, replies in replied.items()
        }

    def samples_of(self, lm: LM, asked: Sequence[Question], replies: Sequence[Reply]) -> list[Sample]:
        """The samples that the questions are: one each, unless a task says otherwise."""
        return [Sample(q.name, self.judge(lm, q, reply), q.labels) for q, reply in zip(asked, replies)]
