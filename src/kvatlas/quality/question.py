"""What is asked of a compressed cache, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Label = str | int | float


@dataclass(frozen=True, slots=True)
class Choice:
    """A continuation to score: its log-likelihood is that of all tokens but the first ``unscored``, which are given."""

    tokens: tuple[int, ...]
    unscored: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """One sample of a task, in tokens.

    All of ``context`` but its last token is prefilled and compressed; that token, ``after``, and whatever is scored or
    written then go through the cache one by one.

    Attributes:
        name: unique within its task, the same at every run with the same seed.
        context: 2 tokens or more.
        live: turns that are appended, each as one run, to what the compression left of the context. Then the last
            token that goes in singly is that of the last turn.
        after: what is read before anything is scored.
        choices: continuations to score, each from the same cache.
        candidates: tokens whose log-probability as the next one is wanted.
        write: greedy tokens to write.
        labels: what the sample is broken down by, such as ``{"turns": 6, "tokens": 1024, "kind": "name"}``.
    """

    name: str
    context: tuple[int, ...]
    live: tuple[tuple[int, ...], ...] = ()
    after: tuple[int, ...] = ()
    choices: tuple[Choice, ...] = ()
    candidates: tuple[int, ...] = ()
    write: int = 0
    labels: Mapping[str, Label] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """All tokens up to the point where scoring begins."""
        return len(self.context) + sum(map(len, self.live)) + len(self.after)

    @property
    def to_come(self) -> int:
        """The most tokens that will follow the prefilled ones."""
        return 1 + len(self.after) + max(self.write, max((len(c.tokens) for c in self.choices), default=0))


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one sequence's cache held after compression and what a step read of it: shares of all tokens, and bytes.

    Bytes are the batch's, divided by its sequences.
    """

    kept: float
    read: float
    device_bytes: float
    total_bytes: float
    read_bytes: float


@dataclass(frozen=True, slots=True)
class Reply:
    """What a strategy made of a question.

    Attributes:
        choices: log-likelihood of each choice, in nats.
        greedy: for each choice, whether every scored token was the most likely one.
        candidates: log-probability of each candidate, in nats.
        written: token ids, up to (not with) a stop token.
        footprint: while it was asked.
    """

    choices: tuple[float, ...]
    greedy: tuple[bool, ...]
    candidates: tuple[float, ...]
    written: tuple[int, ...]
    footprint: Footprint
