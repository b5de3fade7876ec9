"""The one file that touches transformers' hooks: it lets a cache of ours answer for a model's attention.

How: a pre-hook on the decoder sees one of our caches among the arguments and makes it the active one of this thread's
forward; while it is, the config names our attention, so each layer calls ``attention`` below. ``Cache.update`` only
passes the new keys and values through; the attention call does the step. Outside such a forward the model is as it was:
another cache, or another thread, gets the model's own attention and mask. Tested with transformers 5.17 to 5.24.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, proxy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvatlas.errors import UserError
from kvatlas.model.facts import attentions_of, decoder_of, facts_of

NAME = "kvatlas"
"""Of our attention and mask functions in transformers' registries."""


class Driven(Protocol):
    """What the bridge drives (``engine.cache.KVCache``)."""

    started: bool

    @property
    def foresees(self) -> bool: ...
    @property
    def wants_inputs(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    def begin(self, prompts: Sequence[int], reserve: int) -> None: ...
    def prefill(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool) -> Tensor: ...
    def finish_prefill(self, row: int) -> None: ...
    def foresee(self, layer: int, x: Tensor) -> None: ...
    def inputs(self, layer: int, x: Tensor, row: int | None = None) -> None: ...
    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def select_rows(self, rows: Tensor) -> None: ...


@dataclass(slots=True)
class Forward:
    """One forward under way.

    ``runs[b]`` is the slice of the batch's columns with real tokens of sequence ``rows[b]``; None in a decode step.
    """

    cache: Driven
    rows: list[int]
    runs: list[slice] | None
    final: bool
    seen_layers: int = 0


_active: ContextVar[Forward | None] = ContextVar("kvatlas_forward", default=None)


class AtlasCache(Cache):
    """A transformers cache that is driven by a strategy.

    ``get_seq_length`` counts all columns that went in (padding included, as transformers does), never the kept ones, so
    positions stay true. ``rows`` names the sequences of ``kv`` that take part; None: all, begun at the first call.
    """

    def __init__(
        self, kv: Driven, layers: int, rows: list[int] | None = None, reserve: int = 256, seen: int = 0
    ) -> None:
        super().__init__(layers=[AtlasLayer(self) for _ in range(layers)])
        self.kv, self.rows, self.reserve = kv, rows, reserve
        self.columns, self.final = seen, True
        self._token: Any = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """The attention call that follows stores them; here they only pass."""
        if _active.get() is None:
            raise UserError("a kvatlas cache works with the model it was made for: kvatlas.cache(strategy, model)")
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.kv.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.kv.select_rows(torch.arange(self.kv.rows)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.kv.select_rows(torch.arange(self.kv.rows).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UserError("a kvatlas cache cannot be cropped: what a strategy evicted cannot come back")

    def reset(self) -> None:
        raise UserError("a kvatlas cache serves one batch; make a new one with kvatlas.cache(strategy, model)")


class AtlasLayer(CacheLayerMixin):
    """What transformers asks of a layer, answered by the whole cache."""

    is_compileable = False
    is_sliding = False
    is_croppable = False

    def __init__(self, owner: AtlasCache) -> None:
        super().__init__()
        self._owner = proxy(owner)  # the cache's memory goes with its last user, not with the next collection

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._owner.columns

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class Bridge:
    """The hooks on one model, in place while one of its caches lives."""

    def __init__(self, model: PreTrainedModel) -> None:
        check_served(model)
        self.decoder = decoder_of(model)
        self.attentions = attentions_of(model)
        self.number = {id(module): i for i, module in enumerate(self.attentions)}
        self.configs = _distinct([self.decoder.config, *[m.config for m in self.attentions if hasattr(m, "config")]])
        self.own = [config._attn_implementation for config in self.configs]
        self.lock, self.depth = threading.Lock(), 0
        self.caches: WeakSet[AtlasCache] = WeakSet()
        self.handles: list[Any] = []

    def watch(self, cache: AtlasCache) -> None:
        """Put the hooks in place until the last watched cache is gone."""
        self.caches.add(cache)
        if self.handles:
            return
        decoder = self.decoder
        self.handles = [
            decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            decoder.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            *[m.register_forward_pre_hook(self._layer_input, with_kwargs=True) for m in self.attentions],
        ]

    def _unwatch_if_idle(self) -> None:
        if not self.caches:
            for handle in self.handles:
                handle.remove()
            self.handles = []

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = _cache_among(kwargs)
        if cache is None:
            self._unwatch_if_idle()
            return
        if cache not in self.caches:
            raise UserError(
                "a kvatlas cache was given to a model it was not made for: use kvatlas.cache(strategy, model)"
            )
        batch, length = _size(args, kwargs)
        forward = _begin(cache, batch, length, kwargs.get("attention_mask"))
        with self.lock:
            if self.depth == 0:  # the user may have chosen another attention since
                self.own = [config._attn_implementation for config in self.configs]
            self.depth += 1
            for config in self.configs:
                config._attn_implementation = NAME
        cache._token = _active.set(forward)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = _cache_among(kwargs)
        forward = _active.get()
        if cache is None or forward is None:
            return
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                for config, own in zip(self.configs, self.own):
                    config._attn_implementation = own
        _active.reset(cache._token)
        if output is None:  # the forward failed
            return
        if forward.seen_layers != len(self.attentions):
            raise UserError(
                f"{type(module).__name__} did not hand its attention to the bridge in every layer "
                f"({forward.seen_layers} of {len(self.attentions)}); this architecture cannot be served"
            )
        cache.columns += _size(args, kwargs)[1]
        if forward.runs is not None and cache.rows is None:  # whoever names rows says himself when a prompt ends
            for row in forward.rows:
                forward.cache.finish_prefill(row)

    def _layer_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = _active.get()
        if forward is None or not (forward.cache.foresees or forward.cache.wants_inputs):
            return
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layer, cache = self.number[id(module)], forward.cache
        if forward.runs is None and cache.foresees:
            cache.foresee(layer, x)
        if not cache.wants_inputs:
            return
        if forward.runs is None:
            cache.inputs(layer, x[:, 0])
            return
        for b, (row, run) in enumerate(zip(forward.rows, forward.runs)):
            cache.inputs(layer, x[b, run], row)


_bridges: WeakKeyDictionary[nn.Module, Bridge] = WeakKeyDictionary()


def bridge_of(model: PreTrainedModel) -> Bridge:
    """The model's bridge, made at the first call.

    Raises:
        UserError: for an architecture that cannot be served.
    """
    if model not in _bridges:
        _bridges[model] = Bridge(model)
    return _bridges[model]


def check_served(model: PreTrainedModel) -> None:
    """Raise UserError with the reason when the bridge cannot serve this architecture."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name} has an encoder; a KV-cache strategy needs a decoder-only model")
    facts = facts_of(model)
    if facts.positions == "alibi":
        raise UserError(f"{name} uses ALiBi biases, which the attention here does not do; choose a model with RoPE")
    if not getattr(model, "_supports_attention_backend", True):
        raise UserError(f"{name} does not call transformers' attention interface, so the bridge cannot serve it")
    if facts.softcap is not None:
        raise UserError(f"{name} caps its attention logits ({facts.softcap:g}), which the attention here does not do")


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Registered as transformers' attention: the active cache's step, or the model's own attention."""
    forward = _active.get()
    if forward is None:
        return _own_attention(module)(module, query, key, value, attention_mask, **kwargs)
    bridge = _bridge_with(module)
    layer, cache = bridge.number[id(module)], forward.cache
    forward.seen_layers += 1
    if forward.runs is None:
        out = cache.step(layer, query[:, :, 0].contiguous(), key[:, :, 0], value[:, :, 0])
        return out.unsqueeze(1), None
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
    for b, (row, run) in enumerate(zip(forward.rows, forward.runs)):  # prefill is one sequence at a time
        out[b, run] = cache.prefill(layer, row, query[b, :, run], key[b, :, run], value[b, :, run], forward.final)
    return out, None


def mask(*args: Any, **kwargs: Any) -> Any:
    """Registered under the same name: our attention needs no mask; others get their own kind."""
    if _active.get() is not None:
        return None
    config = kwargs.get("config")
    own = next((o for b in _bridges.values() for c, o in zip(b.configs, b.own) if c is config), "sdpa")
    return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


def _begin(cache: AtlasCache, batch: int, length: int, mask2d: Any) -> Forward:
    kv = cache.kv
    if cache.rows is None and kv.started and kv.rows != batch:
        raise UserError(f"this cache holds {kv.rows} sequences, and the call has {batch}")
    rows = cache.rows if cache.rows is not None else list(range(batch))
    if length == 1 and cache.columns > 0 and cache.rows is None:
        return Forward(kv, rows, None, cache.final)
    runs = _runs(batch, length, mask2d)
    if any(run.start >= run.stop for run in runs):
        raise UserError("a sequence of the batch has no token that the attention mask lets through")
    if not kv.started:
        kv.begin([run.stop - run.start for run in runs], cache.reserve)
    return Forward(kv, rows, runs, cache.final)


def _runs(batch: int, length: int, mask2d: Any) -> list[slice]:
    """Where each sequence's real tokens are among the new columns; padding may stand on either side."""
    if mask2d is None or isinstance(mask2d, dict):
        if isinstance(mask2d, dict):
            raise UserError("ready-made masks cannot be used with a kvatlas cache; pass the 2-D attention_mask")
        return [slice(0, length)] * batch
    if mask2d.dim() != 2:
        raise UserError("a kvatlas cache needs the 2-D attention_mask (1 = token, 0 = padding), not a ready-made one")
    real = mask2d[:, -length:].bool()
    counts = real.sum(1).tolist()
    starts = real.int().argmax(1).tolist()
    runs = [slice(start, start + count) for start, count in zip(starts, counts)]
    if any(not bool(real[b, run].all()) for b, run in enumerate(runs)):
        raise UserError("the attention mask has holes; a sequence's tokens must be one run, padded on either side")
    return runs


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Batch and length of a decoder's input."""
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    ids = next(x for x in given if x is not None)
    return ids.shape[0], ids.shape[1]


def _cache_among(kwargs: dict[str, Any]) -> AtlasCache | None:
    for name in ("cache", "past_key_values"):
        if isinstance(kwargs.get(name), AtlasCache):
            return kwargs[name]
    return None


def _bridge_with(module: nn.Module) -> Bridge:
    for bridge in _bridges.values():
        if id(module) in bridge.number:
            return bridge
    raise UserError("a kvatlas cache was given to a model it was not made for: use kvatlas.cache(strategy, model)")


def _own_attention(module: nn.Module) -> Any:
    own = next((o for b in _bridges.values() for c, o in zip(b.configs, b.own) if c is module.config), "sdpa")
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)


def _distinct(configs: list[Any]) -> list[Any]:
    return list({id(config): config for config in configs}.values())
