"""What is told: facts of several kinds, and the values that are drawn for them."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from functools import cache as once
from importlib import resources
from typing import Any

from kvatlas.quality.grid import in_turn


@dataclass(frozen=True, slots=True)
class Fact:
    """One checkable fact: ``tell`` has a place for the value, which is how the answer goes on after ``prime``."""

    kind: str
    tell: str
    reply: str
    ask: str
    prime: str


def own(name: str) -> Any:
    """One of the package's files of sentences, read."""
    return json.loads(_text(name))


@once
def _text(name: str) -> str:
    return resources.files("kvatlas.quality").joinpath(name).read_text(encoding="utf-8")


def own_hash(*names: str) -> str:
    """What the named files hold, in 12 hex digits."""
    return hashlib.sha256("".join(map(_text, names)).encode()).hexdigest()[:12]


@once
def kinds() -> dict[str, tuple[Fact, ...]]:
    """All facts by kind."""
    found = own("retention/facts.json")["kinds"]
    return {kind: tuple(Fact(kind, **fact) for fact in about["facts"]) for kind, about in found.items()}


def fact_of(i: int, seed: int) -> Fact:
    """Sample ``i``'s fact: kinds take turns, and within a kind its facts do."""
    kind = in_turn(i, sorted(kinds()), f"{seed}/kinds")
    return in_turn(i // len(kinds()), kinds()[kind], f"{seed}/facts/{kind}")


def values_of(kind: str, draw: random.Random) -> list[str]:
    """Values for a kind in a drawn order: its words, or numbers that all begin with different digits."""
    about = own("retention/facts.json")["kinds"][kind]
    if "values" in about:
        return draw.sample(about["values"], len(about["values"]))
    rest = about["digits"] - 1
    return [f"{first}{draw.randrange(10**rest):0{rest}}" for first in draw.sample(range(10), 10)]


def all_values() -> list[str]:
    """Every value that can be drawn, a number standing for all of its length."""
    found = own("retention/facts.json")["kinds"].values()
    return [value for about in found for value in about.get("values", ["4" * about.get("digits", 0)])]
