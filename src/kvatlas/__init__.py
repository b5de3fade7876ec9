"""KV Atlas: measure, choose and use KV-cache strategies.

``load`` gives a model to generate with, ``cache`` a cache for your own transformers code, ``save_cache`` and
``load_cache`` put one into a file and back, ``replay`` runs a strategy on recorded attention, ``inspect`` looks at
what one reads. Importing this package imports nothing heavy; each of them does when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvatlas.version import __version__

__all__ = [
    "LM", "Generation", "Session", "UserError", "__version__", "cache", "inspect", "load", "load_cache", "replay",
    "save_cache",
]  # fmt: skip

if TYPE_CHECKING:
    from kvatlas.api import LM, Generation, Session, UserError, cache, inspect, load, load_cache, replay, save_cache


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvatlas' has no attribute {name!r}")
    from kvatlas import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
