"""Lists of keys and values, of which one is asked for: key-value pairs, and LongEval's lines."""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from kvatlas.errors import UserError
from kvatlas.quality.grid import lengths_of
from kvatlas.quality.primed import encode, one_of, ten_apart
from kvatlas.quality.retention.facts import own_hash
from kvatlas.quality.retrieval.names import WORDS, names, numbers
from kvatlas.quality.retrieval.task import Hidden, RetrievalTask, room

LEAST = 6
"""Tokens of an entry, at the least."""

SPARE = 256
"""Values beyond those of the list, from which ten are filled up whose first tokens differ."""


@dataclass(frozen=True)
class ListTask(RetrievalTask):
    """A list of keys and values; see the tasks. ``items``: how many; None: as many as ``tokens`` hold."""

    tokens: str | int = "256-1000"
    items: str | int | None = None

    gap = ""
    intro: ClassVar[str]
    foot: ClassVar[str] = "\n"
    entry: ClassVar[str]
    joint: ClassVar[str] = "\n"
    start: ClassVar[str]
    ask: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items is not None:
            lengths_of(self.items, (), 2, "items")

    def about(self) -> dict[str, str | int | float | bool]:
        if self.items is None:
            return super().about()
        return {"items": str(self.items), "question": self.question}

    @abstractmethod
    def draw_keys(self, n: int, draw: random.Random) -> list[str]:
        """Different keys."""

    @abstractmethod
    def draw_values(self, n: int, draw: random.Random) -> list[str]:
        """Values."""

    def longest(self, tokenizer: Any) -> int:
        draw = random.Random("longest")
        return 2 + max(len(encode(tokenizer, value)) for value in self.draw_values(64, draw))

    def _lengths(self) -> list[int]:
        return super()._lengths() if self.items is None else lengths_of(self.items, (), 2, "items")

    def hide(self, tokenizer: Any, tokens: int, depth: float, draw: random.Random) -> Hidden:
        entries = self._entries(tokenizer, tokens, draw)
        n = len(entries)
        place = round(depth * (n - 1))
        key, value = entries[place]
        others = [other for _, other in entries[:place] + entries[place + 1 :]]
        start = self.start.format(key)
        spare = draw.sample(others, len(others)) + self.draw_values(SPARE, draw)
        ten = ten_apart(tokenizer, start, [value, *spare], self.name, self.gap)
        lines = [self.entry.format(*entry) for entry in entries]
        told_at = len(self.intro) + sum(len(line + self.joint) for line in lines[:place])
        context = self.intro + self.joint.join(lines) + self.foot
        return Hidden(context, told_at, self.ask.format(key), start, ten, {"items": n})

    def _entries(self, tokenizer: Any, tokens: int, draw: random.Random) -> list[tuple[str, str]]:
        """As many entries as ``tokens`` hold (or, where ``items`` are given, that many)."""
        if self.items is not None:
            return list(zip(self.draw_keys(tokens, draw), self.draw_values(tokens, draw)))
        asked = [self.ask] if self.question == "before" else []
        left = room(tokenizer, tokens, self.intro, self.foot, *asked)
        most = left // LEAST + 2
        drawn = zip(self.draw_keys(most, draw), self.draw_values(most, draw))
        found: list[tuple[str, str]] = []
        for entry in drawn:
            left -= len(encode(tokenizer, self.entry.format(*entry) + self.joint))
            if left < 0:
                break
            found.append(entry)
        if len(found) < 2:
            raise UserError(f"{tokens} tokens have no room for two entries of {self.name}; use more tokens")
        return found


@dataclass(frozen=True)
class KeyValueTask(ListTask):
    """Random keys and values in JSON's form, after "Lost in the Middle" (Liu et al. 2023).

    Attributes:
        keys: ``uuid`` (36 characters, as there) or ``hex`` (8 characters), for keys and values.

    SmolLM2-135M-Instruct (4-bit weights, float32), ``full``, seed 0, ``hex``: 8 of 12 retrieved
    up to 1,000 tokens (the first and the last pair always, those between in 2 of 9 up to 2,000), 1 of 4 at 2,000:
    the default ends at 1,000. ``uuid`` was not measured.
    """

    keys: str = "hex"

    name = "keyvalue"
    intro = "Find the value that belongs to a key in these JSON data.\n\n{\n"
    entry, joint, foot = '"{}": "{}"', ",\n", "\n}\n"
    start = '"{}": "'
    ask = "\nThe pair with the wanted key is:\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("keys", self.keys, ("uuid", "hex"))

    def about(self) -> dict[str, str | int | float | bool]:
        return {**super().about(), "keys": self.keys}

    def draw_keys(self, n: int, draw: random.Random) -> list[str]:
        return list(dict.fromkeys(self._one(draw) for _ in range(n)))

    def draw_values(self, n: int, draw: random.Random) -> list[str]:
        return [self._one(draw) for _ in range(n)]

    def _one(self, draw: random.Random) -> str:
        return str(UUID(int=draw.getrandbits(128), version=4)) if self.keys == "uuid" else f"{draw.getrandbits(32):08x}"


@dataclass(frozen=True)
class LinesTask(ListTask):
    """Lines such as ``line sunny-lighthouse: REGISTER_CONTENT is <02416>``, after LongEval (Li et al. 2023).

    SmolLM2-135M-Instruct (4-bit weights, float32), ``full``, seed 0: 3 of 16 retrieved, 4 each
    at 256, 512, 1,000 and 2,000 tokens. It is a task for larger models: with so few right answers a loss does not show.
    """

    name = "lines"
    intro = "Here is a record of lines. Each line has a name and, at its end, a number. Remember all of them.\n\n"
    entry, start = "line {}: REGISTER_CONTENT is <{}>", "line {}: REGISTER_CONTENT is <"
    ask = "\nTell me the number in line {}.\n"

    def about(self) -> dict[str, str | int | float | bool]:
        return {**super().about(), "words": own_hash(WORDS)}

    def draw_keys(self, n: int, draw: random.Random) -> list[str]:
        return names(n, draw)

    def draw_values(self, n: int, draw: random.Random) -> list[str]:
        return numbers(n, 5, draw)
