"""What the retrieval tasks share: one item hidden at some depth of a long context, and asked for."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.quality.grid import cell, check_lengths, check_limit, lengths_of, token_bin
from kvatlas.quality.primed import encode, lead, one_of, pieces, rank
from kvatlas.quality.question import Label, Question, Reply
from kvatlas.quality.recall import is_hit
from kvatlas.quality.task import Metric, QuestionTask

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Hidden:
    """A context with an item in it.

    Attributes:
        context: ends with a line break.
        told_at: the character where the item begins.
        ask: the question, up to the line of the answer.
        lead: how that line begins.
        values: ten, the first of which is how it goes on; their first tokens differ.
        labels: what the sample is broken down by, besides depth and tokens.
    """

    context: str
    told_at: int
    ask: str
    lead: str
    values: Sequence[str]
    labels: Mapping[str, Label] = field(default_factory=dict)


@dataclass(frozen=True)
class RetrievalTask(QuestionTask):
    """One item of a long context is asked for, with its answer primed.

    Samples are spread evenly over context lengths and depths (0, 25, 50, 75, 100 % of the context). A sample depends on
    its number and the seed alone. Metrics: ``retrieved``: the greedy answer begins with the value; ``rank``: where the
    value stands among ten, by the log-probability of the first token in which they differ.

    Attributes:
        tokens: of the context, such as ``"256-4000"``, ``"512,2000"`` or ``1000``.
        question: ``after``: it is read through the compressed cache. ``before``: it stands at the end of what is
            compressed, and only the start of the answer is read afterwards.
    """

    tokens: str | int = "256-2000"
    question: str = "after"

    gap: ClassVar[str] = " "
    depths: ClassVar[tuple[float, ...]] = DEPTHS
    metrics = (Metric("retrieved"), Metric("rank", "value", "of 10", higher_is_better=False))

    def __post_init__(self) -> None:
        one_of("question", self.question, ("after", "before"))
        lengths_of(self.tokens)

    def about(self) -> dict[str, str | int | float | bool]:
        return {"tokens": str(self.tokens), "question": self.question}

    @abstractmethod
    def hide(self, tokenizer: Any, tokens: int, depth: float, draw: random.Random) -> Hidden:
        """An item in a context of about ``tokens`` tokens. Raises UserError where it does not fit."""

    @abstractmethod
    def longest(self, tokenizer: Any) -> int:
        """Tokens of the longest value."""

    def questions(self, lm: LM, limit: int, seed: int) -> list[Question]:
        check_limit(limit)
        if lm.tokenizer is None:
            raise UserError(f"{self.name} needs a tokenizer, and this model has none")
        write = 1 + self.longest(lm.tokenizer)
        check_lengths(lm, self._lengths(), write)
        made = [self._sample(lm.tokenizer, i, seed, write) for i in range(limit)]
        check_lengths(lm, [question.tokens for question in made], write)
        return made

    def _lengths(self) -> list[int]:
        return lengths_of(self.tokens)

    def _sample(self, tokenizer: Any, i: int, seed: int, write: int) -> Question:
        draw = random.Random(f"{seed}/{self.name}/{i}")
        tokens, depth, _ = cell(i, self._lengths(), self.depths, ("",))
        hidden = self.hide(tokenizer, tokens, depth, draw)
        early = self.question == "before"
        texts = [hidden.context + hidden.ask, hidden.lead] if early else [hidden.context, hidden.ask + hidden.lead]
        context, after = pieces(tokenizer, texts)
        led = lead(tokenizer, after, hidden.lead, hidden.values, self.gap)
        labels: dict[str, Label] = {
            "tokens": token_bin(len(context)),
            "depth": f"{round(100 * depth)}%",
            **hidden.labels,
            "context_tokens": len(context),
            "told_at": len(encode(tokenizer, hidden.context[: hidden.told_at])),
            "value": hidden.values[0],
        }
        return Question(f"{self.name}-{i:05d}", context, (), led.tokens, (), led.next, write, labels)

    def judge(self, lm: LM, question: Question, reply: Reply) -> dict[str, float]:
        said = lm.decode(reply.written)
        return {"retrieved": float(is_hit(said, str(question.labels["value"]))), "rank": rank(reply)}


def room(tokenizer: Any, tokens: int, *texts: str) -> int:
    """Tokens that are left beside ``texts``. Raises UserError where there are none."""
    taken = sum(len(encode(tokenizer, text)) for text in texts)
    if taken >= tokens:
        raise UserError(f"the item and what belongs to it take {taken} tokens, and the context is to have {tokens}")
    return tokens - taken
