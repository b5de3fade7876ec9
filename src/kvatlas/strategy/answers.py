"""The four questions. A strategy is one answer to each; nothing above this package knows a method's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kvatlas.attention.tiles import Wants
from kvatlas.errors import UserError

if TYPE_CHECKING:
    from kvatlas.attention.tiles import Packed
    from kvatlas.strategy.place.store import Store


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


@dataclass(frozen=True)
class Answer:
    """Common to all four: ``source`` names where the method comes from, ``words`` says the answer in a few words."""

    source: ClassVar[str] = "-"

    def words(self) -> str:
        return type(self).__name__.lower()

    def lossless(self) -> bool:
        """True when this answer, so set, never changes a token."""
        return True

    def check(self, strategy: Strategy) -> None:
        """Raise UserError when the other answers do not go with this one."""


@dataclass(frozen=True)
class Keep(Answer):
    """Which tokens stay. The base class keeps all."""

    budget: float = 1.0
    evicts: ClassVar[bool] = False

    def words(self) -> str:
        return "all"

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        """Metadata that this rule keeps for each slot."""
        return ()

    def plan(self, length: int) -> dict[str, int]:
        """Per-sequence whole numbers for a prompt of ``length`` tokens. ``capacity`` is the most slots it will hold."""
        return {}

    def grows(self) -> bool:
        """True when generated tokens are added without limit."""
        return True

    def with_budget(self, budget: float) -> Keep:
        """This rule with another budget, for one layer of a cache whose layers differ."""
        return replace(self, budget=budget)

    def wants(self) -> Wants | None:
        """Statistic asked of prefill attention; not None also asks for each decode step's weights."""
        return None

    def fresh(self, positions: Tensor, kv_heads: int) -> dict[str, Tensor]:
        """Metadata of new tokens at ``positions [B, n]``, ``[B, H, n]`` each; what is not named starts at zero."""
        return {}

    def observe(self, view: View) -> None:
        """Learn from ``view.weights``."""

    def survivors(self, view: View) -> Tensor | None:
        """After a prefill: candidates ``[1, H, m]`` that stay, in ascending order. None = all."""
        return None

    def victims(self, view: View) -> Tensor | None:
        """After a decode step: the slot ``[B, H]`` to free, -1 for none. None = none anywhere."""
        return None

    def spans(self, view: View) -> tuple[Span, ...] | None:
        """Slot ranges that are seen from another position. None = all at their true distance."""
        return None


