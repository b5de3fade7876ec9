"""One prefill forward for several caches: what the context costs is paid once for all strategies that prefill alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvatlas.attention.prefill import attend_prefill
from kvatlas.attention.tiles import Wants
from kvatlas.engine.cache import KVCache
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy

if TYPE_CHECKING:
    from kvatlas.engine.lm import LM


class Tee:
    """Shows one forward's queries, keys and values to every cache; attention over them continues the forward.

    For ``LM.prefill`` it stands where a cache stands. All caches must prefill exactly
    (``prefills_exactly``), so that each would have given that output. Decode then goes to each cache by itself.
    """

    foresees = False

    def __init__(self, caches: Sequence[KVCache]) -> None:
        assert caches, "a tee needs a cache"
        self.caches = sorted(caches, key=lambda cache: cache.strategy.prefill.chunk > 0)  # one whole forward leads
        self.strategy = replace(parse("full"), name="+".join(cache.strategy.name for cache in caches))

    @property
    def started(self) -> bool:
        """All caches have their sequences."""
        return all(cache.started for cache in self.caches)

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return self.caches[0].rows

    @property
    def seen(self) -> Tensor:
        """``[B]`` int64: tokens that each sequence has had."""
        return self.caches[0].seen

    def begin(self, prompts: Sequence[int], reserve: int) -> None:
        """Start sequences with prompts of these lengths in every cache."""
        for cache in self.caches:
            cache.begin(prompts, reserve)

    def match_prefix(self, row: int, ids: list[int]) -> int:
        """Nothing: the other caches need every token of the prompt."""
        for cache in self.caches:
            cache.announce(row, ids)
        return 0

    def finish_prefill(self, row: int, ids: list[int] | None = None) -> None:
        """All layers have had a sequence's whole prompt."""
        for cache in self.caches:
            cache.finish_prefill(row)

    def expect(self, row: int, more: int) -> None:
        """A run of ``more`` tokens of one sequence is about to come, perhaps in chunks."""
        for cache in self.caches:
            cache.expect(row, more)

    @property
    def wants_inputs(self) -> bool:
        """Some cache keeps the attention inputs."""
        return any(cache.wants_inputs for cache in self.caches)

    def inputs(self, layer: int, x: Tensor, row: int | None = None) -> None:
        """The attention input of a run ``[T, hidden]`` to the caches that keep it."""
        for cache in self.caches:
            cache.inputs(layer, x, row)

    def prefill(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool = True) -> Tensor:
        """One sequence's whole prompt ``q [Hq, T, D]``, ``k, v [H, T, D]`` to every cache -> ``[T, Hq, D]``.

        Attention runs once for each statistic that a rule wants, not once for each cache.
        """
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        done: dict[tuple[Wants | None, bool], tuple[Tensor, Tensor | None]] = {}
        outs = []
        for cache in self.caches:
            own = cache.layers[layer]
            assert int(own.seen[row]) == 0, "a tee serves prompts; later turns meet what each strategy left"
            if cache.strategy.prefill.chunk:
                outs.append(own.prefill(row, q, k, v, final))
                continue
            key = (own.wants, own.how.eager)
            if key not in done:
                done[key] = attend_prefill(q, k, v, own.how, wants=own.wants)
            out, statistic = done[key]
            own.take(row, q, k, v, statistic, final)
            outs.append(out)
        return outs[0]

    def foresee(self, layer: int, x: Tensor) -> None:
        raise NotImplementedError("decode goes to each cache by itself")

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError("decode goes to each cache by itself")

    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat sequences in every cache."""
        for cache in self.caches:
            cache.select_rows(rows)


def prefills_exactly(strategy: Strategy) -> bool:
    """``Strategy.prefills_exactly``."""
    return strategy.prefills_exactly


@torch.no_grad()
def prefill_many(lm: LM, caches: Sequence[KVCache], prompts: Sequence[Sequence[int]], reserve: int) -> list[Tensor]:
    """Begin every cache with these prompts (token ids), with as few forwards of the model as is exact.

    Args:
        caches: fresh ones of this model.
        prompts: one a sequence, of any lengths.
        reserve: tokens to come after each.

    Returns:
        for each cache the logits ``[B, V]`` that follow the prompts.
    """
    alike = [cache for cache in caches if prefills_exactly(cache.strategy)]
    found = {id(cache): lm.prefill(cache, prompts, reserve) for cache in caches if not prefills_exactly(cache.strategy)}
    if alike:
        found |= dict.fromkeys(map(id, alike), lm.prefill(cast(KVCache, Tee(alike)), prompts, reserve))
    return [found[id(cache)] for cache in caches]
