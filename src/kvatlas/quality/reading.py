"""Compress, then read: contexts through one prefill for all strategies, then tokens one by one through each cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM
from kvatlas.engine.recorded import prefill_many

Progress = Callable[[str, float], None]
"""``progress(what, share)``: what is being done, and how much of the whole is done (0 to 1)."""

CACHE_BYTES = 4 << 30
"""What the caches of all strategies together may hold (an upper estimate); more contexts wait for their turn."""

EVERY = 4
"""Steps between two looks at what is kept and read."""


@dataclass(slots=True)
class Fractions:
    """Realised fractions, one sample for every few steps (``EVERY``)."""

    kept: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    def note(self, cache: KVCache) -> None:
        """Add what the last step kept and read."""
        now = cache.realised()
        self.kept.append(now.kept)
        self.read.append(now.read)


def part_of(progress: Progress | None, start: float, size: float, name: str = "") -> Progress:
    """The progress of a part, which begins at ``start`` of the whole and is ``size`` of it."""

    def tell(what: str, share: float) -> None:
        if progress is not None:
            progress(f"{name}: {what}" if name else what, start + size * share)

    return tell


def compressed(
    lm: LM, specs: Sequence[str], contexts: Sequence[Sequence[int]], reserve: int
) -> Iterator[tuple[str, KVCache]]:
    """Each strategy with its cache, after the contexts (token ids) and the compression, ``reserve`` tokens to come.

    A cache is handed over: nothing else holds it, and the next is filled when it is asked for.
    """
    filled = prefill_many(lm, [lm.new_cache(spec) for spec in specs], contexts, reserve)
    for spec in specs:
        yield spec, next(filled)[0]


def steps(lm: LM, cache: KVCache, tokens: Tensor, fractions: Fractions) -> Iterator[Tensor]:
    """Feed ``tokens [B, n]`` one column at a time (teacher forcing); yields the logits ``[B, V]`` after each."""
    for i in range(tokens.shape[1]):
        logits = lm.step(cache, tokens[:, i])
        if i % EVERY == 0:
            fractions.note(cache)
        yield logits


def rows_at_once(lm: LM, strategies: int, tokens: int) -> int:
    """How many contexts of ``tokens`` tokens fit into ``CACHE_BYTES`` under all strategies, if each kept everything."""
    shape = lm.shape
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    return max(1, CACHE_BYTES // (strategies * tokens * token))
