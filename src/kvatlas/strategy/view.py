"""What a rule is shown and what it may say: a layer's facts, columns over slots, views of them, selections of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor over slots, ``[B, H, capacity, *tail]``; all columns of a layer move together."""

    name: str
    tail: tuple[int, ...]
    dtype: torch.dtype
    kind: Literal["payload", "metadata"] = "metadata"

    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        size = torch.empty((), dtype=self.dtype).element_size()
        for n in self.tail:
            size *= n
        return size


POS = Column("pos", (), torch.int32)
"""True position of a slot's token. Stored only where slots can lose their order."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What an answer may know of the layer it works in."""

    layer: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    windowed: bool = False
    hidden: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class Port(Protocol):
    """All that a strategy may ask of the model."""

    def project_query(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Attention input ``[B, T, hidden]`` at ``[B, T]`` -> queries ``[B, Hq, T, D]`` as they reach attention."""
        ...

    def rotate(self, layer: int, q: Tensor, from_positions: Tensor, to_positions: Tensor) -> Tensor:
        """Queries or keys ``[B, H, T, D]`` turned from positions ``[B, T]`` or ``[B, H, T]`` to others."""
        ...

    def recompute(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input ``[B, T, hidden]`` at ``[B, T]`` -> keys and values ``[B, H, T, D]`` for attention."""
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Slots to attend to: ``index [B, H, n]`` int64, the first ``count [B, H]`` valid.

    ``scanned`` is how many bytes the choice itself had to look at. Where ``foreseen`` was chosen (and perhaps fetched)
    ahead, ``index`` ends with its index, and what comes before is new. ``query_at [B]`` is the position from which
    these keys are seen (None: the query's own); ``beside`` is a second set, seen from elsewhere.
    """

    index: Tensor
    count: Tensor
    scanned: int = 0
    foreseen: Selection | None = None
    query_at: Tensor | None = None
    beside: Selection | None = None

    def parts(self) -> Iterator[Selection]:
        """This set and the ones beside it."""
        part: Selection | None = self
        while part is not None:
            yield part
            part = part.beside

    def counts(self) -> Tensor:
        """``[B, H]`` slots attended to, of all sets."""
        return self.count if self.beside is None else self.count + self.beside.counts()


@dataclass(frozen=True, slots=True)
class Span:
    """Slots ``start`` .. ``stop`` - 1 (None: the end), seen from ``query_at [B]`` (None: the query's own position)."""

    start: int
    stop: int | None
    query_at: Tensor | None


@dataclass(slots=True)
class View:
    """What a rule sees of one layer: all sequences in decode (B), one sequence's candidates in prefill (B = 1).

    Attributes:
        layer: facts of the layer.
        column: a column ``[B, H, n, ...]`` of the filled slots; writes reach the store.
        lengths: ``[B, H]`` int64 filled slots.
        width: n, the largest of them.
        now: ``[B]`` int64 true position of the newest token.
        plan: what ``Keep.plan`` said for each sequence, as ``[B]`` int64 tensors.
        weights: ``[B, Hq, n]`` float32: this step's softmax weights, or prefill's statistic. None if not asked for.
        newest: ``[B, H]`` slot of the newest token (decode only).
        key: ``[B, H, D]`` its key, raw (decode only).
        run: how many tokens at the end have just come (prefill only).
        selection: what was read, where not everything was.
        state: the read rule's tensors, one row per sequence.
        constants: what calibration found for the layer.
        port: what the rule may ask of the model (read rules only).
        keys: decoded keys ``[B, H, n, D]`` (for oracles; costs a full read).
        hole: ``[B, H]`` slot that the next token will overwrite, where one was dropped.
        ragged: not all sequences fill ``width`` slots.
    """

    layer: LayerFacts
    column: Callable[[str], Tensor]
    lengths: Tensor
    width: int
    now: Tensor
    plan: Mapping[str, Tensor]
    weights: Tensor | None = None
    newest: Tensor | None = None
    key: Tensor | None = None
    run: int = 0
    selection: Selection | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    port: Port | None = None
    keys: Callable[[], Tensor] | None = None
    hole: Tensor | None = None
    ragged: bool = True

    def empty(self) -> Tensor | None:
        """``[B, H, n]`` True for slots that hold nothing; None when all are filled."""
        if not self.ragged and self.hole is None:
            return None
        slots = torch.arange(self.width, device=self.lengths.device)
        empty = slots >= self.lengths.unsqueeze(-1)
        return empty if self.hole is None else empty | (slots == self.hole.unsqueeze(-1))


Combine = Literal["mean", "max", "sum"]
"""How the scores of the query heads of a group become one score of their KV head."""


def fold(per_query_head: Tensor, kv_heads: int, how: Combine) -> Tensor:
    """``[B, Hq, n]`` -> ``[B, H, n]``."""
    grouped = per_query_head.unflatten(1, (kv_heads, -1))
    if grouped.shape[2] == 1:
        return grouped.squeeze(2)
    if how == "max":
        return grouped.amax(2)
    return grouped.mean(2) if how == "mean" else grouped.sum(2)
