"""Ask questions of compressed caches: one prefill for all strategies, one step a token for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM
from kvatlas.engine.saved import copy
from kvatlas.measure.record import REFERENCE
from kvatlas.quality.asking_batches import (
    batches,
    check_questions,
    fed,
    held_together,
    prefilled,
    reserve_for,
    rows_forked,
    turns,
)  # fmt: skip
from kvatlas.quality.question import Choice, Footprint, Question, Reply
from kvatlas.quality.reading import Progress, compressed, part_of
from kvatlas.strategy.spec import parse

Ended = Callable[[Sequence[int]], bool]


@torch.no_grad()
def ask(
    lm: LM,
    specs: Sequence[str],
    questions: Sequence[Question],
    progress: Progress | None = None,
    *,
    ended: Ended | None = None,
) -> dict[str, list[Reply]]:
    """Every question under every strategy.

    All of a context but its last token is prefilled (with live turns: the whole context, then each turn as a run, of
    the last one all but its last token) and compressed. The rest goes through the cache token by token, for a batch of
    questions at once, and the cache is repeated for what is scored or written after it.

    Which questions share a batch, and the forward that prefills them, do not depend on the strategies: a strategy's
    replies are the same to the last bit whatever else is asked for.

    Args:
        specs: strategies, as the user wrote them.
        ended: whether the tokens written so far are enough; the model's stop tokens always end what is written.

    Returns:
        for each spec its replies, in the order of the questions.

    Raises:
        UserError: an unknown strategy; a context of fewer than 2 tokens, or a question beyond the model's positions.
    """
    order = list(dict.fromkeys(specs))
    for spec in order:
        parse(spec)
    if not order:
        return {}
    check_questions(lm, questions)
    found: dict[str, dict[int, Reply]] = {spec: {} for spec in order}
    total, done = sum(q.tokens for q in questions), 0
    for numbers in batches(lm, questions):
        batch = [questions[i] for i in numbers]
        size = sum(q.tokens for q in batch)
        for spec, replies in _ask(lm, order, batch, ended, part_of(progress, done / total, size / total)):
            found[spec].update(zip(numbers, replies))
        done += size
    return {spec: [found[spec][i] for i in range(len(questions))] for spec in order}


def _ask(
    lm: LM, specs: list[str], batch: list[Question], ended: Ended | None, progress: Progress
) -> Iterator[tuple[str, list[Reply]]]:
    """One batch: each strategy with its replies."""
    tokens = torch.tensor([fed(q) for q in batch], device=lm.facts.device)
    contexts, reserve, number = [prefilled(q) for q in batch], reserve_for(batch), 0
    for group in held_together(lm, specs, batch):
        progress("prefill", number / len(specs))
        # the reference leads every prefill, asked for or not: its forward is what all see
        together = [REFERENCE, *(spec for spec in group if spec != REFERENCE)]
        for spec, cache in compressed(lm, together, contexts, reserve):
            if spec not in group:
                continue
            for row, q in enumerate(batch):
                for turn in turns(q):
                    lm.extend(cache, row, turn)
            for i in range(tokens.shape[1]):
                logits = lm.step(cache, tokens[:, i])
            footprint = footprint_of(cache)
            yield spec, _replies(lm, cache, logits, batch, footprint, ended)
            number += 1
            progress(spec, number / len(specs))


def footprint_of(cache: KVCache) -> Footprint:
    """What the cache holds and its last step read, bytes divided by its sequences."""
    held, now, rows = cache.bytes(), cache.realised(), cache.rows
    return Footprint(now.kept, now.read, held.device / rows, held.total / rows, now.read_bytes / rows)


# ------------------------------------------------------------------------ after the fed tokens


@dataclass(slots=True)
class Branch:
    """One way on from a row: a choice that is scored, or (``choice`` None) greedy tokens that are written."""

    row: int
    length: int
    choice: Choice | None = None
    total: float = 0.0
    greedy: bool = True
    written: list[int] = field(default_factory=list)
    over: bool = False

    def target(self, i: int) -> int:
        """The token at place ``i``, to score and then to feed; anything where there is none."""
        tokens: Sequence[int] = self.written if self.choice is None else self.choice.tokens
        return tokens[i] if i < len(tokens) else 0

    def wants(self, i: int) -> bool:
        """Whether the logits before place ``i`` tell it anything."""
        return not self.over and i < self.length and (self.choice is None or i >= self.choice.unscored)

    def goes_on(self, i: int) -> bool:
        """Whether it will want logits at place ``i`` or later."""
        return not self.over and i < self.length


def _replies(
    lm: LM, cache: KVCache, logits: Tensor, batch: list[Question], footprint: Footprint, ended: Ended | None
) -> list[Reply]:
    """Each question's reply, from the logits ``[B, V]`` after the fed tokens on. The cache is used up."""
    rest = logits.float().logsumexp(-1)
    candidates = [
        tuple((logits[row, list(q.candidates)].float() - rest[row]).tolist()) if q.candidates else ()
        for row, q in enumerate(batch)
    ]
    branches = [
        Branch(row, length, choice)
        for row, q in enumerate(batch)
        for choice, length in [*((c, len(c.tokens)) for c in q.choices), (None, q.write)]
    ]
    stops = set(lm.stop_ids())
    _note(branches, [b.row for b in branches], logits, 0, stops, ended)
    _go_on(lm, cache, [b for b in branches if b.goes_on(1)], rows_forked(lm, batch), stops, ended)
    replies = []
    for row, scores in enumerate(candidates):
        *choices, writer = [b for b in branches if b.row == row]
        values, greedy = tuple(b.total for b in choices), tuple(b.greedy for b in choices)
        replies.append(Reply(values, greedy, scores, tuple(writer.written), footprint))
    return replies


