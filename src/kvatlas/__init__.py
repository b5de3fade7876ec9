"""KV Atlas: measure, choose and use KV-cache strategies.

``load`` gives a model to generate with, ``cache`` a cache for your own transformers code, ``replay`` runs a strategy on
recorded attention. Importing this package imports nothing heavy; each of them does when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LM", "Generation", "UserError", "__version__", "cache", "load", "replay"]

if TYPE_CHECKING:
    from kvatlas.api import LM, Generation, UserError, cache, load, replay


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvatlas' has no attribute {name!r}")
    from kvatlas import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
