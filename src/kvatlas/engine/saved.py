"""A cache to a file and back, and a copy of its own in memory: everything that its sequences need to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvatlas.engine.cache import KVCache
from kvatlas.engine.layer import LayerCache
from kvatlas.engine.tensorfile import Part, TensorFile, open_tensors, part_of, write_tensors
from kvatlas.errors import UserError
from kvatlas.model.fingerprint import check_identity, identity_of
from kvatlas.strategy.place.forked import fork_blocks
from kvatlas.strategy.place.store import Store
from kvatlas.strategy.spec import parse
from kvatlas.version import __version__

if TYPE_CHECKING:
    from kvatlas.engine.lm import LM


class Source(Protocol):
    """Where a cache's tensors come from, by name."""

    def names(self, start: str) -> list[str]: ...
    def get(self, name: str) -> Tensor: ...


def save(
    cache: KVCache,
    path: str | Path,
    about: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a cache to a safetensors file; the cache is not changed by it.

    Args:
        about, tensors: more for the header and the file (a session's own).

    Raises:
        UserError: a cache that holds nothing, a prompt of which only a part is there, a strategy that no spec names, a
            place that cannot be written.
    """
    _check_whole(cache)
    strategy = cache.strategy
    if parse(strategy.name) != strategy:
        raise UserError(
            f"'{strategy.name}' is not what this name stands for: only caches of a strategy that a spec names can be "
            "saved, or loading could not make it again"
        )
    port: Any = cache.layers[0].port
    header = {
        "kind": "cache",
        "version": __version__,
        "strategy": strategy.name,
        "model": identity_of(port.decoder, port.facts),
        **_told(cache),
        **(about or {}),
    }
    write_tensors(path, [*_parts(cache), part_of(tensors or {})], header)


def load(file: TensorFile, lm: LM, reserve: int | None = None) -> KVCache:
    """The cache in an open file, under the strategy and on the place that it names.

    There is room for ``reserve`` more tokens (None: as it began with), and more when it is needed.

    Raises:
        UserError: when it was made with another model.
    """
    about = file.about
    if about.get("kind") != "cache":
        raise UserError(f"{file.path} is a file of kvatlas, and holds no cache")
    check_identity(about["model"], identity_of(lm.port.decoder, lm.facts), str(file.path))
    constants = [_group(file, f"{i}.constants.", lm.shape.device) for i in range(lm.shape.layers)]
    found = constants if any(constants) else None
    cache = KVCache(parse(about["strategy"]), lm.shape, lm.port, found, alive=lm.alive)
    _restore(cache, about, file, reserve)
    return cache


def load_cache(path: str | Path, lm: LM, reserve: int | None = None) -> tuple[KVCache, dict[str, Any]]:
    """A saved cache and the file's header."""
    if reserve is not None and reserve < 1:
        raise UserError(f"reserve must be at least 1 token, not {reserve}")
    with open_tensors(path) as file:
        return load(file, lm, reserve), file.about


def copy(cache: KVCache) -> KVCache:
    """A cache of its own with the same sequences in the same state: neither ever sees what the other does.

    What lies in a pool is shared until one of the two writes to it; all else is copied.
    """
    _check_whole(cache)
    constants = [layer.constants for layer in cache.layers]
    made = KVCache(cache.strategy, cache.shape, cache.layers[0].port, constants, cache.clock, cache.alive)
    _restore(made, _told(cache), _Live(cache), None, of=cache)
    return made


# ------------------------------------------------------------------- what there is


def _check_whole(cache: KVCache) -> None:
    if not cache.started:
        raise UserError("the cache holds nothing yet; give it a prompt first")
    seen = cache.seen
    if any(layer.intake._began or not torch.equal(layer.seen, seen) for layer in cache.layers):
        raise UserError("a prompt is not all in the cache yet (or was interrupted); it can be saved or copied then")


def _told(cache: KVCache) -> dict[str, Any]:
    """What the header says of a cache."""
    return {
        "prompts": cache.layers[0].prompts,
        "reserve": _reserved(cache),
        "seen": cache.seen.tolist(),
        "layers": [
            {
                "slots": layer._slots,
                "stores": {name: _store_told(store) for name, store in _stores(layer).items()},
            }
            for layer in cache.layers
        ],
    }


def _reserved(cache: KVCache) -> int:
    """The room for new tokens that the cache began with: places may divide what they hold by it."""
    layers = [layer for layer in cache.layers if not layer.facts.windowed] or cache.layers
    return max(1 + layer.store.layout.capacity - layer.capacity_for(layer.prompts, 1) for layer in layers)


def _store_told(store: Store) -> dict[str, Any]:
    lengths = store.lengths.cpu()
    assert bool((lengths == lengths[:, :1]).all()), "all KV heads of a sequence hold equally many tokens"
    return {"lengths": lengths[:, 0].tolist(), "ragged": store.ragged, "holes": store.holes}


def _stores(layer: LayerCache) -> dict[str, Store]:
    return {"kept": layer.store} | ({} if layer.archive is None else {"archive": layer.archive})


def _parts(cache: KVCache) -> Iterator[Part]:
    """Every tensor of a cache, layer by layer; a sequence's columns are read when their turn comes."""
    for i, layer in enumerate(cache.layers):
        yield part_of({f"{i}.{name}": tensor for name, tensor in _rules(layer).items()})
        for label, store in _stores(layer).items():
            for row, n in enumerate(store.lengths[:, 0].tolist()):
                if n:
                    yield _columns(f"{i}.{label}.{row}", store, row, n)
        if layer.place.wants_inputs:
            for row, n in enumerate(layer.seen.tolist()):
                name = f"{i}.inputs.{row}"
                shape = (n, layer.facts.hidden)
                yield Part({name: (layer.facts.dtype, shape)}, partial(_inputs, name, layer.store, row, n))


def _rules(layer: LayerCache) -> dict[str, Tensor]:
    """What a layer's rules know, and which slots are free."""
    out = {f"plan.{key}": value for key, value in layer.plan.items()}
    out |= {f"state.{name}": tensor for name, tensor in layer.state.items()}
    out |= {f"constants.{name}": tensor for name, tensor in layer.constants.items()}
    out |= {f"hole.{label}": _hole(store) for label, store in _stores(layer).items() if store.holes}
    if layer.last_archived is not None:
        out |= dict(zip(("last_archived.slots", "last_archived.keys"), layer.last_archived))
    return out


def _hole(store: Store) -> Tensor:
    """``[B, H]`` the slot that the next token will overwrite, -1 where it comes after the others."""
    return torch.where(store.next < store.lengths, store.next, -1)


def _columns(start: str, store: Store, row: int, n: int) -> Part:
    layout = store.layout
    specs = {f"{start}.{c.name}": (c.dtype, (layout.kv_heads, n, *c.tail)) for c in layout.columns}
    return Part(specs, lambda: {f"{start}.{name}": tensor for name, tensor in store.row_columns(row).items()})


def _inputs(name: str, store: Store, row: int, n: int) -> dict[str, Tensor]:
    return {name: store.row_inputs(row, n)}


class _Live:
    """The tensors of a cache in use, as a source."""

    def __init__(self, cache: KVCache) -> None:
        self._parts = {name: part for part in _parts(cache) for name in part.specs}
        self._last: tuple[Part, Mapping[str, Tensor]] | None = None

    def names(self, start: str) -> list[str]:
        return sorted(name for name in self._parts if name.startswith(start))

    def get(self, name: str) -> Tensor:
        part = self._parts[name]
        if self._last is None or self._last[0] is not part:
            self._last = part, part.read()
        return self._last[1][name]


# ------------------------------------------------------------------- back again


def _restore(
    cache: KVCache, told: Mapping[str, Any], source: Source, reserve: int | None, of: KVCache | None = None
) -> None:
    """Fill a new cache; ``of`` is the one that it becomes a copy of."""
    prompts, seen = told["prompts"], told["seen"]
    room = told["reserve"] if reserve is None else reserve + max(s - p for s, p in zip(seen, prompts))
    cache.begin(prompts, max(1, room))
    forked = [] if of is None else _fork_shared(of, cache)
    for i, (layer, one) in enumerate(zip(cache.layers, told["layers"])):
        layer.seen = torch.tensor(seen, dtype=torch.int64, device=layer.facts.device)
        layer.ends = list(seen)
        _restore_rules(layer, one["slots"], i, source)
        if layer.place.wants_inputs:
            for row in range(len(seen)):
                layer.store.put_inputs(row, 0, source.get(f"{i}.inputs.{row}").to(layer.facts.device))
        for label, store in _stores(layer).items():
            if i not in forked and not (of is not None and store.adopt(_stores(of.layers[i])[label])):
                replaces = label == "kept" and layer.keep.evicts and "capacity" in layer.plan
                _fill(store, one["stores"][label], f"{i}.{label}", source, store.load if replaces else store.extend)
            if hole := source.names(f"{i}.hole.{label}"):
                store.drop(source.get(hole[0]).to(store.layout.device))


def _restore_rules(layer: LayerCache, slots: int, i: int, source: Source) -> None:
    device = layer.facts.device
    layer.plan = _group(source, f"{i}.plan.", device)
    layer.store.most = layer._most()
    layer._slots = slots
    layer.state.update(_group(source, f"{i}.state.", device))
    archived = _group(source, f"{i}.last_archived.", device)
    layer.last_archived = (archived["slots"], archived["keys"]) if archived else None


def _group(source: Source, start: str, device: torch.device) -> dict[str, Tensor]:
    """Copies of all tensors whose names begin so."""
    return {name.removeprefix(start): source.get(name).to(device, copy=True) for name in source.names(start)}


def _fill(
    store: Store, told: Mapping[str, Any], start: str, source: Source, put: Callable[[int, dict[str, Tensor]], None]
) -> None:
    """Put every sequence's columns into an empty store."""
    layout = store.layout
    for row, n in enumerate(told["lengths"]):
        values = {c.name: source.get(f"{start}.{row}.{c.name}").to(layout.device) for c in layout.columns} if n else {}
        for column in layout.columns if n else ():
            found, want = values[column.name], (layout.kv_heads, n, *column.tail)
            if tuple(found.shape) != want or found.dtype != column.dtype:
                raise UserError(
                    f"'{start}.{row}.{column.name}' is {found.dtype} {list(found.shape)} and should be {column.dtype} "
                    f"{list(want)}: it was saved by another version of kvatlas; make it anew"
                )
        if n:
            put(row, values)
    store.ragged = store.ragged or told["ragged"]


def _fork_shared(of: KVCache, cache: KVCache) -> list[int]:
    """Layers whose stores now share what they hold with those of the cache they are forked from."""
    pairs = {i: (a.store, b.store) for i, (a, b) in enumerate(zip(of.layers, cache.layers)) if a.shared is not None}
    forked = fork_blocks(of.shared, pairs)
    if forked is None:
        return []
    of.shared, cache.shared, stores = forked
    for i, (first, second) in stores.items():
        for owner, store in ((of, first), (cache, second)):
            owner.layers[i].shared, owner.layers[i].store = owner.shared, store
    return list(stores)