def _go_on(lm: LM, cache: KVCache, branches: list[Branch], at_once: int, stops: set[int], ended: Ended | None) -> None:
    """Repeat each row once for each of its branches and step them all together, as many at once as memory allows."""
    for start in range(0, len(branches), at_once):
        part = branches[start : start + at_once]
        own = cache if start + at_once >= len(branches) else copy(cache)
        rows = [b.row for b in part]
        if rows != list(range(own.rows)):
            own.select_rows(rows)
        i = 1
        while part:
            logits = lm.step(own, torch.tensor([b.target(i - 1) for b in part], device=lm.facts.device))
            _note(part, list(range(len(part))), logits, i, stops, ended)
            i += 1
            part = _left(own, part, i)


def _left(cache: KVCache, branches: list[Branch], i: int) -> list[Branch]:
    """The branches to step next: those that are over stay along until they are half of all, as rows must be moved."""
    left = [row for row, b in enumerate(branches) if b.goes_on(i)]
    if not left:
        return []
    if 2 * len(left) > len(branches) or not movable(cache):
        return branches
    cache.select_rows(left)
    return [branches[row] for row in left]


def movable(cache: KVCache) -> bool:
    """Whether selecting rows changes nothing for those that stay.

    A reader over slots that evictions have freed looks at them anew, and would see other pages than without the move.
    """
    return not (cache.strategy.keep.evicts and cache.strategy.read.selects)


def _note(
    branches: list[Branch], rows: list[int], logits: Tensor, i: int, stops: set[int], ended: Ended | None
) -> None:
    """What the logits ``[R, V]`` say of the token at place ``i`` of each branch, which finds its own in ``rows``."""
    wanting = [(b, row) for b, row in zip(branches, rows) if b.wants(i)]
    if not wanting:
        return
    targets = torch.tensor([b.target(i) for b, _ in wanting], device=logits.device)
    own = torch.tensor([row for _, row in wanting], device=logits.device)
    picked = logits[own, targets].float() - logits.float().logsumexp(-1)[own]
    best = logits.argmax(-1)[own]
    for (branch, _), value, token in zip(wanting, picked.tolist(), best.tolist()):
        if branch.choice is not None:
            branch.total += value
            branch.greedy &= token == branch.choice.tokens[i]
            continue
        branch.over = token in stops
        if not branch.over:
            branch.written.append(token)
            branch.over = ended is not None and ended(branch.written)
