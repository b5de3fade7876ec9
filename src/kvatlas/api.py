"""What `import kvatlas` offers: a model to generate with, a cache for one's own transformers code, and replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload
from weakref import WeakKeyDictionary

from kvatlas.engine import saved
from kvatlas.engine.cache import KVCache
from kvatlas.engine.calibrate import calibrated
from kvatlas.engine.lm import LM, Generation
from kvatlas.engine.replay import Replay, replay
from kvatlas.engine.session import Session
from kvatlas.errors import UserError
from kvatlas.model.bridge import AtlasCache
from kvatlas.model.load import load_model
from kvatlas.quality.inspect import Inspection, inspect
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy
from kvatlas.workload.text import default_text

__all__ = [
    "LM", "Generation", "Inspection", "Replay", "Session", "UserError", "cache", "inspect", "load", "load_cache",
    "replay", "save_cache",
]  # fmt: skip


def load(
    name: str = "smollm2",
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    *,
    seed: int = 0,
    calibration: str | None = None,
) -> LM:
    """A model to generate with under any strategy.

    Args:
        name: ``smollm2``, a local folder with safetensors, or a hub id.
        dtype: ``float32``, ``bfloat16`` or ``auto`` (float32).
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        load_format: ``dummy`` gives the architecture random weights drawn from ``seed``.
        calibration: text for strategies that are calibrated once a model; None: the part of the default text that is
            set aside for it.

    Raises:
        UserError: what cannot be loaded and what to do, or an architecture that cannot be served.
    """
    loaded = load_model(name, dtype, device, load_format, seed)
    return LM(loaded.model, loaded.tokenizer, calibration or calibration_text())


def cache(strategy: str | Strategy, model: Any, *, reserve: int = 256, tokenizer: Any = None) -> AtlasCache:
    """A cache for ``model.generate(**inputs, cache=...)`` (``past_key_values=...`` before transformers 5.2x).

    It serves one batch, padded or not, of any transformers decoder that the bridge serves; the model itself is not
    changed. Pass the ``tokenizer`` when the strategy is calibrated on the model (infinigen); without one it is
    calibrated on random tokens. ``reserve`` is how many new tokens to make room for at first; a longer answer makes the
    cache grow.

    Raises:
        UserError: an unknown strategy, or an architecture that cannot be served.
    """
    chosen = parse(strategy)
    if not hasattr(model, "config"):
        raise UserError(f"kvatlas.cache wants a transformers model, not {type(model).__name__}")
    if reserve < 1:
        raise UserError(f"reserve must be at least 1 token, not {reserve}")
    lm = LM(model, tokenizer, lean=False)  # lean would rearrange the user's weights
    kv = KVCache(chosen, lm.shape, lm.port, _calibrated(lm, chosen))
    made = AtlasCache(kv, lm.facts.layers, reserve=reserve)
    lm.bridge.watch(made)
    return made


def save_cache(cache: KVCache | AtlasCache, path: str | Path) -> None:
    """Write a cache, with all that its sequences need to go on, to a safetensors file.

    The cache goes on unchanged. The file is written beside ``path`` first, so that a failure leaves what was there.

    Args:
        cache: what ``LM.new_cache`` made and ``LM.prefill`` filled, or a ``kvatlas.cache`` that was generated with.
        path: of the file, in a folder that exists.

    Raises:
        UserError: a cache that holds nothing or only a part of a prompt, a file that cannot be written.
    """
    if isinstance(cache, AtlasCache):
        kv: Any = cache.kv
        saved.save(kv, path, {"columns": cache.columns})
    else:
        saved.save(cache, path)


@overload
def load_cache(path: str | Path, lm: LM, *, reserve: int | None = None) -> KVCache: ...
@overload
def load_cache(path: str | Path, lm: Any, *, reserve: int | None = None) -> Any: ...
def load_cache(path: str | Path, lm: Any, *, reserve: int | None = None) -> Any:
    """A saved cache, under the strategy and on the place that it had.

    Args:
        path: a file that ``save_cache`` (or ``Session.save``) wrote.
        lm: the model that the cache was made with: what ``load`` gave, or a transformers model, for which the cache is
            one for ``model.generate``.
        reserve: new tokens to make room for at first; None: as many as the saved cache began with.

    Raises:
        UserError: no such file, none of ours, another model or dtype, a newer format, a damaged file.
    """
    if isinstance(lm, LM):
        return saved.load_cache(path, lm, reserve)[0]
    if not hasattr(lm, "config"):
        raise UserError(f"kvatlas.load_cache wants what kvatlas.load gave or a model, not {type(lm).__name__}")
    served = LM(lm, lean=False)  # lean would rearrange the user's weights
    kv, about = saved.load_cache(path, served, reserve)
    if "columns" not in about:
        raise UserError(f"{path} was saved from an LM's cache; load it with what kvatlas.load gives")
    made = AtlasCache(kv, served.facts.layers, seen=about["columns"])
    served.bridge.watch(made)
    return made


_constants: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _calibrated(lm: LM, strategy: Strategy) -> Any:
    """The strategy's constants, found once a model (with or without a tokenizer). It keeps no model alive."""
    answers = calibrated(strategy)
    if not answers:
        return None
    keys = (*(answer.calibration() for answer in answers), lm.tokenizer is not None)
    known = _constants.setdefault(lm.model, {})
    if keys not in known:
        lm.calibration = calibration_text()
        known[keys] = lm.constants(strategy)
    return known[keys]


def calibration_text() -> str:
    """The part of the default text that is never scored."""
    return default_text().split()[0].text
