"""One conversation: a fact told at some depth, turns before and after it, the question, and its tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.errors import UserError
from kvatlas.quality.grid import token_bin
from kvatlas.quality.passages import words
from kvatlas.quality.primed import encode, lead, pieces, ten_apart
from kvatlas.quality.question import Label, Question
from kvatlas.quality.retention.facts import Fact, kinds, values_of
from kvatlas.quality.retention.fillers import Fillers
from kvatlas.quality.retention.form import Form, Turn

VARIANTS = ("one", "two", "updated", "assistant")
NEAR = 256
"""The fewest tokens between the fact and the question, where the context is long enough."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is told, and how.

    Attributes:
        values: ten of the fact's kind: the first is true, the second the old one where there is one.
        turn: in which it is told.
        earlier: in which the old value is told, at the beginning.
        forbidden: words that nothing else in the conversation may hold.
    """

    fact: Fact
    variant: str
    values: tuple[str, ...]
    turn: Turn
    earlier: Turn | None = None
    forbidden: frozenset[str] = frozenset()

    @property
    def prime(self) -> str:
        """The start of the answer. That it says who told it makes a small model look back rather than guess."""
        who = "I told you that" if self.variant == "assistant" else "You told me that"
        return f"{who} {self.fact.prime[0].lower()}{self.fact.prime[1:]}"


def told(tokenizer: Any, fact: Fact, variant: str, draw: random.Random) -> Told:
    """A fact with drawn values.

    ``two``: a second fact of another kind stands in the same turn, before or after it. ``updated``: it is told with
    another value in the first turn of the conversation, and corrected here. ``assistant``: only an answer says it.
    """
    values = ten_apart(tokenizer, fact.prime, values_of(fact.kind, draw), fact.kind)
    draw.shuffle(values)
    true, other = values[:2]
    turn, earlier, beside = Turn(fact.tell.format(true), fact.reply), None, ""
    if variant == "two":
        kind = draw.choice([kind for kind in kinds() if kind != fact.kind])
        beside = values_of(kind, draw)[0]
        both = [turn.said, draw.choice(kinds()[kind]).tell.format(beside)]
        turn = Turn(" ".join(draw.sample(both, 2)), fact.reply)
    elif variant == "updated":
        earlier = Turn(fact.tell.format(other), fact.reply)
        turn = Turn(f"What I told you has changed. {turn.said}", "Thank you for telling me that it has changed.")
    elif variant == "assistant":
        turn = Turn(f"Please look into my notes. {fact.ask}", f"{fact.prime} {true}.")
    return Told(fact, variant, tuple(values), turn, earlier, words(*values, beside))


@dataclass(frozen=True, slots=True)
class Plan:
    """How a conversation is to be: tokens of its context, turns after the fact, its depth, and what is asked when."""

    tokens: int
    turns: int
    depth: float
    question: str
    live: bool
    primed: bool
    write: int


def talk(fillers: Fillers, form: Form, name: str, what: Told, plan: Plan, draw: random.Random) -> Question:
    """The conversation as a question. Raises UserError where the fact or the turns do not fit into its tokens."""
    depth = plan.depth if plan.tokens * (1 - plan.depth) >= NEAR else 0.0
    head, between = _turns(fillers, form, what, plan, depth, draw)
    texts = _texts(form, head, between, what.fact.ask, plan.question == "before", plan.live)
    tail = texts.pop() + (form.gap + what.prime if plan.primed else "")
    *parts, after = pieces(fillers.tokenizer, [*texts, tail], form.special)
    candidates: tuple[int, ...] = ()
    if plan.primed:
        led = lead(fillers.tokenizer, after, tail.rsplit("\n", 1)[-1].lstrip(), what.values)
        after, candidates = led.tokens, led.next
    told_at = len(encode(fillers.tokenizer, form.context(head[:-1]), form.special)) if head[:-1] else 0
    total = sum(map(len, parts))
    labels: dict[str, Label] = {
        "turns": plan.turns,
        "tokens": token_bin(total),
        "depth": f"{round(100 * depth)}%",
        "kind": what.fact.kind,
        "variant": what.variant,
        "context_tokens": total,
        "told_at": told_at,
        "distance_tokens": total - told_at,
        "value": what.values[0],
    }
    if what.earlier:
        labels["old"] = what.values[1]
    return Question(name, parts[0], tuple(parts[1:]), after, (), candidates, plan.write, labels)


def _turns(
    fillers: Fillers, form: Form, what: Told, plan: Plan, depth: float, draw: random.Random
) -> tuple[list[Turn], list[Turn]]:
    """The turns up to the fact's, and those after it."""
    earlier = [what.earlier] if what.earlier else []
    fixed = fillers.tokens(*earlier, what.turn) + _start(fillers, form)
    if plan.question == "before":
        fixed += len(encode(fillers.tokenizer, form.asked([], what.fact.ask)))
    if fixed >= plan.tokens:
        raise UserError(f"a told fact takes {fixed} tokens, which a context of {plan.tokens} has no room for")
    first = min(int(plan.tokens * depth), plan.tokens - fixed)
    before = fillers.fill(_turns_before(plan.turns, depth), first, draw, what.forbidden) if first else []
    left = plan.tokens - fixed - fillers.tokens(*before)
    return [*earlier, *before, what.turn], fillers.fill(plan.turns, left, draw, what.forbidden)


def _start(fillers: Fillers, form: Form) -> int:
    """Tokens that stand before the first turn: a start token, a system message."""
    turn = Turn("Hello.", "Hi.")
    return len(encode(fillers.tokenizer, form.context([turn]), form.special)) - fillers.tokens(turn)


def _turns_before(turns: int, depth: float) -> int:
    """As many turns a token before the fact as after it."""
    return max(1, round(turns * depth / (1 - depth)))


def _texts(form: Form, head: Sequence[Turn], between: Sequence[Turn], ask: str, early: bool, live: bool) -> list[str]:
    """The text up to the end of each part: context, live turns, and what is read after the compression."""
    turns = [*head, *between]
    ends = [form.context(turns[:n]) for n in range(len(head), len(turns))] if live else []
    asked = form.asked(turns, ask)
    ends += [asked, asked] if early else [form.context(turns), asked]
    return [end[len(start) :] for start, end in zip(["", *ends], ends)]
