"""A strategy's own cache that is looked at: every key it was given, and what each step attended to of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvatlas.engine.cache import CacheShape, KVCache
from kvatlas.engine.clock import Clock
from kvatlas.engine.layer import LayerCache
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import Port

SINKS, RECENT, PARTS = 4, 32, 10
"""Tokens at the start and at the end that are counted apart; parts of equal size of what lies between."""

ZONES = ("sinks", *(f"part {i + 1}" for i in range(PARTS)), "recent")


def zones_of(tokens: int, device: torch.device | None = None) -> Tensor:
    """The zone (a number of ``ZONES``) of each of ``tokens`` positions, ``[tokens]`` int64."""
    at = torch.arange(tokens, device=device)
    first, last = min(SINKS, tokens), max(min(SINKS, tokens), tokens - RECENT)
    part = 1 + (at - first) * PARTS // max(1, last - first)
    return torch.where(at < first, 0, torch.where(at >= last, PARTS + 1, part))


class Trace:
    """What one layer was given, and what was seen of its steps.

    Attributes:
        k, v: ``[H, tokens, D]``, as they reached the cache.
        steps: for each step ``covered, error [H, G]`` and ``best, overlap, kept, read [H]``; see ``quality.inspect``.
        at: ``[4, H, tokens]`` float32, sums over the steps at each position: kept, read, mass, missed mass.
        zones: ``[4, H, len(ZONES)]`` float32, the same by zone; ``sizes [len(ZONES)]``: tokens, summed over the steps.
    """

    def __init__(self, layer: LayerCache, tokens: int) -> None:
        facts, self.layer = layer.facts, layer
        shape = (facts.kv_heads, tokens, facts.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=facts.dtype, device=facts.device) for _ in range(2))
        self.at = torch.zeros(4, facts.kv_heads, tokens, device=facts.device)
        self.zones = torch.zeros(4, facts.kv_heads, len(ZONES), device=facts.device)
        self.sizes = torch.zeros(len(ZONES), device=facts.device)
        self.steps: list[dict[str, Tensor]] = []
        self.filled = 0

    def add(self, k: Tensor, v: Tensor) -> None:
        """New tokens ``[H, n, D]``."""
        part = slice(self.filled, self.filled + k.shape[1])
        self.k[:, part], self.v[:, part] = k, v
        self.filled = part.stop

    def note(self, q: Tensor, out: Tensor) -> None:
        """The step that the layer has just taken, with queries ``q [Hq, D]`` and output ``out [Hq, D]``."""
        heads, n = self.layer.facts.kv_heads, self.filled
        mass, want = self._full(q.unflatten(0, (heads, -1)).float())
        kept, read = self._kept(), self._marked(self.layer.attended)
        missed = mass.masked_fill(read.unsqueeze(1), 0.0)
        wrong = (out.unflatten(0, (heads, -1)).float() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
        mean = mass.mean(1)
        best, overlap = against_best(mean, read)
        self.steps.append({
            "covered": (1.0 - missed.sum(-1)).clamp(0.0, 1.0), "best": best, "overlap": overlap, "error": wrong,
            "kept": kept.float().mean(-1), "read": read.float().mean(-1),
        })  # fmt: skip
        seen = torch.stack([kept.float(), read.float(), mean, missed.mean(1)])
        self.at[..., :n] += seen
        zone = torch.nn.functional.one_hot(zones_of(n, q.device), len(ZONES)).float()
        self.zones += seen @ zone
        self.sizes += zone.sum(0)

    def _full(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Full attention of ``q [H, G, D]``: each key's softmax mass ``[H, G, n]``, and the output ``[H, G, D]``."""
        how, n = self.layer.how, self.filled
        scores = torch.matmul(q, self.k[:, :n].float().transpose(1, 2)).mul_(how.scale)
        if how.window is not None:
            scores[..., : max(0, n - how.window)] = float("-inf")
        lse = scores.logsumexp(-1, keepdim=True)
        mass = scores.sub_(lse).exp_()
        out = torch.matmul(mass, self.v[:, :n].float())
        if how.sink is None:
            return mass, out
        sink = how.sink.float().view(*lse.shape)  # takes its part of the output, and is no token
        return mass, out * torch.exp(lse - torch.logaddexp(lse, sink))

    def _kept(self) -> Tensor:
        """``[H, n]`` True for tokens that the step had in its store (evicted ones are not yet overwritten)."""
        store = self.layer.store
        return self._marked([(self.layer.positions(store, store.filled), store.lengths)])

    def _marked(self, sets: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Positions ``[1, H, m]``, the first ``[1, H]`` of them valid -> ``[H, n]`` True at them."""
        found = torch.zeros(len(self.k), self.filled, dtype=torch.int32, device=self.k.device)
        for at, count in sets:
            valid = torch.arange(at.shape[-1], device=at.device) < count[0].unsqueeze(-1)
            found.scatter_add_(1, at[0].clamp(0, self.filled - 1), valid.int())
        return found > 0


def against_best(mass: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """As many best keys by ``mass [H, n]`` as were ``read [H, n]``: their mass, and the share of them that was read.

    ``[H]`` each.
    """
    count = read.sum(-1, keepdim=True)
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    best = torch.arange(mass.shape[-1], device=mass.device) < count
    shared = (read.gather(-1, order) & best).sum(-1) / count.squeeze(-1).clamp(min=1)
    return 1.0 - ordered.masked_fill(best, 0.0).sum(-1), shared


class Watched(KVCache):
    """A cache of one sequence, with a trace of each layer. The strategy's own keys, values and queries are traced."""

    def __init__(
        self,
        strategy: Strategy,
        shape: CacheShape,
        port: Port,
        constants: Sequence[Mapping[str, Tensor]] | None = None,
        tell: Callable[[int], None] = lambda layer: None,
    ) -> None:
        super().__init__(strategy, shape, port, constants, Clock(False, diagnose=True))
        self.tell = tell
        self.traces: list[Trace] = []

    def begin(self, prompts: Sequence[int], reserve: int, *args: Any) -> None:
        assert len(prompts) == 1, "one sequence is looked at"
        super().begin(prompts, reserve, *args)
        self.traces = [Trace(layer, prompts[0] + reserve) for layer in self.layers]

    def prefill(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool = True) -> Tensor:
        self.traces[layer].add(k, v)
        self.tell(layer)
        return super().prefill(layer, row, q, k, v, final)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        trace = self.traces[layer]
        trace.add(k[0].unsqueeze(1), v[0].unsqueeze(1))
        out = super().step(layer, q, k, v)
        trace.note(q[0], out[0])
        return out
