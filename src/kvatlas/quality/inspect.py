"""Why a strategy fails: in each layer and KV head, what it reads against what full attention would look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvatlas.engine.calibrate import calibrated
from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.quality.reading import Progress
from kvatlas.quality.watched import Watched
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy

STEPS = 16
FIGURES = ("covered", "best", "overlap", "error", "kept", "read")
"""Names of what is measured at each step, in the order of ``Inspection``."""
PREFILL_SHARE = 0.5
"""Of the time, about; for the progress only."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean with the smallest and the largest of its ``n`` samples and their standard deviation."""

    mean: float
    min: float
    max: float
    sd: float
    n: int

    @classmethod
    def of(cls, samples: Tensor) -> Spread:
        values = samples.double().flatten()
        sd = float(values.std()) if len(values) > 1 else 0.0
        return cls(float(values.mean()), float(values.min()), float(values.max()), sd, len(values))


@dataclass(slots=True)
class Inspection:
    """What a strategy attended to in ``S`` decode steps after a prompt: ``L`` layers, ``H`` KV heads of ``G`` queries.

    Full attention means: the strategy's own queries over every key that its cache was ever given, at the true
    positions. All tensors are float32 on the CPU.

    Attributes:
        strategy: the four answers.
        prompt_tokens: tokens that were prefilled.
        greedy: the steps were fed the most likely token; otherwise the prompt's own last tokens.
        windows: each layer's window of the model's own (the strategy does nothing there), or None.
        covered: ``[L, S, H, G]`` share of full attention's softmax mass on the tokens that were read.
        best: ``[L, S, H]`` the most that any choice of as many tokens would cover (mean over the group): what is
            missing to 1 is the budget's doing, what ``covered`` lacks to it the choice's.
        overlap: ``[L, S, H]`` of as many best keys (by the group's mean mass) as were read, the share that was read.
        error: ``[L, S, H, G]`` distance of the head's output from full attention's, relative to the latter's length.
            What is lost by encoding shows only here.
        kept, read: ``[L, S, H]`` share of all tokens so far. What an archive holds counts as read, not as kept.
        kept_at, read_at: ``[L, H, T]`` share of the steps in which the token at this position was kept, was read.
        mass_at, missed_at: ``[L, H, T]`` full attention's mean mass at this position, and that of it not read.
        zones: ``[4, L, H, Z]`` the same four by the zones of ``quality.watched.ZONES``; of kept and read the share of
            a zone's tokens (NaN where it has none), of the masses the sum. The ends move with the context.
        zone_tokens: ``[Z]`` mean number of tokens in each zone.
    """

    strategy: Strategy
    prompt_tokens: int
    greedy: bool
    windows: tuple[int | None, ...]
    covered: Tensor
    best: Tensor
    overlap: Tensor
    error: Tensor
    kept: Tensor
    read: Tensor
    kept_at: Tensor
    read_at: Tensor
    mass_at: Tensor
    missed_at: Tensor
    zones: Tensor
    zone_tokens: Tensor

    @property
    def steps(self) -> int:
        """S."""
        return self.covered.shape[1]

    @property
    def layers(self) -> list[int]:
        """The layers that the strategy works in; all, when every layer has a window of the model's own."""
        own = [i for i, window in enumerate(self.windows) if window is None]
        return own or list(range(len(self.windows)))

    def head(self, layer: int, head: int) -> dict[str, Spread]:
        """The spread of each of ``FIGURES`` in one KV head, over steps and query heads (those that are theirs)."""
        return {name: Spread.of(getattr(self, name)[layer, :, head]) for name in FIGURES}

    def heads(self, name: str) -> Tensor:
        """``[L, H]`` mean of a figure over the steps, and the group's query heads where it is theirs."""
        figure = getattr(self, name).mean(1)
        return figure.mean(-1) if figure.dim() == 3 else figure


@torch.no_grad()
def inspect(
    lm: LM,
    strategy: str | Strategy,
    prompt: str | Sequence[int],
    steps: int = STEPS,
    *,
    greedy: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Look at a strategy at work on one prompt.

    Args:
        strategy: a spec such as ``"h2o:0.3"``.
        prompt: text or token ids. Its last ``steps`` tokens are not prefilled but fed one by one, after the
            compression: every strategy is then asked the same.
        greedy: prefill the whole prompt and go on with the model's own most likely tokens.
        progress: is told what is being done and how much of it is done.

    Raises:
        UserError: an unknown strategy, steps below 1, a prompt that is empty, too short for the steps or too long for
            the model.
    """
    chosen, tell = parse(strategy), progress or (lambda what, share: None)
    one: Any = [prompt]
    ids = lm.encode_prompts(one)[0]
    context = context_of(lm, ids, steps, greedy)
    if calibrated(chosen):
        tell("calibrating the strategy on the model", 0.0)
    layers = lm.shape.layers

    def reading(layer: int) -> None:
        tell(f"reading the prompt, layer {layer + 1} of {layers}", PREFILL_SHARE * layer / layers)

    cache = Watched(chosen, lm.shape, lm.port, lm.constants(chosen), reading)
    logits = lm.prefill(cache, [context], reserve=steps)
    for i in range(steps):
        tell(f"step {i + 1} of {steps}", PREFILL_SHARE + (1 - PREFILL_SHARE) * i / steps)
        token = logits.argmax(-1) if greedy else torch.tensor([ids[len(context) + i]], device=lm.facts.device)
        logits = lm.step(cache, token)
    return gathered(chosen, cache, len(context), steps, greedy)


def context_of(lm: LM, ids: Sequence[int], steps: int, greedy: bool) -> Sequence[int]:
    """The tokens that are prefilled. Raises UserError where prompt, steps and model do not fit."""
    if steps < 1:
        raise UserError(f"steps must be 1 or more, not {steps}")
    if not greedy and len(ids) <= steps:
        raise UserError(
            f"the prompt has {len(ids)} tokens, and its last {steps} are fed as steps; use a longer prompt, fewer "
            "steps, or greedy steps after the prompt"
        )
    total, most = len(ids) + (steps if greedy else 0), lm.facts.max_positions
    if most is not None and total > most:
        more = f" and {steps} steps" if greedy else ""
        raise UserError(
            f"the prompt's {len(ids)} tokens{more} are more than the model's {most} positions; use a shorter prompt"
        )
    return ids if greedy else ids[:-steps]


def gathered(strategy: Strategy, cache: Watched, prompt: int, steps: int, greedy: bool) -> Inspection:
    """What the traces of all layers say."""
    traces = cache.traces

    def figure(name: str) -> Tensor:
        return torch.stack([torch.stack([step[name] for step in trace.steps]) for trace in traces]).cpu()

    tokens = torch.arange(prompt + steps)
    lived = (steps - (tokens - prompt).clamp(min=0)).float()  # steps that saw the token: all, but for the fed ones
    at = torch.stack([trace.at for trace in traces], 1).cpu()
    zones = torch.stack([trace.zones for trace in traces], 1).cpu()
    sizes = traces[0].sizes.cpu()
    shares = torch.cat([zones[:2] / sizes, zones[2:] / steps])
    kept_at, read_at, mass_at, missed_at = torch.cat([at[:2] / lived, at[2:] / steps])
    return Inspection(
        strategy, prompt, greedy, cache.shape.windows, **{name: figure(name) for name in FIGURES},
        kept_at=kept_at, read_at=read_at, mass_at=mass_at, missed_at=missed_at, zones=shares, zone_tokens=sizes / steps,
    )  # fmt: skip
