"""The KV cache of a batch: one LayerCache a layer, driven by whoever runs the model."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvatlas.attention.prefill import Prefill
from kvatlas.engine.clock import Clock
from kvatlas.engine.layer import LayerCache
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode, Keep, Read, Transfers
from kvatlas.strategy.budget import divide_budget
from kvatlas.strategy.keep.window import Window
from kvatlas.strategy.place.device import Device
from kvatlas.strategy.place.store import Bytes
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import LayerFacts, Port


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The model's facts that a cache needs, one entry a layer where it is a tuple."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    scales: tuple[float, ...]
    sinks: tuple[Tensor | None, ...]
    dtype: torch.dtype
    device: torch.device
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Realised:
    """Fractions of all tokens seen, over the layers that the strategy works in (a model's own windows left out)."""

    kept: float
    read: float
    read_bytes: int
    scanned_bytes: int


class KVCache:
    """The cache of a batch of sequences under one strategy.

    Args:
        strategy: the four answers.
        shape: of the model.
        port: what a strategy may ask of the model.
        constants: per layer, what ``read.calibrate`` found.
        clock: where a step's time goes.
        alive: what caches of this model hold together, by strategy (weak). None: this cache and its copies alone.

    Layers with a sliding window of their own keep that window, whatever the strategy.
    """

    def __init__(
        self,
        strategy: Strategy,
        shape: CacheShape,
        port: Port,
        constants: Sequence[Mapping[str, Tensor]] | None = None,
        clock: Clock | None = None,
        alive: MutableMapping[Strategy, Any] | None = None,
    ) -> None:
        if strategy.calibrates and constants is None:
            raise UserError(f"'{strategy.name}' must be calibrated on the model first (kvatlas.load does that)")
        self.strategy, self.shape, self.clock = strategy, shape, clock or Clock(False)
        self.shared = strategy.place.shared(shape.layers)
        self.alive = WeakValueDictionary[Strategy, Any]() if alive is None else alive
        if self.shared is not None:
            self.shared.join(self.alive, strategy)
        self._keeps = self._layer_keeps()
        self.layers = [self._layer(i, port, constants) for i in range(shape.layers)]
        self.foresees = any(layer.read.foresees for layer in self.layers)  # wants the attention input of the one before
        self.started = False

    def _layer_keeps(self) -> dict[int, Keep]:
        """The keep rule of each layer that the strategy works in, with its share of the budget."""
        keep, layers = self.strategy.keep, self.strategy.layers
        own = [i for i, window in enumerate(self.shape.windows) if window is None]
        if layers is None or not own:
            return dict.fromkeys(own, keep)
        budgets = divide_budget(keep.budget, layers.shares(len(own)))
        return {i: keep.with_budget(budget) for i, budget in zip(own, budgets)}

    def _layer(self, i: int, port: Port, constants: Sequence[Mapping[str, Tensor]] | None) -> LayerCache:
        shape, window = self.shape, self.shape.windows[i]
        facts = LayerFacts(
            i, shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.dtype, shape.device, shape.scales[i],
            windowed=window is not None, hidden=shape.hidden,
        )  # fmt: skip
        how = Prefill(shape.scales[i], window, shape.sinks[i], self.strategy.prefill.kind == "eager")
        if window is not None:
            keep = Window(tokens=max(1, window - 1))
            own = replace(self.strategy, keep=keep, read=Read(), place=Device(), encode=Encode())
            return LayerCache(own, facts, how, port, None, None, self.clock)
        own = replace(self.strategy, keep=self._keeps[i])
        return LayerCache(own, facts, how, port, self.shared, constants[i] if constants else None, self.clock)

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return len(self.layers[0].prompts)

    @property
    def seen(self) -> Tensor:
        """``[B]`` int64: tokens that each sequence has had, kept or not."""
        return self.layers[-1].seen

    def begin(self, prompts: Sequence[int], reserve: int, reused: Sequence[int] = ()) -> None:
        """Start sequences with prompts of these lengths, ``reserve`` tokens to come."""
        assert prompts and min(prompts) >= 1, "a sequence has at least one token"
        for layer in self.layers:
            layer.begin(list(prompts), reserve, list(reused))
        self.started = True

    def match_prefix(self, row: int, ids: list[int]) -> int:
        """A sequence's first prompt is about to come: how many of its first tokens need not be computed."""
        self.announce(row, ids)
        keep, read, encode = self.strategy.keep, self.strategy.read, self.strategy.encode
        # an encoder's state would lack the tokens that are reused
        simple = not (keep.evicts or read.whole_prompt or encode.begin(self.layers[-1].facts))
        own_windows = any(w is not None for w in self.shape.windows)
        if self.shared is None or not simple or own_windows:
            return 0
        reused = self.shared.match_prefix(row, ids)
        for layer in self.layers:
            layer.store.begin(row, reused)
            layer.seen[row] = reused
        return reused

    def announce(self, row: int, ids: Sequence[int]) -> None:
        """A sequence's first prompt is about to come; what is stored of it may be known by its text."""
        if self.shared is not None and self.strategy.prefills_exactly:
            self.shared.announce(row, ids)

    def finish_prefill(self, row: int, ids: list[int] | None = None) -> None:
        """All layers have had a sequence's whole prompt."""
        if self.shared is not None:
            self.shared.announce(row, ())
            if ids is not None:
                self.shared.register(row, ids)
        acting = [layer for layer in self.layers if layer.read.selects]
        states = [{name: tensor[row] for name, tensor in layer.state.items()} for layer in acting]
        found = self.strategy.read.finish_prefill(states) if acting else {}
        for layer in acting if found else ():
            layer.set_state(row, found)

    def expect(self, row: int, more: int) -> None:
        """A run of ``more`` tokens of one sequence is about to come, perhaps in chunks."""
        for layer in self.layers:
            layer.expect(row, more)

    def prefill(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool = True) -> Tensor:
        """New tokens of one sequence: ``q [Hq, T, D]``, ``k, v [H, T, D]`` -> ``[T, Hq, D]``."""
        return self.layers[layer].prefill(row, q.contiguous(), k.contiguous(), v.contiguous(), final)

    def foresee(self, layer: int, x: Tensor) -> None:
        """Layer ``layer`` is about to run on attention input ``x [B, 1, hidden]``: the next one may look ahead."""
        if layer + 1 < len(self.layers):
            self.layers[layer + 1].foresee(x)

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new token per sequence: ``q [B, Hq, D]``, ``k, v [B, H, D]`` -> ``[B, Hq, D]``."""
        if layer + 1 < len(self.layers):
            self.layers[layer + 1].read_ahead()
        return self.layers[layer].step(q, k, v)

    def inputs(self, layer: int, x: Tensor, row: int | None = None) -> None:
        """Layer ``layer``'s attention input: a run's ``[T, hidden]`` of one sequence, or a step's ``[B, hidden]``."""
        if self.layers[layer].place.wants_inputs:
            if row is None:
                self.layers[layer].append_inputs(x)
            else:
                self.layers[layer].put_inputs(row, x)

    @property
    def wants_inputs(self) -> bool:
        """Some layer's store keeps the attention inputs."""
        return self.strategy.place.wants_inputs

    def select_rows(self, rows: Tensor | Sequence[int]) -> None:
        """Keep, reorder or repeat sequences (forking one repeats it); their state follows."""
        # a new tensor for each call: a place that layers share tells by it which of them comes first
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.shape.device).clone()
        for layer in self.layers:
            layer.select_rows(index)

    def bytes(self) -> Bytes:
        """Bytes held in all layers, by tier and purpose."""
        total = Bytes()
        for layer in self.layers:
            total += layer.bytes()
        return total + Bytes(device_metadata=self.shared.device_bytes() if self.shared is not None else 0)

    def bytes_held(self, prompts: Sequence[int], reserve: int) -> int:
        """What ``bytes().total`` is in decode, in closed form, from shapes alone.

        For sequences with prompts of these lengths and at most ``reserve`` tokens to come; prefixes that are shared,
        rows that are forked or dropped, and staging that was not yet needed make the difference to it.
        """
        lengths, staging = list(prompts), dict[bool, int]()
        for layer in self.layers:
            if layer.shared is not None:
                layout = layer.planned_archive(lengths, reserve) or layer.planned(lengths, reserve)
                staging[layer.read.selects] = layer.place.staging(layout)
        return sum(layer.bytes_held(lengths, reserve) for layer in self.layers) + sum(staging.values())

    def transfers(self) -> Transfers:
        """Copies between tiers so far."""
        return self.shared.transfers() if self.shared is not None else Transfers()

    def realised(self) -> Realised:
        """What the last step kept and read, as fractions of all tokens."""
        own = [layer for layer in self.layers if not layer.facts.windowed]
        seen = sum(float(layer.seen.sum()) for layer in own)
        kept = sum(layer.held_tokens() for layer in own)
        read = sum(layer.read_tokens() for layer in own)
        return Realised(
            kept / max(seen, 1.0),
            read / max(seen, 1.0),
            sum(layer.read_bytes() for layer in self.layers),
            sum(layer.selection.scanned for layer in self.layers if layer.selection is not None),
        )
