"""The task: facts told in conversations, and asked for after the compression."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.quality.grid import cell, check_lengths, check_limit, lengths_of
from kvatlas.quality.primed import answered, encode, one_of, rank
from kvatlas.quality.question import Question, Reply
from kvatlas.quality.recall import is_hit
from kvatlas.quality.retention.facts import all_values, fact_of, own_hash
from kvatlas.quality.retention.fillers import SOURCES, Fillers, hash_of, turns_of
from kvatlas.quality.retention.form import Chat, Form, Plain
from kvatlas.quality.retention.talk import VARIANTS, Plan, talk, told
from kvatlas.quality.task import Metric, QuestionTask
from kvatlas.workload.text import default_text

DISTANCES = (1, 2, 4, 8, 12)
DEPTHS = (0.0, 0.2, 0.4)
FREE = 32
"""Tokens of a free answer."""

RECALLED = Metric("recalled")
RANK = Metric("rank", "value", "of 10", higher_is_better=False)
STALE = Metric("stale", higher_is_better=False)


@dataclass(frozen=True)
class RetentionTask(QuestionTask):
    """A fact is told early in a conversation, other turns follow, and then it is asked for.

    Samples are spread over context lengths (256 to 4,000 tokens unless asked otherwise), turns between the fact and
    the question (1, 2, 4, 8, 12) and the fact's depth in the context (0, 20, 40 % of its tokens, but 256 tokens or
    more before its end), over 12 kinds of facts in 72 wordings. A sample depends on its number and the seed alone.

    Metrics: ``recalled``: the greedy answer begins with the value (a free answer holds it). ``rank``: where the value
    stands among ten of its kind, by the log-probability of the first token in which they differ (not for free answers).
    ``stale`` (``variant="updated"`` only): the answer is the value that was corrected.

    Attributes:
        tokens: of the context, such as ``"256-4000"``, ``"512,2000"`` or ``1000``.
        distance: turns between the fact's and the question's, written in the same way.
        question: ``after``: it is read through the compressed cache. ``before``: it stands at the end of what is
            compressed, as in question-aware compression, and only the answer's start is read afterwards.
        turns: ``one-prefill``; or ``live``: all up to the fact is the prompt, and each later turn is appended to what
            the compression left. A budget that is a fraction is then one of that prompt, not of the conversation.
        format: ``plain`` (``User:`` and ``Assistant:`` lines) or ``chat`` (the tokenizer's template).
        answer: ``primed`` with its first words, or ``free``.
        variant: ``one`` fact; ``two`` of different kinds in one turn, of which one is asked for; ``updated``: told in
            the first turn and corrected later, distance and depth being those of the correction; ``assistant``: told in
            an answer only (the answer then begins with "I told you that"); ``all`` of them in turn.
        fillers: the other turns: ``own``, or those of real dialogues in ``data_dir``: ``mtbench101``, ``sgd``.

    The answer begins with "You told me that your dog's name is": with "Your dog's name is" alone a model of this size
    often ranks the value first among the ten and yet goes on with other words (in the six kinds that were hardest for
    it, the value's first token came in 15 of 30 conversations of 700 tokens, against 30 of 30).

    Measured on SmolLM2-135M-Instruct (4-bit weights, float32), ``full``, seeds 0 and 1: 21 of 21 recalled up to 1K
    tokens, 13 of 14 at 1-2K, 13 of 14 at 2-4K, 8 of 12 at 4-8K; ``random:0.05`` recalls 1 of 49 up to 4K. Seed 3, up to
    1,000 tokens: ``two`` 14 of 15, ``assistant`` 14 of 15, ``updated`` 6 of 15 (the other 9 stale). Seed 3, up to 512
    tokens: ``live`` 7 of 8, ``chat`` 8 of 8 primed and 4 of 8 free.
    """

    tokens: str | int = "256-4000"
    distance: str | int = "1-12"
    question: str = "after"
    turns: str = "one-prefill"
    format: str = "plain"
    answer: str = "primed"
    variant: str = "one"
    fillers: str = "own"
    data_dir: str | Path | None = None

    name = "retention"

    def __post_init__(self) -> None:
        one_of("question", self.question, ("after", "before"))
        one_of("turns", self.turns, ("one-prefill", "live"))
        one_of("format", self.format, ("plain", "chat"))
        one_of("answer", self.answer, ("primed", "free"))
        one_of("variant", self.variant, (*VARIANTS, "all"))
        one_of("fillers", self.fillers, SOURCES)
        lengths_of(self.tokens)
        lengths_of(self.distance, DISTANCES, 1, "distance")

    @property
    def metrics(self) -> tuple[Metric, ...]:  # type: ignore[override]
        found = [RECALLED, *([RANK] if self.answer == "primed" else [])]
        return (*found, *([STALE] if self.variant == "updated" else []))

    def about(self) -> dict[str, str | int | float | bool]:
        chosen = {name: getattr(self, name) for name in ("question", "turns", "format", "answer", "variant", "fillers")}
        return {
            "tokens": str(self.tokens),
            "distance": str(self.distance),
            **chosen,
            "facts": own_hash("retention/facts.json", "retention/fillers.json"),
            "turns_hash": hash_of(self.fillers, self.data_dir),
            "passages_hash": default_text().split()[1].sha256[:12],
        }

    def questions(self, lm: LM, limit: int, seed: int) -> list[Question]:
        check_limit(limit)
        tokenizer = lm.tokenizer
        if tokenizer is None:
            raise UserError("retention needs a tokenizer, and this model has none")
        form: Form = Chat(tokenizer) if self.format == "chat" else Plain()
        fillers = Fillers(tokenizer, form, turns_of(self.fillers, self.data_dir))
        longest = 1 + max(len(encode(tokenizer, f" {value}")) for value in all_values())
        write = longest if self.answer == "primed" else FREE
        check_lengths(lm, lengths_of(self.tokens), write)
        made = [self._sample(i, seed, fillers, form, write) for i in range(limit)]
        check_lengths(lm, [question.tokens for question in made], write)
        return made

    def _sample(self, i: int, seed: int, fillers: Fillers, form: Form, write: int) -> Question:
        draw = random.Random(f"{seed}/retention/{i}")
        distances = lengths_of(self.distance, DISTANCES, 1, "distance")
        tokens, turns, depth = cell(i, lengths_of(self.tokens), distances, DEPTHS)
        variant = VARIANTS[i % len(VARIANTS)] if self.variant == "all" else self.variant
        what = told(fillers.tokenizer, fact_of(i, seed), variant, draw)
        primed = self.answer == "primed"
        plan = Plan(tokens, turns, depth, self.question, self.turns == "live", primed, write)
        return talk(fillers, form, f"retention-{i:05d}", what, plan, draw)

    def judge(self, lm: LM, question: Question, reply: Reply) -> dict[str, float]:
        said, hit = lm.decode(reply.written), is_hit if self.answer == "primed" else answered
        found = {"recalled": float(hit(said, str(question.labels["value"])))}
        if self.answer == "primed":
            found["rank"] = rank(reply)
        if self.variant == "updated":
            found["stale"] = float(hit(said, str(question.labels["old"])))
        return found
