"""A store: the columns of one layer's slots for a batch of sequences, and every byte of them counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kvatlas.attention.tiles import Tile
from kvatlas.strategy.answers import Layout
from kvatlas.strategy.view import Column, Selection, Span

GROWTH = 256
"""Slots by which a growing store is enlarged at least."""


@dataclass(slots=True)
class Bytes:
    """Bytes held, by tier and purpose. ``padding`` is payload storage that holds no token.

    ``host_metadata`` is what a place keeps on the host beside keys and values (layer inputs to recompute them from).
    """

    device_payload: int = 0
    device_metadata: int = 0
    device_padding: int = 0
    host_payload: int = 0
    host_metadata: int = 0
    host_padding: int = 0
    disk_payload: int = 0
    disk_padding: int = 0

    @property
    def device(self) -> int:
        return self.device_payload + self.device_metadata + self.device_padding

    @property
    def host(self) -> int:
        return self.host_payload + self.host_metadata + self.host_padding

    @property
    def disk(self) -> int:
        return self.disk_payload + self.disk_padding

    @property
    def total(self) -> int:
        """All tiers."""
        return self.device + self.host + self.disk

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Store(ABC):
    """Slots ``0 .. lengths[b, h] - 1`` are filled; their order means nothing.

    After ``drop`` one of them is free until the next ``append`` overwrites it. ``filled`` is the largest length, known
    without asking the device. ``ragged`` is False only while all lengths are equal. ``most`` is the slots that the
    fullest sequence will ever need (None: without end); the engine says it. Where a place wants the layer's inputs, the
    engine gives ``recompute``: inputs ``[B, n, hidden]`` at positions ``[B, n]`` -> keys and values ``[B, H, n, D]``.
    """

    lengths: Tensor  # [B, H] int64
    filled: int
    ragged: bool
    most: int | None = None
    recompute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        shape = (layout.rows, layout.kv_heads)
        self.lengths = torch.zeros(shape, dtype=torch.int64, device=layout.device)
        self.next = torch.zeros_like(self.lengths)
        self.filled, self.ragged, self.holes = 0, layout.rows > 1, False

    # prefill: one sequence
    def begin(self, row: int, reused: int) -> None:
        """A sequence starts, its first ``reused`` tokens being stored already."""
        assert reused == 0, "only a place that shares prefixes can begin with some"

    @abstractmethod
    def extend(self, row: int, values: Mapping[str, Tensor]) -> None:
        """Add ``[H, n, ...]`` of every column to the end of a sequence."""

    def evicted(self, row: int, values: Mapping[str, Tensor], positions: Tensor) -> None:
        """Add what a keep rule evicted of a run, ``[H, n, ...]`` of every column, at true ``positions [H, n]``."""
        self.extend(row, values)

    def adopt(self, other: Store) -> bool:
        """Hold what another cache's store of the same layer holds, without a copy; False: this one has to be filled.

        Called while it is empty. Holes are not taken over.
        """
        return False

    @abstractmethod
    def load(self, row: int, values: Mapping[str, Tensor]) -> None:
        """Replace what a sequence holds by ``[H, n, ...]`` of every column."""

    def put_inputs(self, row: int, start: int, x: Tensor) -> None:
        """The layer's inputs ``[T, hidden]`` of a sequence's tokens from position ``start`` on."""
        raise NotImplementedError

    def append_inputs(self, x: Tensor, positions: Tensor) -> None:
        """The layer's inputs ``[B, hidden]`` of the tokens at ``positions [B]``."""
        raise NotImplementedError

    def row_inputs(self, row: int, tokens: int) -> Tensor:
        """The layer's inputs ``[tokens, hidden]`` of a sequence's first tokens."""
        raise NotImplementedError

    @abstractmethod
    def row_columns(self, row: int) -> dict[str, Tensor]:
        """All columns of a sequence, ``[H, n, ...]`` each. There must be no hole."""

    @abstractmethod
    def row_tiles(self, row: int, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        """A sequence's keys and values, as a batch of one."""

    # decode: the whole batch
    @abstractmethod
    def append(self, values: Mapping[str, Tensor]) -> Tensor:
        """Store one token per sequence, ``[B, H, ...]`` of every column; returns its slots ``[B, H]``."""

    @abstractmethod
    def column(self, name: str) -> Tensor:
        """A metadata column ``[B, H, filled, ...]``; writes reach the store."""

    @abstractmethod
    def keys(self) -> Tensor:
        """All keys, decoded, ``[B, H, filled, D]`` (a full read: for oracles)."""

    @abstractmethod
    def tiles(self, selection: Selection | None, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        """What a step attends to."""

    @abstractmethod
    def take(self, name: str, slots: Tensor) -> Tensor:
        """A column's values ``[B, H, m, ...]`` at ``slots [B, H, m]`` int64, on ``layout.device``.

        Any column, payload too. What a slot below 0 gives does not matter.
        """

    @abstractmethod
    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        """Overwrite a column at filled ``slots [B, H, m]`` by ``values [B, H, m, ...]``; slots below 0 are left out."""

    def rewrite(self, row: int, values: Mapping[str, Tensor]) -> None:
        """Overwrite some columns of all that a sequence holds, ``[H, n, ...]`` each."""
        for name, tensor in values.items():
            slots = torch.full((*self.lengths.shape, tensor.shape[1]), -1, device=self.lengths.device)
            slots[row] = torch.arange(tensor.shape[1], device=self.lengths.device)
            self.write(name, slots, tensor.unsqueeze(0).expand(len(self.lengths), *tensor.shape))

    def drop(self, slots: Tensor) -> None:
        """Free one slot per (sequence, KV head), -1 for none: the next ``append`` overwrites it."""
        self.next = torch.where(slots >= 0, slots, self.next)
        self.holes = True

    def prefetch(self, selection: Selection | None) -> None:  # noqa: B027 - most places have nothing to do
        """Start to bring bytes near; nothing to do where they are."""

    @abstractmethod
    def compact(self) -> None:
        """Close the holes that ``drop`` left, by moving each row's last slot into its own."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat sequences: ``rows [n]`` int64. There must be no hole."""

    @abstractmethod
    def bytes(self) -> Bytes:
        """Bytes of the storage of every tensor held."""

    def _needs(self) -> list[str]:
        """Names of the columns that are decoded."""
        return self.layout.encode.needs(self.layout.columns)

    def _row_layout(self, row: int) -> Layout:
        """The same for one sequence as a batch of one."""
        return replace(self.layout, rows=1, encode=self.layout.encode.of_row(row))

    def _advance(self) -> Tensor:
        """Slots of the new token; lengths follow."""
        slots = self.next
        self.lengths = torch.maximum(self.lengths, slots + 1) if self.holes else self.lengths + 1
        self.next, self.holes = self.lengths, False
        return slots

    def _recount(self, row: int, length: int) -> None:
        self.lengths[row] = length
        self._count_slots()

    def _select_lengths(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        self._count_slots()

    def _count_slots(self) -> None:
        self.next = self.lengths.clone()
        self.filled = int(self.lengths.max())
        self.ragged = bool((self.lengths != self.filled).any())

    def _count(self, sizes: Mapping[str, int], tier: str) -> Bytes:
        """Payload that holds tokens, payload storage that does not, metadata; ``sizes`` are the columns' bytes."""
        held, total = Bytes(), int(self.lengths.sum()) if not self.holes else self._tokens()
        for spec in self.layout.columns:
            if spec.name not in sizes:
                continue
            size = sizes[spec.name]
            if spec.kind == "metadata":
                held.device_metadata += size
            else:
                tokens = total * spec.slot_bytes()
                held += Bytes(**{f"{tier}_payload": tokens, f"{tier}_padding": size - tokens})
        held.device_metadata += self.lengths.nbytes + (self.next.nbytes if self.next is not self.lengths else 0)
        return held

    def _tokens(self) -> int:
        return int(torch.where(self.next < self.lengths, self.lengths - 1, self.lengths).sum())


def storage(columns: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes of each column's storage."""
    return {name: column.untyped_storage().nbytes() for name, column in columns.items()}


def payload(columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns that hold keys and values."""
    return tuple(c for c in columns if c.kind == "payload")


def put_slots(column: Tensor, slots: Tensor, values: Tensor) -> None:
    """``column [B, H, cap, ...]`` at ``slots [B, H, m]`` = ``values [B, H, m, ...]``, in place; slots below 0: not."""
    device = column.device
    slots, values = slots.to(device), values.to(device, column.dtype)
    rows, heads, at = (slots >= 0).nonzero(as_tuple=True)
    column[rows, heads, slots[rows, heads, at]] = values[rows, heads, at]
