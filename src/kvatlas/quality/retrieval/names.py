"""Names and numbers that are drawn."""

from __future__ import annotations

import random
from itertools import product

from kvatlas.quality.primed import TEN
from kvatlas.quality.retention.facts import own

WORDS = "retrieval/words.json"


def names(n: int, draw: random.Random, joint: str = "-") -> list[str]:
    """``n`` different names of an adjective and a noun; with a number where there are not as many without."""
    found = own(WORDS)
    pairs = [joint.join(pair) for pair in product(found["adjectives"], found["nouns"])]
    rounds = -(-n // len(pairs))
    return [
        _numbered(pairs[k % len(pairs)], k // len(pairs), joint) for k in draw.sample(range(rounds * len(pairs)), n)
    ]


def _numbered(name: str, number: int, joint: str) -> str:
    return f"{name}{joint}{number}" if number else name


def numbers(n: int, digits: int, draw: random.Random) -> list[str]:
    """``n`` numbers of as many digits, the first ten of which begin with different ones."""
    rest = digits - 1
    firsts = [*draw.sample(range(10), TEN), *(draw.randrange(10) for _ in range(n - TEN))]
    return [f"{first}{draw.randrange(10**rest):0{rest}}" for first in firsts[:n]]
