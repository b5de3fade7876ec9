"""Texts in tokens: a text cut where its parts meet, and the first tokens by which ten answers differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from kvatlas.errors import UserError, nearest
from kvatlas.quality.question import Reply

TEN = 10


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Token ids of a text, with the tokenizer's start token only where ``special``."""
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def pieces(tokenizer: Any, texts: Sequence[str], special: bool = True) -> list[tuple[int, ...]]:
    """The tokens of the joined texts, cut where the texts meet.

    A token that reaches over such a place belongs to the later text.
    """
    heads = list(accumulate(texts))
    whole = encode(tokenizer, heads[-1], special)
    cuts = [0, *(_shared(encode(tokenizer, head, special), whole) for head in heads[:-1]), len(whole)]
    return [tuple(whole[start:end]) for start, end in pairwise(cuts)]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class Lead:
    """The tokens that lead to an answer, up to where possible answers differ, and the token that each goes on with."""

    tokens: tuple[int, ...]
    next: tuple[int, ...]


def lead(tokenizer: Any, tokens: Sequence[int], text: str, answers: Sequence[str], gap: str = " ") -> Lead:
    """The lead to ``answers``, for text in ``tokens`` that ends with ``text``; ``gap`` stands before an answer.

    What all answers have in common (some tokenizers make a token of the space before a number) is part of the lead.
    """
    start = encode(tokenizer, text)
    rows = [encode(tokenizer, f"{text}{gap}{answer}") for answer in answers]
    common = min(_shared(rows[0], row) for row in rows[1:])
    kept = min(_shared(start, rows[0]), common)
    head = tokens[: len(tokens) - len(start) + kept]
    return Lead((*head, *rows[0][kept:common]), tuple(row[common] for row in rows))


def ten_apart(tokenizer: Any, text: str, answers: Iterable[str], what: str, gap: str = " ") -> list[str]:
    """The first of ``answers``, and nine that follow, whose first tokens after ``text`` are pairwise different.

    Raises UserError where there are not ten.
    """
    found: dict[int, str] = {}
    rows = {answer: encode(tokenizer, f"{text}{gap}{answer}") for answer in answers}
    common = min(_shared(next(iter(rows.values())), row) for row in list(rows.values())[1:])
    for answer, row in rows.items():
        found.setdefault(row[common], answer)
        if len(found) == TEN:
            return list(found.values())
    raise UserError(f"this tokenizer tells only {len(found)} of the values of '{what}' apart by their first token; "
                    f"a rank among {TEN} needs {TEN}")  # fmt: skip


def rank(reply: Reply) -> float:
    """Where the first candidate stands among all by log-probability: 1 if it is the most likely, last if it is NaN."""
    return 1.0 + sum(not other < reply.candidates[0] for other in reply.candidates[1:])


def answered(said: str, value: str) -> bool:
    """Whether a free answer holds the value's words one after the other, whatever their case."""
    expected, words = re.findall(r"\w+", value.casefold()), re.findall(r"\w+", said.casefold())
    return any(words[i : i + len(expected)] == expected for i in range(len(words)))


def one_of(what: str, given: str, allowed: Sequence[str]) -> str:
    """``given``, or a UserError that names the nearest of what is allowed."""
    if given not in allowed:
        raise UserError(f"unknown {what} '{given}'; {nearest(str(given), allowed)}")
    return given
