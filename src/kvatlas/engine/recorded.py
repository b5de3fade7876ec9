"""One prefill forward for several caches: what the context costs is paid once for all strategies that prefill alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvatlas.attention.prefill import Prefill, attend_for
from kvatlas.attention.tiles import Wants
from kvatlas.engine.cache import KVCache
from kvatlas.strategy.spec import parse

if TYPE_CHECKING:
    from kvatlas.engine.lm import LM

Key = tuple[Wants | None, bool]
"""A statistic of prefill attention, and whether it is wanted by the whole score matrix."""


class Recorded:
    """Remembers a forward's queries, keys and values, from which any number of caches are filled, one after another.

    For ``LM.prefill`` it stands where a cache stands. All caches must prefill exactly (``Strategy.prefills_exactly``),
    so that each would have continued that forward alike. Attention runs once, and each statistic that a rule wants is
    taken once, not once for each cache. It holds queries, keys and values of all layers; only those caches need room
    besides that are in use.

    Args:
        caches: fresh ones of one model. The first that prefills in one run gives the output.
    """

    foresees = False

    def __init__(self, caches: Sequence[KVCache]) -> None:
        assert caches, "a recording needs a cache"
        self.caches = sorted(caches, key=lambda cache: cache.strategy.prefill.chunk > 0)  # one whole forward leads
        self.strategy = replace(parse("full"), name="+".join(cache.strategy.name for cache in caches))
        self.wants_inputs = any(cache.wants_inputs for cache in caches)
        self.started, self.rows = False, 0
        self._runs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._statistics: dict[tuple[int, int], dict[Key, Tensor | None]] = {}
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._ids: dict[int, list[int]] = {}

    # ------------------------------------------------------------- where a cache stands

    def begin(self, prompts: Sequence[int], reserve: int) -> None:
        """Start sequences with prompts of these lengths, ``reserve`` tokens to come."""
        self.prompts, self.reserve = list(prompts), reserve
        self.rows, self.started = len(self.prompts), True
        self.seen = torch.zeros(self.rows, dtype=torch.int64)

    def match_prefix(self, row: int, ids: list[int]) -> int:
        """Nothing is reused: the caches need every token of the prompt."""
        self._ids[row] = ids
        return 0

    def expect(self, row: int, more: int) -> None:
        """A run of ``more`` tokens of one sequence is about to come: its whole prompt."""

    def finish_prefill(self, row: int, ids: list[int] | None = None) -> None:
        """All layers have had a sequence's whole prompt."""

    def inputs(self, layer: int, x: Tensor, row: int | None = None) -> None:
        """The attention input of a run ``[T, hidden]``, for caches that keep it."""
        assert row is not None, "a recording does not decode"
        self._inputs[layer, row] = x

    def prefill(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool = True) -> Tensor:
        """One sequence's whole prompt ``q [Hq, T, D]``, ``k, v [H, T, D]`` -> ``[T, Hq, D]``."""
        assert (layer, row) not in self._runs, "a recording serves prompts; later turns meet what each strategy left"
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        outs: list[Tensor] = []
        found: dict[Key, Tensor | None] = {}
        for how, wants in self._asked(layer).items():
            out, statistics = attend_for(q, k, v, how, wants)
            outs.append(out)
            found |= {(each, how.eager): statistic for each, statistic in zip(wants, statistics)}
        self._runs[layer, row], self._statistics[layer, row] = (q, k, v), found
        return outs[0]

    def _asked(self, layer: int) -> dict[Prefill, list[Wants | None]]:
        """What the caches want of the attention, by the way they attend; the way of the first cache comes first."""
        asked: dict[Prefill, list[Wants | None]] = {}
        for cache in self.caches:
            own = cache.layers[layer]
            if not cache.strategy.prefill.chunk and own.wants not in asked.setdefault(own.how, []):
                asked[own.how].append(own.wants)
        return asked or {self.caches[0].layers[layer].how: [None]}

    # -------------------------------------------------------------------- and fills some

    def fill(self, cache: KVCache) -> None:
        """Begin one of the caches with the prompts, as if the forward had been its own."""
        cache.begin(self.prompts, self.reserve)
        for row in range(self.rows):
            cache.announce(row, self._ids[row])
            cache.expect(row, self.prompts[row])
            for layer in range(len(cache.layers)):
                self._fill_layer(cache, layer, row)
            cache.finish_prefill(row)

    def _fill_layer(self, cache: KVCache, layer: int, row: int) -> None:
        own, (q, k, v) = cache.layers[layer], self._runs[layer, row]
        if (layer, row) in self._inputs:
            cache.inputs(layer, self._inputs[layer, row], row)
        if cache.strategy.prefill.chunk:
            own.prefill(row, q, k, v)
        else:
            statistic = self._statistics[layer, row][own.wants, own.how.eager]
            own.take(row, q, k, v, None if statistic is None else statistic.clone())


def prefill_many(
    lm: LM, caches: Sequence[KVCache], prompts: Sequence[Sequence[int]], reserve: int
) -> Iterator[tuple[KVCache, Tensor]]:
    """Begin every cache with these prompts (token ids), with as few forwards of the model as is exact.

    Args:
        caches: fresh ones of this model.
        prompts: one a sequence, of any lengths.
        reserve: tokens to come after each.

    Yields:
        each cache as it is filled, and the logits ``[B, V]`` that follow the prompts. One that the caller lets go of is
        freed before the next is filled.
    """
    waiting = list(caches)
    del caches
    alike = [cache for cache in waiting if cache.strategy.prefills_exactly]
    with torch.no_grad():
        recorded = Recorded(alike) if alike else None
        logits = None if recorded is None else lm.prefill(cast(KVCache, recorded), prompts, reserve)
        if recorded is not None:
            recorded.caches = []
    del alike
    while waiting:
        cache = waiting.pop(0)
        with torch.no_grad():
            if cache.strategy.prefills_exactly:
                assert recorded is not None and logits is not None
                recorded.fill(cache)
                after = logits
            else:
                after = lm.prefill(cache, prompts, reserve)
        yield cache, after
        del cache
