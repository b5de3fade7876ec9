"""Reasoning tasks of the battery: lm-eval's prompts and lm-eval's judgement, answered through a compressed cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError, nearest
from kvatlas.quality.question import Question, Reply
from kvatlas.quality.reasoning.definitions import definition, measured
from kvatlas.quality.reasoning.extra import need_lm_eval, quiet
from kvatlas.quality.reasoning.records import NAMES, digest, file_of, read_records
from kvatlas.quality.reasoning.requests import Share, scores, shares
from kvatlas.quality.task import Metric, QuestionTask, Sample

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

EXAMPLES = 50
"""Records set aside for few-shot examples, or four times as many as a prompt has; at most a fifth of all."""

OWN_FOLDERS = ("arc", "glue", "hellaswag", "openbookqa", "piqa", "super_glue", "winogrande")
"""Where lm-eval keeps these tasks: reading all of its folders takes ten seconds."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One sample: its record, and lm-eval's requests, a (context, continuation) for each choice."""

    name: str
    doc: dict[str, Any]
    requests: tuple[Instance, ...]


class ReasoningTask(QuestionTask):
    """One of lm-eval's multiple-choice tasks.

    Samples are drawn by seed. From local files, few-shot examples come from records of the same file that are set aside
    and never scored; on hub data, from where lm-eval takes them. With the same seed a larger limit adds samples and
    changes none, and 0-shot and k-shot ask the same ones.

    Args:
        name: one of ``NAMES``, also its name in lm-eval.
        shots: answered examples before the question.
        data_dir: folder with the task's file (see ``records.py``), in it or one folder down; None: lm-eval's own
            data, from the hub.
    """

    def __init__(self, name: str, shots: int = 0, data_dir: str | Path | None = None) -> None:
        if name not in NAMES:
            raise UserError(f"no reasoning task '{name}'; {nearest(name, NAMES)}")
        if shots < 0:
            raise UserError(f"shots must be 0 or more, not {shots}")
        self.name, self.shots, self.data_dir = name, shots, data_dir
        names = {"acc": "accuracy"}
        self.metrics = tuple(Metric(names.get(metric, metric)) for metric in measured(name))
        self._judges: dict[str, tuple[Any, Asked]] = {}
        self._parts: list[list[Share]] = []

    def about(self) -> dict[str, str | int | float | bool]:
        """Shots, where the records come from, the file's hash, and lm-eval's version."""
        if self.data_dir is None:
            return {"shots": self.shots, "data": "hub", "lm_eval": need_lm_eval()}
        path = file_of(self.name, self.data_dir)
        return {"shots": self.shots, "data": path.name, "sha256": digest(path), "lm_eval": need_lm_eval()}

    # ------------------------------------------------------------------- what is asked

    def samples(self, limit: int, seed: int) -> list[Asked]:
        """What lm-eval asks of ``limit`` samples, as texts.

        Raises:
            UserError: no lm-eval; no or bad data; a limit below 1; more shots than there are examples.
        """
        need_lm_eval()
        if limit < 1:
            raise UserError(f"limit must be at least 1 sample, not {limit}")
        with quiet():
            task, docs = self._from_hub(limit, seed) if self.data_dir is None else self._from_files(limit, seed)
            task.set_fewshot_seed(seed=seed)
            asked = [self._requests(task, number, doc) for number, doc in docs]
        self._judges = {one.name: (task, one) for one in asked}
        return asked

    def _requests(self, task: Any, number: int, doc: dict[str, Any]) -> Asked:
        text = task.fewshot_context(doc, num_fewshot=self.shots)
        made = task.construct_requests(doc=doc, ctx=text, metadata=(self.name, number, 1))
        return Asked(str(number), doc, tuple(made))

    def _from_files(self, limit: int, seed: int) -> tuple[Any, list[tuple[int, dict[str, Any]]]]:
        from lm_eval.api.task import ConfigurableTask

        path = file_of(self.name, self.data_dir or ".")
        records = read_records(self.name, path)
        order = random.Random(seed).sample(range(len(records)), len(records))
        aside = min(max(EXAMPLES, 4 * self.shots), len(records) // 5) if self.shots else 0
        if self.shots and aside <= self.shots:
            raise UserError(
                f"{path} has {len(records)} records, of which {aside} can be set aside for examples: "
                f"too few for {self.shots} shots"
            )
        chosen = order[: len(records) - aside][:limit]
        examples = [records[i] for i in (order[-aside:] if aside else chosen)]
        task = ConfigurableTask(config=definition(self.name, [records[i] for i in chosen], examples))
        return task, list(zip(chosen, task.eval_docs))

    def _from_hub(self, limit: int, seed: int) -> tuple[Any, list[tuple[int, dict[str, Any]]]]:
        try:
            task = _own_tasks().load(self.name)["tasks"][self.name]
        except Exception as error:  # whatever the hub's client raises: no network, no such data set, no right to it
            raise UserError(
                f"lm-eval could not load the data of '{self.name}' from the hub ({_line(error)}); "
                "name a folder with local files (data_dir)"
            ) from None
        docs = task.eval_docs
        return task, [(i, docs[i]) for i in random.Random(seed).sample(range(len(docs)), len(docs))[:limit]]

    # ------------------------------------------------------------------ what comes back

    def questions(self, lm: LM, limit: int, seed: int) -> list[Question]:
        self._parts = self._shares(lm, limit, seed)
        return [share.question for own in self._parts for share in own]

    def judge(self, lm: LM, question: Question, reply: Reply) -> dict[str, float]:
        return self._measure(question.name, scores([(Share(question, tuple(range(len(question.choices)))), reply)]))

    def samples_of(self, lm: LM, asked: Sequence[Question], replies: Sequence[Reply]) -> list[Sample]:
        """A sample whose choices have different contexts may be several questions."""
        rest, made = iter(replies), []
        for own in self._parts:
            name = own[0].question.name.partition("#")[0]
            metrics = self._measure(name, scores([(share, next(rest)) for share in own]))
            made.append(Sample(name, metrics, own[0].question.labels))
        return made

    def _shares(self, lm: LM, limit: int, seed: int) -> list[list[Share]]:
        from kvatlas.quality.reasoning.model import KVAtlasLM

        asked, tokens = self.samples(limit, seed), KVAtlasLM(lm)
        pairs = [[tokens.pair(*request.args) for request in one.requests] for one in asked]
        return [shares(one.name, own, {"shots": self.shots}) for one, own in zip(asked, pairs)]

    def _measure(self, name: str, values: list[tuple[float, bool]]) -> dict[str, float]:
        task, asked = self._judges[name]
        judged = task.process_results(asked.doc, values)
        return {metric.name: float(judged[own]) for metric, own in zip(self.metrics, measured(self.name))}


def reasoning_task(name: str, shots: int = 0, data_dir: str | Path | None = None) -> ReasoningTask:
    """A reasoning task; see `ReasoningTask`. Raises UserError for an unknown name or fewer than 0 shots."""
    return ReasoningTask(name, shots, data_dir)


@once
def _own_tasks() -> Any:
    """lm-eval's own tasks of these names."""
    import lm_eval.tasks

    base = Path(lm_eval.tasks.__file__).parent
    folders = [base / name for name in OWN_FOLDERS]
    if all(folder.is_dir() for folder in folders):
        return lm_eval.tasks.TaskManager(include_defaults=False, include_path=list(folders))
    return lm_eval.tasks.TaskManager()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]
