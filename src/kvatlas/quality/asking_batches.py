"""Which questions go through the model together, and how many strategies' caches are held at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.model.facts import check_prompt
from kvatlas.quality.question import Question

FORKED_BYTES = 1 << 30
"""What one strategy's cache of a batch may hold if it keeps everything, once it is repeated for the choices."""

ROWS = 64
"""Sequences in one step: more of them would not be cheaper each."""


def check_questions(lm: LM, questions: Sequence[Question]) -> None:
    """Raise UserError where a question leaves nothing to compress or to score, or does not fit the positions."""
    for q in questions:
        if len(q.context) < 2:
            raise UserError(f"question '{q.name}': a context needs 2 tokens or more; its last goes in singly")
        if not all(q.live):
            raise UserError(f"question '{q.name}': a live turn needs 1 token or more")
        if any(choice.unscored >= len(choice.tokens) for choice in q.choices):
            raise UserError(f"question '{q.name}': a choice needs 1 scored token or more")
        try:
            check_prompt(lm.facts, q.tokens, longest(q))
        except UserError as error:
            raise UserError(f"question '{q.name}': {error}") from None


def prefilled(q: Question) -> tuple[int, ...]:
    """What is prefilled before the compression."""
    return q.context if q.live else q.context[:-1]


def turns(q: Question) -> list[tuple[int, ...]]:
    """The runs that are appended to what the compression left; the last token goes in singly."""
    runs = [*q.live[:-1], q.live[-1][:-1]] if q.live else []
    return [run for run in runs if run]


def fed(q: Question) -> tuple[int, ...]:
    """The tokens that go in singly before anything is scored."""
    return ((q.live or (q.context,))[-1][-1], *q.after)


def longest(q: Question) -> int:
    """The most tokens that are scored or written after `fed`."""
    return max(q.write, max((len(choice.tokens) for choice in q.choices), default=0))


def forks(q: Question) -> int:
    """Sequences that go on from the question: one a choice of more than one token, and one that writes."""
    return max(1, sum(len(choice.tokens) > 1 for choice in q.choices) + (q.write > 1))


def reserve_for(questions: Sequence[Question]) -> int:
    """Tokens to come after the prefill."""
    return max(sum(map(len, q.live)) for q in questions) + steps_of(questions)


def batches(lm: LM, questions: Sequence[Question]) -> list[list[int]]:
    """Numbers of the questions that go together. Depends on the questions and the model's shape alone.

    They are of about one length. Those with choices are fed the same number of tokens, so that all fork at one step.
    """
    order = sorted(range(len(questions)), key=lambda i: (*_kind(questions[i]), *_size(questions[i]), i))
    found: list[list[int]] = []
    for i in order:
        together = [questions[j] for j in (*found[-1], i)] if found else []
        if together and _kind(together[0]) == _kind(together[-1]) and _fits(lm, together):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _kind(q: Question) -> tuple[int, bool]:
    """Where choices are scored, all must come to them at one step; what is only written may begin when it will."""
    forked = any(len(choice.tokens) > 1 for choice in q.choices)
    return (len(fed(q)) if forked else 0), bool(q.live)


def _size(q: Question) -> tuple[int, int, int]:
    """Lengths that differ by less than a quarter count as the same: then the choices' lengths matter more."""
    band = 0
    while 32 * 1.25**band < q.tokens:
        band += 1
    return band, longest(q), q.tokens


def _fits(lm: LM, questions: Sequence[Question]) -> bool:
    """Whether these may share a batch: its memory, its rows, and the positions of those that wait for the longest."""
    tokens, more, limit = max(q.tokens for q in questions), steps_of(questions), lm.facts.max_positions
    rows = sum(map(forks, questions))
    fits = rows * (tokens + more) * token_bytes(lm) <= FORKED_BYTES and rows <= ROWS
    return fits and (limit is None or tokens + more <= limit)


def steps_of(questions: Sequence[Question]) -> int:
    """Tokens that every sequence of a batch may have to take after its prefill: it waits for the longest."""
    return max(len(fed(q)) + longest(q) for q in questions)


def token_bytes(lm: LM) -> int:
    """Bytes of a token's keys and values in all layers."""
    shape = lm.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize


def rows_forked(lm: LM, questions: Sequence[Question]) -> int:
    """How many sequences of this batch's length may go on at once."""
    length = max(q.tokens for q in questions) + max(map(longest, questions))
    return max(1, min(ROWS, FORKED_BYTES // (length * token_bytes(lm))))
