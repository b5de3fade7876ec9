"""How near a strategy stays to ``full`` on real text: KL divergence, top-1 agreement, perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.measure.record import REFERENCE, Figure
from kvatlas.model.facts import check_prompt
from kvatlas.quality.reading import Fractions, Progress, compressed, part_of, rows_at_once, steps
from kvatlas.strategy.spec import parse
from kvatlas.workload.text import Prompt

Z95 = 1.959964


@dataclass(slots=True)
class Fidelity:
    """One sample for every continuation token of every window.

    Attributes:
        kl: KL(full || strategy) of the next-token distributions, in nats.
        top1: whether the most likely token is ``full``'s.
        nll: negative log-likelihood of the token that really follows, in nats.
        fractions: realised kept and read fractions.
    """

    kl: list[float] = field(default_factory=list)
    top1: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    fractions: Fractions = field(default_factory=Fractions)

    def divergence(self) -> Figure:
        """Mean KL with its standard error."""
        return Figure.mean(self.kl, "nats")

    def agreement(self) -> Figure:
        """Share of positions with ``full``'s first choice."""
        return Figure.proportion(sum(self.top1), len(self.top1))

    def perplexity(self) -> Figure:
        """exp of the mean negative log-likelihood; its 95 % interval is that of the mean, exponentiated."""
        mean = Figure.mean(self.nll, "nats")
        if mean.low is None:
            return Figure.exact(math.exp(mean.value), "ppl", n=mean.n)
        half = Z95 * (mean.value - mean.low)
        low, high = math.exp(mean.value - half), math.exp(mean.value + half)
        return Figure(value=math.exp(mean.value), unit="ppl", n=mean.n, low=low, high=high, interval="95% interval")

    def add(self, reference: Tensor, logits: Tensor, following: Tensor) -> None:
        """One step: log-probabilities of ``full`` ``[B, V]`` (float64), logits ``[B, V]``, what follows ``[B]``."""
        own = logits.double().log_softmax(-1)
        self.kl += divergence(reference, own).tolist()
        self.top1 += (own.argmax(-1) == reference.argmax(-1)).tolist()
        self.nll += (-own.gather(-1, following.unsqueeze(1)).squeeze(1)).tolist()


def fidelity(
    lm: LM, specs: Sequence[str], windows: Sequence[Prompt], progress: Progress | None = None
) -> dict[str, Fidelity]:
    """Read how each window's text really goes on through each strategy's cache.

    All of a window's context but its last token is prefilled and compressed; that token and the continuation then go
    through the cache one by one, so every continuation token is predicted after the compression.

    Args:
        lm: in float32, unless the loss of another dtype is to count too.
        specs: strategies; ``full`` is always run, as the reference.
        windows: contexts of 2 tokens or more, of any lengths, and continuations of one length.

    Returns:
        for each spec asked for, the samples of all windows.

    Raises:
        UserError: windows that do not fit together, or into the model's positions.
    """
    check_windows(lm, windows)
    order = [REFERENCE, *(spec for spec in dict.fromkeys(specs) if parse(spec).name != REFERENCE)]
    found = {spec: Fidelity() for spec in order}
    size = rows_at_once(lm, len(order), max(len(w.ids) + len(w.continuation) for w in windows))
    for start in range(0, len(windows), size):
        part = windows[start : start + size]
        _read(lm, found, part, part_of(progress, start / len(windows), len(part) / len(windows)))
    return {spec: found[spec if spec in found else REFERENCE] for spec in dict.fromkeys(specs)}


def _read(lm: LM, found: dict[str, Fidelity], windows: Sequence[Prompt], progress: Progress) -> None:
    """One batch of windows under every strategy, the reference first."""
    device, length = lm.facts.device, len(windows[0].continuation)
    following = torch.tensor([w.continuation for w in windows], device=device)
    fed = torch.cat([torch.tensor([w.ids[-1:] for w in windows], device=device), following[:, :-1]], 1)
    reference: list[Tensor] = []
    progress("prefill", 0.0)
    for number, (spec, cache) in enumerate(compressed(lm, list(found), [w.ids[:-1] for w in windows], length)):
        for i, logits in enumerate(steps(lm, cache, fed, found[spec].fractions)):
            if spec == REFERENCE:
                reference.append(logits.cpu())
            full = reference[i].to(device).double().log_softmax(-1)
            found[spec].add(full, logits, following[:, i])
            progress(spec, (number + (i + 1) / length) / len(found))


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) ``[B]`` in nats, from log-probabilities ``[B, V]``; 0 where they are the same."""
    p = reference.exp()
    term = torch.where(p > 0, p * (reference - other), 0.0)  # a token of probability 0 adds nothing
    return term.sum(-1).clamp(min=0.0)


def check_windows(lm: LM, windows: Sequence[Prompt]) -> None:
    """Raise UserError where the windows cannot be read as one batch, or not by this model."""
    if not windows:
        raise UserError("fidelity needs at least one window of text")
    if min(len(w.ids) for w in windows) < 2:
        raise UserError("a context needs 2 tokens or more: its last one is read after the compression")
    lengths = {len(w.continuation) for w in windows}
    if len(lengths) > 1 or lengths == {0}:
        raise UserError(f"all continuations must have the same length of 1 or more, not {sorted(lengths)}")
    check_prompt(lm.facts, max(len(w.ids) for w in windows), len(windows[0].continuation))
