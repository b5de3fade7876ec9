"""What is said in between: turns of many lengths, and passages of a text that users paste into theirs."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.errors import UserError
from kvatlas.quality.passages import Passages, words
from kvatlas.quality.primed import encode, one_of
from kvatlas.quality.retention.facts import own
from kvatlas.quality.retention.form import Form, Turn
from kvatlas.workload.text import Text, default_text

SOURCES = ("own", "mtbench101", "sgd")
FILES = {"mtbench101": "mt_bench_101/mtbench101.jsonl", "sgd": "sgd_dialogues/test_dialogues_011.json"}
PASTE, LEAST_PASTE = 800, 24
"""Tokens of a pasted passage, about; fewer than the least are not worth one."""


def own_turns() -> list[Turn]:
    """The turns that the project wrote itself."""
    found = own("retention/fillers.json")
    groups = [*found["themes"].values(), found["short"], own("turns.json")["turns"]]
    return [Turn(*turn) for group in groups for turn in group]


def data_file(source: str, data_dir: str | Path | None) -> Path:
    """Where real dialogues lie. Raises UserError where they do not."""
    if data_dir is None:
        raise UserError(f"fillers={source} are read from a data folder; say where it is (data_dir, --data-dir)")
    path = Path(data_dir).expanduser() / FILES[source]
    if not path.is_file():
        raise UserError(f"no file {path} for fillers={source}; use another data folder, or fillers=own")
    return path


def turns_of(source: str, data_dir: str | Path | None) -> list[Turn]:
    """All turns of a source: ``own``, ``mtbench101`` or ``sgd``.

    Raises UserError for another source, a file that is missing or not as it should be (which file, which line).
    """
    if one_of("fillers", source, SOURCES) == "own":
        return own_turns()
    path = data_file(source, data_dir)
    read = _mtbench101 if source == "mtbench101" else _sgd
    turns = [Turn(" ".join(said.split()), " ".join(answered.split())) for said, answered in read(path)]
    return list(dict.fromkeys(turn for turn in turns if turn.said and turn.answered))


def hash_of(source: str, data_dir: str | Path | None) -> str:
    """What a source holds, in 12 hex digits."""
    return hashlib.sha256(json.dumps(turns_of(source, data_dir)).encode()).hexdigest()[:12]


def _mtbench101(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield from [(turn["user"], turn["bot"]) for turn in json.loads(line)["history"]]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}, line {number}: a record with 'history' of 'user' and 'bot' was expected"
            ) from None


def _sgd(path: Path) -> Iterator[tuple[str, str]]:
    try:
        for dialogue in json.loads(path.read_text(encoding="utf-8")):
            said = [turn["utterance"] for turn in dialogue["turns"]]
            yield from zip(said[::2], said[1::2])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: dialogues with 'turns' of 'utterance' were expected") from None


@dataclass(frozen=True, slots=True)
class Filler:
    """A turn, its tokens when written down, and its words."""

    turn: Turn
    tokens: int
    words: frozenset[str]


class Fillers:
    """Turns and passages to fill a conversation with, for one tokenizer and form."""

    def __init__(self, tokenizer: Any, form: Form, turns: Sequence[Turn], text: Text | None = None) -> None:
        self.tokenizer, self.form = tokenizer, form
        self.turns = [Filler(turn, self.tokens(turn), words(*turn)) for turn in turns]
        self.passages = Passages(tokenizer, text or default_text().split()[1])

    def tokens(self, *turns: Turn) -> int:
        """Tokens that turns take in a conversation that goes on."""
        first = Turn("Hello.", "Hi.")
        head = self.form.context([first])
        return len(encode(self.tokenizer, self.form.context([first, *turns])[len(head) :]))

    def fill(self, count: int, tokens: int, draw: random.Random, forbidden: frozenset[str]) -> list[Turn]:
        """``count`` turns that together take about ``tokens``, none with a forbidden word in it.

        Turns that fit are drawn; what is then left to fill is pasted into some of them, as passages of a text.
        Raises UserError where so many turns do not fit.
        """
        left = [filler for filler in self.turns if not filler.words & forbidden]
        chosen: list[Filler] = []
        for i in range(count):
            target = (tokens - sum(f.tokens for f in chosen)) / (count - i)
            one = draw.choice(_near(left, target))
            chosen.append(one)
            left = [filler for filler in left if filler is not one] or list(self.turns)
        draw.shuffle(chosen)
        missing = tokens - sum(f.tokens for f in chosen)
        if missing < -max(16, tokens // 4):
            raise UserError(f"{count} turns do not fit into {tokens} tokens; use fewer turns (distance) or more tokens")
        turns = [filler.turn for filler in chosen]
        if count and missing >= LEAST_PASTE:
            self._paste(turns, missing, draw, forbidden)
        return turns

    def about(
        self, topic: str, turns: Sequence[Turn], tokens: int, draw: random.Random, forbidden: frozenset[str]
    ) -> list[Turn]:
        """A talk about one topic, of about ``tokens``: it is named first, then come its turns, as many as fit."""
        talk = [Turn(f"I would like to discuss the topic of {topic}.", "Gladly. What would you like to know?")]
        for turn in turns:
            if self.tokens(*talk, turn) <= tokens:
                talk.append(turn)
        missing = tokens - self.tokens(*talk)
        if missing >= LEAST_PASTE and len(talk) > 1:
            rest = talk[1:]
            self._paste(rest, missing, draw, forbidden)
            talk[1:] = rest
        return talk

    def _paste(self, turns: list[Turn], tokens: int, draw: random.Random, forbidden: frozenset[str]) -> None:
        places = draw.sample(range(len(turns)), min(len(turns), -(-tokens // PASTE)))
        for done, place in enumerate(places):
            size = tokens // (len(places) - done)
            before = self.tokens(turns[place])
            intro = draw.choice(own("retention/fillers.json")["pastes"])
            around = len(encode(self.tokenizer, f"{intro} ... Now something else."))
            passage = self.passages.draw(max(4, size - around), draw, forbidden)
            said = f"{intro} {passage} ... Now something else. {turns[place].said}"
            turns[place] = Turn(said, turns[place].answered)
            tokens -= self.tokens(turns[place]) - before


def _near(fillers: Sequence[Filler], target: float) -> Sequence[Filler]:
    """Fillers of about the wanted size: at most that, and half of it or more; else the nearest ones."""
    by_size = sorted(fillers, key=lambda filler: filler.tokens)
    fitting = [filler for filler in by_size if filler.tokens <= target]
    return [filler for filler in fitting if filler.tokens >= target / 2] or fitting[-40:] or by_size[:4]