@dataclass(frozen=True)
class Read(Answer):
    """Which of the kept tokens a decode step attends to. The base class reads all."""

    budget: float = 1.0
    selects: ClassVar[bool] = False
    first_layer: ClassVar[int] = 0
    foresees: ClassVar[bool] = False
    calibrates: ClassVar[bool] = False
    whole_prompt: ClassVar[bool] = False
    """``fresh`` depends on what ``observe_prefill`` makes of a whole prompt: no stored prefix is reused, and a prompt
    that came in chunks gets its columns anew at its end."""

    def words(self) -> str:
        return "all"

    def columns(self, facts: LayerFacts) -> tuple[Column, ...]:
        """What this rule scores with, for each slot."""
        return ()

    def wants(self) -> Wants | None:
        """Statistic asked of prefill attention; ``settle`` finds it in ``view.weights``."""
        return None

    def begin(self, facts: LayerFacts, slots: int) -> dict[str, Tensor]:
        """State of a sequence that holds nothing yet, in a store of ``slots`` slots (no batch dimension).

        A store that grows asks again; what was there moves to the front of the larger tensors.
        """
        return {}

    def state_bytes(self, facts: LayerFacts, slots: int) -> int:
        """Bytes of all state of one sequence, in a store of ``slots`` slots."""
        return 0

    def limit(self, length: int) -> int:
        """Most tokens that a step may read of ``length`` kept ones."""
        return length

    def calibration(self) -> object:
        """What ``calibrate`` depends on: readers that agree in it share the constants."""
        return self

    def calibration_text(self) -> str | None:
        """The text to calibrate on. None: the model's."""
        return None

    def calibration_file(self) -> tuple[str, dict[str, Any]] | None:
        """A text file beside which what ``calibrate`` finds is kept for later runs, and what else decides about it."""
        return None

    def check_prompt(self, ids: Sequence[int], calibrated_on: Sequence[int]) -> None:
        """Raise UserError for a prompt that does not go with the reader's own calibration text (token ids both)."""

    def calibrate(self, facts: LayerFacts, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        """Once a model: queries ``[Hq, N, D]`` and keys ``[H, N, D]`` of a calibration text -> constants."""
        return {}

    def finish_calibration(self, found: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The constants of every layer, once all are there."""
        return found

    def observe_prefill(
        self, facts: LayerFacts, constants: Mapping[str, Tensor], q: Tensor, k: Tensor, so_far: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A prompt's queries ``[Hq, T, D]`` and keys ``[H, T, D]`` -> its state (tensors without a batch dimension).

        A prompt that comes in chunks is shown chunk by chunk; ``so_far`` is the state after those before it.
        """
        return {}

    def fresh(self, constants: Mapping[str, Tensor], state: Mapping[str, Tensor], k: Tensor) -> dict[str, Tensor]:
        """Columns of new keys ``[B, H, n, D]``."""
        return {}

    def settle(self, view: View) -> None:
        """A sequence's prompt (or a later turn) has been stored: bring its state up to date, in place. B = 1."""

    def finish_prefill(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """All layers have had a sequence's whole prompt: their states -> what each of them is to know."""
        return {}

    def turned(self, view: View) -> Tensor | None:
        """Slots ``[B, H, m]`` (-1 for none) whose keys are from now on held as if at position 0."""
        return None

    def spans(self, view: View) -> tuple[Span, ...] | None:
        """Slot ranges that are seen from another position where everything is read."""
        return None

    def foresee(
        self, view: View, constants: Mapping[str, Tensor], port: Port, x: Tensor, positions: Tensor
    ) -> Selection | None:
        """Choose for this layer from the *previous* layer's attention input ``x [B, 1, hidden]``."""
        return None

    def select(self, view: View, q: Tensor, foreseen: Selection | None) -> Selection | None:
        """Choose for queries ``q [B, Hq, D]``. None = everything."""
        return None


@dataclass(frozen=True)
class Encode(Answer):
    """In what form keys and values are stored. The base class stores them raw."""

    positions: ClassVar[bool] = False
    """``decode`` needs the true positions, as ``values["pos"]``."""
    calibrates: ClassVar[bool] = False

    def words(self) -> str:
        return "raw"

    def calibration(self) -> object:
        """What ``calibrate`` depends on: encoders that agree in it share the constants."""
        return self

    def calibrate(
        self, facts: LayerFacts, q: Tensor, k: Tensor, v: Tensor, grad_k: Tensor | None, grad_v: Tensor | None
    ) -> dict[str, Tensor]:
        """Once a model: queries, keys and values ``[H, N, D]`` of a calibration text -> constants of the layer.

        ``grad_k, grad_v [H, n, D]`` are the loss's gradients, n being at most N; None where they cannot be had.
        """
        return {}

    def bind(self, facts: LayerFacts, port: Port, constants: Mapping[str, Tensor], state: dict[str, Tensor]) -> Encode:
        """The encoder of one layer, which may use the layer's constants and the sequences' state."""
        return self

    def begin(self, facts: LayerFacts) -> dict[str, Tensor]:
        """State of a sequence that holds nothing yet (tensors without a batch dimension)."""
        return {}

    def note(self, state: Mapping[str, Tensor], k: Tensor, v: Tensor, positions: Tensor) -> None:
        """A prompt's raw keys and values ``[H, T, D]`` at ``[T]``, not yet encoded: into its state, in place."""

    def of_row(self, row: int) -> Encode:
        """The same for stores that hold only sequence ``row``, as a batch of one."""
        return self

    def columns(self, head_dim: int, dtype: torch.dtype) -> tuple[Column, ...]:
        return (Column("k", (head_dim,), dtype, "payload"), Column("v", (head_dim,), dtype, "payload"))

    def encode(self, k: Tensor, v: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """``[..., n, D]`` twice, ``positions [..., n]`` -> payload columns."""
        return {"k": k, "v": v}

    def decode(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Payload columns -> keys and values."""
        return values["k"], values["v"]

    def packed(self, values: Mapping[str, Tensor]) -> Packed | None:
        """The same columns for the fused kernels. None: there is no fused form."""
        return None

    @property
    def raw(self) -> bool:
        """Stored values can be attended to in place."""
        return type(self) is Encode

    def needs(self, columns: Sequence[Column]) -> list[str]:
        """Names of the columns that ``decode`` reads."""
        return [c.name for c in columns if c.kind == "payload" or (c.name == "pos" and self.positions)]


class Shared:
    """What the layers of one cache have in common, as far as their place needs it."""

    def match_prefix(self, row: int, ids: list[int]) -> int:
        """How many tokens at the start of a sequence's prompt are stored already (and now belong to it too)."""
        return 0

    def register(self, row: int, ids: list[int]) -> None:
        """A sequence's prompt is stored in every layer."""

    def device_bytes(self) -> int:
        """Device bytes held for all layers together (metadata and staging)."""
        return 0

    def transfers(self) -> Transfers:
        """What has moved between tiers so far."""
        return Transfers()


@dataclass(slots=True)
class Transfers:
    """Copies between tiers: how many, how many bytes, and the seconds that compute waited for them."""

    count: int = 0
    bytes: int = 0
    blocked: float = 0.0


@dataclass(frozen=True)
class Place(Answer):
    """Where the bytes live."""

    tier: ClassVar[Literal["device", "host", "disk"]] = "device"
    wants_inputs: ClassVar[bool] = False
    """The stores keep the layers' attention inputs, to compute keys and values again."""

    def shared(self, layers: int) -> Shared | None:
        """What the layers of one cache have in common (a block table, a link to the host). None = nothing."""
        return None

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        raise NotImplementedError

    archives: ClassVar[bool] = False
    """What the keep rule evicts goes to an archive, from which the read rule chooses; what is kept is read anyway."""

    def archive(self, layout: Layout, shared: Shared | None) -> Store:
        """A store for what the keep rule evicts, where the place archives."""
        raise NotImplementedError

    def archive_encode(self) -> Encode | None:
        """In what form the archive holds it, when what is kept is raw. None: as it was kept."""
        return None

    def archive_bytes(self, layout: Layout) -> int:
        """Bytes of an archive's columns in closed form, all tiers."""
        return layout.rows * layout.kv_heads * layout.capacity * layout.slot_bytes()

    def bytes_held(self, layout: Layout) -> int:
        """Bytes of a store's columns in closed form, all tiers."""
        return layout.rows * layout.kv_heads * layout.capacity * layout.slot_bytes()

    def staging(self, layout: Layout) -> int:
        """Device bytes, in closed form, that the layers share to move such a layer's keys and values."""
        return 0


@dataclass(frozen=True, slots=True)
class Layout:
    """What a store has to hold.

    ``capacity`` is its slots per sequence at the start; ``limit`` gives the most tokens that a selection may fetch of
    so many (None: nothing selects); ``hidden`` is the width of the attention inputs that it keeps (0: none), and
    ``tokens`` of how many positions.
    """

    columns: tuple[Column, ...]
    encode: Encode
    rows: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    capacity: int
    device: torch.device
    limit: Callable[[int], int] | None = None
    hidden: int = 0
    tokens: int = 0

    def slot_bytes(self, kind: str | None = None) -> int:
        """Bytes of one slot of one KV head: of all columns, or of those of a kind."""
        return sum(c.slot_bytes() for c in self.columns if kind in (None, c.kind))


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

    def answers(self) -> dict[str, str]:
        """The four answers in words."""
        return {q: getattr(self, q).words() for q in ("keep", "read", "place", "encode")}
