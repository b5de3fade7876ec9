"""The four questions. A strategy is one answer to each; nothing above this package knows a method's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.attention.tiles import Wants
from kvatlas.strategy.view import Column, LayerFacts, Port, Selection, Span, View

if TYPE_CHECKING:
    from kvatlas.attention.tiles import Packed
    from kvatlas.strategy.place.store import Store
    from kvatlas.strategy.strategy import Strategy


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

    def join(self, alive: MutableMapping[Any, Any], key: object) -> None:
        """Take part in what other caches of the same model and strategy hold, before there is any store.

        ``alive`` keeps what is put there under ``key`` for as long as someone uses it.
        """

    def announce(self, row: int, ids: Sequence[int]) -> None:
        """A sequence's first prompt is about to come, and its keys and values follow from these ids alone.

        Without ids: it has come. A place may find by its text what it holds already, and store it once.
        """

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
    ``tokens`` of how many positions. ``layer`` is the layer's number; ``expected`` are the tokens that each sequence's
    prompt will leave in an archive.
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
    layer: int = 0
    expected: tuple[int, ...] = ()

    def slot_bytes(self, kind: str | None = None) -> int:
        """Bytes of one slot of one KV head: of all columns, or of those of a kind."""
        return sum(c.slot_bytes() for c in self.columns if kind in (None, c.kind))
