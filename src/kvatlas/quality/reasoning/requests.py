"""lm-eval's requests as questions: continuations of one context are choices that share its prefilled cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.quality.question import Choice, Label, Question, Reply

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A context and the continuation that is scored after it."""

    context: Tokens
    continuation: Tokens


@dataclass(frozen=True, slots=True)
class Share:
    """A question, and which of a sample's pairs its choices are."""

    question: Question
    numbers: tuple[int, ...]


def shares(name: str, pairs: Sequence[Pair], labels: dict[str, Label] | None = None) -> list[Share]:
    """One sample's pairs as questions.

    Pairs of one context are one question. Where the contexts differ (as in WinoGrande, where the choices are in them)
    they share what they begin with, if that is at least half of the longest, and each goes on through the cache: the
    rest of its context is given, its continuation scored. Contexts that have less in common are asked one by one.
    """
    contexts = list(dict.fromkeys(pair.context for pair in pairs))
    same = common(contexts)
    if len(contexts) == 1 or (same >= 2 and 2 * same >= max(map(len, contexts))):
        return [_share(name, pairs, tuple(range(len(pairs))), contexts[0][:same], labels)]
    found = []
    for k, context in enumerate(contexts):
        numbers = tuple(i for i, pair in enumerate(pairs) if pair.context == context)
        found.append(_share(f"{name}#{k}", pairs, numbers, context, labels))
    return found


def _share(
    name: str, pairs: Sequence[Pair], numbers: tuple[int, ...], context: Tokens, labels: dict[str, Label] | None
) -> Share:
    n = len(context)
    choices = tuple(Choice(p.context[n:] + p.continuation, len(p.context) - n) for p in (pairs[i] for i in numbers))
    return Share(Question(name, context, choices=choices, labels={"tokens": n, **(labels or {})}), numbers)


def common(contexts: Sequence[Tokens]) -> int:
    """Tokens that all contexts begin with."""
    shortest = min(map(len, contexts))
    return next((i for i in range(shortest) if len({c[i] for c in contexts}) > 1), shortest)


def scores(parts: Sequence[tuple[Share, Reply]]) -> list[tuple[float, bool]]:
    """Log-likelihood and whether it is greedy, for each pair of a sample, in their order."""
    found = {
        number: (value, greedy)
        for share, reply in parts
        for number, value, greedy in zip(share.numbers, reply.choices, reply.greedy)
    }
    return [found[i] for i in sorted(found)]
