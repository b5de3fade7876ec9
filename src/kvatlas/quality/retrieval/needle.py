"""Needle in a haystack: one sentence with a number, in a real text."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvatlas.quality.passages import Passages
from kvatlas.quality.primed import TEN, encode, ten_apart
from kvatlas.quality.retention.facts import own_hash
from kvatlas.quality.retrieval.hay import MANUAL, hay
from kvatlas.quality.retrieval.names import WORDS, names, numbers
from kvatlas.quality.retrieval.task import Hidden, RetrievalTask, room

DIGITS = 4
NEEDLE, ASK = "The secret code of the {} is {}.", "\nQuestion: What is the secret code of the {}?\n"
LEAD = "Answer: The secret code of the {} is"


@dataclass(frozen=True)
class NeedleTask(RetrievalTask):
    """A sentence such as ``The secret code of the sunny lighthouse is 4821.`` between sentences of a real text.

    Attributes:
        text: what it is hidden in: ``manual`` (Python's), ``moby-dick`` (from ``data_dir``), or a text file.

    SmolLM2-135M-Instruct (4-bit weights, float32), ``full``, seed 0: 16 of 16 retrieved, 4 each
    at 256, 512, 1,000 and 2,000 tokens.
    """

    text: str | Path = MANUAL
    data_dir: str | Path | None = None

    name = "needle"

    def about(self) -> dict[str, str | int | float | bool]:
        text = self._hay
        return {**super().about(), "text": text.name, "text_hash": text.sha256[:12], "words": own_hash(WORDS)}

    @cached_property
    def _hay(self) -> Any:
        return hay(self.text, self.data_dir)

    def longest(self, tokenizer: Any) -> int:
        return len(encode(tokenizer, " " + "4" * DIGITS))

    def hide(self, tokenizer: Any, tokens: int, depth: float, draw: random.Random) -> Hidden:
        (where,) = names(1, draw, " ")
        ask, start = ASK.format(where), LEAD.format(where)
        values = ten_apart(tokenizer, start, numbers(TEN, DIGITS, draw), "codes")
        needle = NEEDLE.format(where, values[0])
        left = room(tokenizer, tokens, needle, *([ask] if self.question == "before" else []))
        straw = Passages(tokenizer, self._hay).draw(left, draw, where.split())
        ends = [0, *(match.end() for match in re.finditer(r"[.!?] ", straw)), len(straw)]
        place = min(ends, key=lambda end: abs(end - depth * len(straw)))
        head, tail = straw[:place].rstrip(), straw[place:]
        told_at = len(head) + bool(head)
        return Hidden(" ".join(filter(None, (head, needle, tail))) + "\n", told_at, ask, start, values)
