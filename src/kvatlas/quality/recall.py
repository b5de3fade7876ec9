"""Whether a fact told early in a conversation is still there after the compression."""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache as once
from importlib import resources
from typing import Any

import torch

from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.measure.record import Figure
from kvatlas.model.facts import check_prompt
from kvatlas.quality.reading import Fractions, Progress, compressed, part_of, rows_at_once, steps

CONVERSATIONS, TOKENS = 24, 400


@dataclass(frozen=True, slots=True)
class Conversation:
    """A told fact, other turns, the question and the start of its answer; ``value`` is how the answer goes on.

    ``ids`` are the tokens of it all, the last ``question`` of them of the question and the answer's start.
    """

    ids: tuple[int, ...]
    question: int
    asked: str
    value: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out of one conversation."""

    asked: str
    told: str
    said: str
    hit: bool


@dataclass(slots=True)
class Recall:
    """Answers of all conversations under one strategy, and the realised fractions while it read and wrote."""

    answers: list[Answer] = field(default_factory=list)
    fractions: Fractions = field(default_factory=Fractions)

    @property
    def hits(self) -> int:
        """Facts recalled."""
        return sum(answer.hit for answer in self.answers)

    def figure(self) -> Figure:
        """Share of facts recalled, of n conversations."""
        return Figure.proportion(self.hits, len(self.answers))


@once
def material() -> dict[str, Any]:
    """``facts``: tell, reply, ask, prime, values; ``turns``: what is said and answered in between."""
    return json.loads(resources.files("kvatlas.quality").joinpath("turns.json").read_text(encoding="utf-8"))


def conversations(tokenizer: Any, n: int = CONVERSATIONS, tokens: int = TOKENS, seed: int = 0) -> list[Conversation]:
    """`n` conversations of about `tokens` tokens before the question: whole turns until there are as many.

    Kinds of facts take turns, in an order and with values drawn from `seed`; no value of a kind comes twice before all
    have. The turns in between are drawn without replacement, again from the start when they run out.

    Raises UserError for fewer than 1 conversation or fewer than 1 token.
    """
    if n < 1 or tokens < 1:
        raise UserError(f"recall needs 1 or more conversations and tokens, not {n} of {tokens}")
    draw = random.Random(seed)
    return [_conversation(tokenizer, fact, value, tokens, draw) for fact, value in _facts(n, draw)]


def _facts(n: int, draw: random.Random) -> list[tuple[dict[str, Any], str]]:
    facts = material()["facts"]
    values = {fact["ask"]: draw.sample(fact["values"], len(fact["values"])) for fact in facts}
    order = [fact for _ in range(-(-n // len(facts))) for fact in draw.sample(facts, len(facts))][:n]
    used: dict[str, int] = {}
    drawn = []
    for fact in order:
        kind = fact["ask"]
        used[kind] = used.get(kind, -1) + 1
        drawn.append((fact, values[kind][used[kind] % len(values[kind])]))
    return drawn


def _conversation(tokenizer: Any, fact: dict[str, Any], value: str, tokens: int, draw: random.Random) -> Conversation:
    told = _turn(fact["tell"].format(value), fact["reply"])
    others: list[tuple[str, str]] = []
    before = told
    while len(tokenizer(before)["input_ids"]) < tokens:
        others = others or draw.sample(material()["turns"], len(material()["turns"]))
        before += _turn(*others.pop())
    ids = tokenizer(before + f"User: {fact['ask']}\nAssistant: {fact['prime']}")["input_ids"]
    return Conversation(tuple(ids), len(ids) - len(tokenizer(before)["input_ids"]), fact["ask"], value)


def _turn(said: str, answered: str) -> str:
    return f"User: {said}\nAssistant: {answered}\n"


def recall(
    lm: LM,
    specs: Sequence[str],
    n: int = CONVERSATIONS,
    tokens: int = TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Recall]:
    """Ask for told facts after each strategy's compression; see `conversations` for `n`, `tokens` and `seed`.

    What comes before the question is prefilled without its last token, and compressed. The rest goes through the cache
    token by token, and then the greedy answer. All conversations are fed the same number of tokens, so that no padding
    enters the cache: the one with the longest question its last token before the question, others a few more.

    Raises:
        UserError: a model without a tokenizer, no conversations, longer ones than the model's positions.
    """
    if lm.tokenizer is None:
        raise UserError("recall needs a tokenizer, and this model has none")
    talks = conversations(lm.tokenizer, n, tokens, seed)
    order = list(dict.fromkeys(specs))
    found = {spec: Recall() for spec in order}
    size = rows_at_once(lm, len(order), max(len(talk.ids) for talk in talks))
    # one token more than the longest value shows whether the word ends there
    fed, length = 1 + max(talk.question for talk in talks), 1 + longest_value(lm.tokenizer, talks)
    check_prompt(lm.facts, max(len(talk.ids) for talk in talks), length)
    for start in range(0, len(talks), size):
        part = talks[start : start + size]
        _ask(lm, found, part, fed, length, part_of(progress, start / len(talks), len(part) / len(talks)))
    return found


def _ask(
    lm: LM, found: dict[str, Recall], talks: Sequence[Conversation], fed: int, length: int, progress: Progress
) -> None:
    """One batch of conversations under every strategy: the last ``fed`` tokens go in singly, ``length`` come out."""
    after = torch.tensor([talk.ids[-fed:] for talk in talks], device=lm.facts.device)
    progress("prefill", 0.0)
    for number, (spec, cache) in enumerate(compressed(lm, list(found), [t.ids[:-fed] for t in talks], fed + length)):
        said = answers(lm, cache, after, length, found[spec].fractions)
        found[spec].answers += [Answer(t.asked, t.value, s, is_hit(s, t.value)) for t, s in zip(talks, said)]
        progress(spec, (number + 1) / len(found))


def longest_value(tokenizer: Any, talks: Sequence[Conversation]) -> int:
    """Tokens of the longest told value."""
    return max(len(tokenizer(" " + talk.value, add_special_tokens=False)["input_ids"]) for talk in talks)


def answers(lm: LM, cache: KVCache, after: torch.Tensor, length: int, fractions: Fractions) -> list[str]:
    """Feed ``after [B, n]``, then write ``length`` greedy tokens; the text of each row up to a stop token."""
    logits = deque(steps(lm, cache, after, fractions), maxlen=1).pop()
    written = [logits.argmax(-1)]
    for _ in range(length - 1):
        written.append(lm.step(cache, written[-1]).argmax(-1))
    stops = set(lm.stop_ids())
    said = []
    for row in torch.stack(written, 1).tolist():
        end = next((i for i, token in enumerate(row) if token in stops), len(row))
        said.append(lm.decode(row[:end]))
    return said


def is_hit(said: str, value: str) -> bool:
    """Whether the answer's first words are the value's: the same letters and digits, whatever their case."""
    expected = re.findall(r"\w+", value.casefold())
    return re.findall(r"\w+", said.casefold())[: len(expected)] == expected
