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
    prefilled,
    reserve_for,
    rows_forked,
    turns,
)  # fmt: skip
from kvatlas.quality.question import Choice, Footprint, Question, Reply
from kvatlas.quality.reading import Progress, compressed, part_of
from kvatlas.quality.replies import Replies
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
    kept: Replies | None = None,
) -> dict[str, list[Reply]]:
    """Every question under every strategy.

    All of a context but its last token is prefilled (with live turns: the whole context, then each turn as a run, of
    the last one all but its last token) and compressed. The rest goes through the cache token by token, for a batch of
    questions at once, and the cache is repeated for what is scored or written after it.

    Which questions share a batch, and the forward that prefills them, do not depend on the strategies: a strategy's
    replies are the same to the last bit whatever else is asked for.

    Args:
        specs: strategies, as the user wrote them.
        kept: where finished batches are looked up and put.
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
        size, left = sum(q.tokens for q in batch), []
        for spec in order:
            known = None if kept is None else kept.get(spec, batch)
            found[spec].update(zip(numbers, known or ()))
            left += [] if known else [spec]
        for spec, replies in (
            _ask(lm, left, batch, ended, part_of(progress, done / total, size / total)) if left else ()
        ):
            found[spec].update(zip(numbers, replies))
            if kept is not None:
                kept.put(spec, batch, replies)
        done += size
    return {spec: [found[spec][i] for i in range(len(questions))] for spec in order}


def _ask(
    lm: LM, specs: list[str], batch: list[Question], ended: Ended | None, progress: Progress
) -> Iterator[tuple[str, list[Reply]]]:
    """One batch: each strategy with its replies."""
    contexts, reserve = [prefilled(q) for q in batch], reserve_for(batch)
    progress("prefill", 0.0)
    # the reference leads every prefill, asked for or not: its forward is what all see
    together = [REFERENCE, *(spec for spec in specs if spec != REFERENCE)]
    for number, (spec, cache) in enumerate(compressed(lm, together, contexts, reserve)):
        if spec not in specs:
            continue
        for row, q in enumerate(batch):
            for turn in turns(q):
                lm.extend(cache, row, turn)
        yield spec, Asking(lm, cache, batch, ended).replies()
        progress(spec, (number + 1) / len(together))


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


class Asking:
    """One batch of questions at one compressed cache, which is used up.

    Each sequence is fed its tokens one by one; then come its branches. Where there are choices, all sequences come to
    them at one step, and the cache is repeated. What is only written is written while others are still fed.
    """

    def __init__(self, lm: LM, cache: KVCache, batch: list[Question], ended: Ended | None) -> None:
        self.lm, self.cache, self.batch, self.ended = lm, cache, batch, ended
        self.tokens = [fed(q) for q in batch]
        self.stops = set(lm.stop_ids())
        self.branches = [
            [
                Branch(row, length, choice)
                for choice, length in [*((c, len(c.tokens)) for c in q.choices), (None, q.write)]
            ]
            for row, q in enumerate(batch)
        ]
        self.candidates: list[tuple[float, ...]] = [()] * len(batch)

    def replies(self) -> list[Reply]:
        """Each question's reply."""
        forked = any(b.choice is not None and b.length > 1 for own in self.branches for b in own)
        self._feed(writing=not forked)
        if forked:
            self._fork()
        return [
            Reply(
                tuple(b.total for b in choices), tuple(b.greedy for b in choices), self.candidates[row],
                tuple(writer.written), self.footprint,
            )
            for row, (*choices, writer) in enumerate(self.branches)
        ]  # fmt: skip

    def _feed(self, writing: bool) -> None:
        """Feed every sequence its tokens and, if ``writing``, then what it writes, until all are done."""
        rows, i, first = list(range(len(self.batch))), 0, min(map(len, self.tokens))
        while rows:
            logits = self._step(self.cache, [self._next(row, i) for row in rows])
            i += 1
            if i == first:
                self.footprint = footprint_of(self.cache)
            self._arrive([(at, row) for at, row in enumerate(rows) if len(self.tokens[row]) == i], logits)
            if not writing:
                rows = rows if i < first else []
                continue
            past = [(self.branches[row][-1], at, i - len(self.tokens[row])) for at, row in enumerate(rows)]
            self._note([entry for entry in past if entry[2] > 0], logits)
            left = [
                at for at, row in enumerate(rows)
                if i < len(self.tokens[row]) or self.branches[row][-1].goes_on(i - len(self.tokens[row]) + 1)
            ]  # fmt: skip
            rows = [rows[at] for at in self._stay(self.cache, left, len(rows))]

    def _next(self, row: int, i: int) -> int:
        own = self.tokens[row]
        return own[i] if i < len(own) else self.branches[row][-1].target(i - len(own))

    def _arrive(self, arrived: list[tuple[int, int]], logits: Tensor) -> None:
        """Sequences ``(row of logits, question)`` that were fed all of theirs: candidates, and each branch's start."""
        for at, row in arrived:
            if wanted := list(self.batch[row].candidates):
                own = logits[at].float()
                self.candidates[row] = tuple((own[wanted] - own.logsumexp(-1)).tolist())
        self._note([(branch, at, 0) for at, row in arrived for branch in self.branches[row]], logits)

    def _fork(self) -> None:
        """Repeat each row once for each of its branches and step them all, as many at once as memory allows."""
        branches, at_once = [b for own in self.branches for b in own if b.goes_on(1)], rows_forked(self.lm, self.batch)
        for start in range(0, len(branches), at_once):
            part = branches[start : start + at_once]
            own = self.cache if start + at_once >= len(branches) else copy(self.cache)
            rows = [b.row for b in part]
            if rows != list(range(own.rows)):
                own.select_rows(rows)
            i = 1
            while part:
                logits = self._step(own, [b.target(i - 1) for b in part])
                self._note([(b, at, i) for at, b in enumerate(part)], logits)
                i += 1
                left = [at for at, b in enumerate(part) if b.goes_on(i)]
                part = [part[at] for at in self._stay(own, left, len(part))]

    def _step(self, cache: KVCache, tokens: list[int]) -> Tensor:
        return self.lm.step(cache, torch.tensor(tokens, device=self.lm.facts.device))

    def _stay(self, cache: KVCache, left: list[int], rows: int) -> list[int]:
        """The rows to step next: those that are over stay along until they are half of all, as rows must be moved."""
        if not left or (2 * len(left) <= rows and movable(cache)):
            if left:
                cache.select_rows(left)
            return left
        return list(range(rows))

    def _note(self, places: list[tuple[Branch, int, int]], logits: Tensor) -> None:
        """What the logits ``[R, V]`` say of branches, each ``(branch, its row, the place of the token to come)``."""
        wanting = [(b, at, i) for b, at, i in places if b.wants(i)]
        if not wanting:
            return
        targets = torch.tensor([b.target(i) for b, _, i in wanting], device=logits.device)
        rows = torch.tensor([at for _, at, _ in wanting], device=logits.device)
        picked = logits[rows, targets].float() - logits.float().logsumexp(-1)[rows]
        best = logits.argmax(-1)[rows]
        for (branch, _, i), value, token in zip(wanting, picked.tolist(), best.tolist()):
            if branch.choice is not None:
                branch.total += value
                branch.greedy &= token == branch.choice.tokens[i]
                continue
            branch.over = token in self.stops
            if not branch.over:
                branch.written.append(token)
                branch.over = self.ended is not None and self.ended(branch.written)


def movable(cache: KVCache) -> bool:
    """Whether selecting rows changes nothing for those that stay.

    A reader over slots that evictions have freed looks at them anew, and would see other pages than without the move.
    """
    return not (cache.strategy.keep.evicts and cache.strategy.read.selects)
