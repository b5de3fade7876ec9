"""What `import kvatlas` offers: a model to generate with, a cache for one's own transformers code, and replay."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM, Generation
from kvatlas.engine.replay import Replay, replay
from kvatlas.errors import UserError
from kvatlas.model.bridge import AtlasCache
from kvatlas.model.load import load_model
from kvatlas.strategy.answers import Strategy
from kvatlas.strategy.spec import parse
from kvatlas.workload.text import default_text

__all__ = ["LM", "Generation", "Replay", "UserError", "cache", "load", "replay"]


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


_constants: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _calibrated(lm: LM, strategy: Strategy) -> Any:
    """The strategy's constants, found once a model (with or without a tokenizer). It keeps no model alive."""
    if not strategy.read.calibrates:
        return None
    known, key = _constants.setdefault(lm.model, {}), (strategy.read.calibration(), lm.tokenizer is not None)
    if key not in known:
        lm.calibration = calibration_text()
        known[key] = lm.constants(strategy)
    return known[key]


def calibration_text() -> str:
    """The part of the default text that is never scored."""
    return default_text().split()[0].text
