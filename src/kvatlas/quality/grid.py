"""How generated samples are spread: evenly over lengths, distances and depths, each sample by its number alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

LENGTHS = (256, 512, 1000, 1500, 2000, 3000, 4000, 6000, 7500, 12000, 16000, 24000, 32000, 64000, 128000)
"""Context lengths in tokens: few, so that samples of the same length form batches."""


def lengths_of(tokens: str | int, steps: Sequence[int] = LENGTHS, least: int = 64, what: str = "tokens") -> list[int]:
    """What ``"256-4000"`` (those of ``steps`` in the range, and its ends), ``"512,2000"`` or ``1000`` ask for, sorted.

    Raises UserError for anything else, a range without numbers in it, or less than ``least``.
    """
    text = str(tokens).replace(" ", "")
    try:
        if "-" in text:
            low, high = (int(part) for part in text.split("-"))
            found = [low, *(n for n in steps if low < n < high), high] if low <= high else []
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found:
        raise UserError(f"{what} must be a number, a list such as 512,2000 or a range such as 256-4000, not '{tokens}'")
    if min(found) < least:
        raise UserError(f"{what} must be {least} or more, not {min(found)}")
    return sorted(set(found))


def token_bin(tokens: int) -> str:
    """The bin of a context's length, of 1,024 tokens to a K: ``up to 1K``, ``1-2K``, ``2-4K``, ``4-8K``, and so on."""
    if tokens <= 1024:
        return "up to 1K"
    high = 2 ** math.ceil(math.log2(tokens / 1024))
    return f"{high // 2}-{high}K"


def cell(i: int, first: Sequence[A], second: Sequence[B], third: Sequence[C]) -> tuple[A, B, C]:
    """Sample ``i``'s place in the grid of three axes.

    Each ``len(first)`` samples in a row have every value of the first axis once, and all combinations of the first two
    come equally often; the third axis moves on with every round of the first.
    """
    a, b, c = len(first), len(second), len(third)
    round_of = i // a
    return first[i % a], second[(i + i // math.lcm(a, b)) % b], third[(round_of + round_of // c) % c]


def in_turn(i: int, items: Sequence[A], name: str) -> A:
    """Sample ``i``'s item: all come once before one comes again, in an order drawn from ``name``."""
    round_of, place = divmod(i, len(items))
    return random.Random(f"{name}/{round_of}").sample(items, len(items))[place]


def check_limit(limit: int) -> None:
    """Raise UserError for fewer than 1 sample."""
    if limit < 1:
        raise UserError(f"the limit must be 1 sample or more, not {limit}")


def check_lengths(lm: LM, lengths: Sequence[int], write: int) -> None:
    """Raise UserError where a context and its answer pass the model's positions."""
    positions, need = lm.facts.max_positions, max(lengths) + write
    if positions is not None and need > positions:
        raise UserError(f"a context with its answer takes {need} tokens, and the model has {positions} positions; "
                        "use fewer (tokens)")  # fmt: skip
