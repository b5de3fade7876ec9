"""First topic of a long chat, after LongEval."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from kvatlas.quality.passages import words
from kvatlas.quality.primed import encode, ten_apart
from kvatlas.quality.retention.facts import own, own_hash
from kvatlas.quality.retention.fillers import Fillers
from kvatlas.quality.retention.form import Plain, Turn
from kvatlas.quality.retrieval.task import Hidden, RetrievalTask, room

FILE, EACH = "retention/fillers.json", 500
ASK, LEAD = (
    "User: What is the first topic that we discussed?\n",
    "Assistant: The first topic that we discussed is the topic of",
)


@dataclass(frozen=True)
class TopicsTask(RetrievalTask):
    """A chat about several topics, each of about 500 tokens; the first one is asked for, after LongEval (2023).

    The fact lies always at the start, so that there is no depth to spread over. The other topics are among the ten
    that the first one's rank is taken from.

    SmolLM2-135M-Instruct (4-bit weights, float32), ``full``, seed 0: 4 of 4 retrieved at 256
    tokens, 2 of 4 at 512, 0 of 8 at 1,000 and 2,000, where it names a later topic: the default ends at 512.
    """

    tokens: str | int = "256-512"

    name = "topics"
    depths = (0.0,)

    def about(self) -> dict[str, str | int | float | bool]:
        return {**super().about(), "topics": own_hash(FILE)}

    def longest(self, tokenizer: Any) -> int:
        return max(len(encode(tokenizer, f" {topic}")) for topic in own(FILE)["themes"])

    def hide(self, tokenizer: Any, tokens: int, depth: float, draw: random.Random) -> Hidden:
        themes = own(FILE)["themes"]
        fillers = Fillers(tokenizer, Plain(), [])
        left = room(tokenizer, tokens, *([ASK] if self.question == "before" else []))
        drawn = ten_apart(tokenizer, LEAD, draw.sample(sorted(themes), len(themes)), "topics")
        rest = [topic for topic in draw.sample(sorted(themes), len(themes)) if topic not in drawn]
        count = min(len(themes), max(2, tokens // EACH))
        told, turns = [*drawn, *rest][:count], list[Turn]()
        for i, topic in enumerate(told):
            share = (left - fillers.tokens(*turns)) // (count - i)
            turns += fillers.about(topic, [Turn(*turn) for turn in themes[topic]], share, draw, words(*drawn))
        return Hidden(Plain().context(turns), 0, ASK, LEAD, drawn, {"items": count})
