"""Four answers together: a strategy, how it takes in prompts, and how its budget is divided among the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode, Keep, Place, Read


@dataclass(frozen=True)
class PrefillMode:
    """How a prompt goes through attention.

    ``flash``: whole, in linear memory. ``eager``: with the score matrix. ``chunked``: ``chunk`` tokens at a time,
    exact. ``chunked-isolated``: chunks blind to each other (the study's workaround). With ``evict_chunks`` a keep rule
    evicts after every chunk, so memory peaks at capacity + chunk.
    """

    kind: Literal["flash", "eager", "chunked", "chunked-isolated"] = "flash"
    chunk: int = 0
    evict_chunks: bool = False


@dataclass(frozen=True)
class LayerShares:
    """How a keep rule's budget is divided among the layers it works in; the total stays the same.

    ``pyramid`` falls evenly from the first layer's ``2 - 1/steepness`` to the last one's ``1/steepness`` times the
    mean (PyramidKV, 2024, section 4.2). ``weights`` are the user's own, one a layer.
    """

    weights: tuple[float, ...] | None = None
    steepness: float = 20.0

    def shares(self, layers: int) -> list[float]:
        """One factor a layer, 1 on average.

        Raises:
            UserError: when there are not as many weights as layers.
        """
        if self.weights is None:
            low, high = 1 / self.steepness, 2 - 1 / self.steepness
            return [high + (low - high) * i / max(1, layers - 1) for i in range(layers)] if layers > 1 else [1.0]
        if len(self.weights) != layers:
            raise UserError(f"layers= gives {len(self.weights)} weights, and the rule works in {layers} layers")
        return [w * layers / sum(self.weights) for w in self.weights]


@dataclass(frozen=True)
class Strategy:
    """Four answers and the name they were asked by."""

    name: str
    keep: Keep
    read: Read
    place: Place
    encode: Encode
    prefill: PrefillMode = PrefillMode()
    layers: LayerShares | None = None

    def lossless(self) -> bool:
        """True when it gives ``full``'s tokens in float32."""
        answers = (self.keep, self.read, self.place, self.encode)
        return all(a.lossless() for a in answers) and self.prefill.kind != "chunked-isolated"

    @property
    def prefills_exactly(self) -> bool:
        """A prompt's attention is over all raw keys before a query, whatever is stored of them.

        Not so when chunks are blind to each other, or when a chunk meets what an earlier one left: evicted, or encoded
        and decoded.
        """
        mode = self.prefill
        return mode.chunk == 0 or (mode.kind == "chunked" and not mode.evict_chunks and self.encode.raw)

    @property
    def calibrates(self) -> bool:
        """Something of the model has to be known first."""
        return self.read.calibrates or self.encode.calibrates

    def answers(self) -> dict[str, str]:
        """The four answers in words."""
        return {q: getattr(self, q).words() for q in ("keep", "read", "place", "encode")}
