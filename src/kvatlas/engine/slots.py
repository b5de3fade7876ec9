"""What one layer holds: its stores, the rules' state, and every byte of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvatlas.strategy.answers import Encode, Layout, Read, Shared
from kvatlas.strategy.place.store import GROWTH, Bytes, Store
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import POS, Column, LayerFacts, Port, Selection

if TYPE_CHECKING:
    from kvatlas.engine.clock import Clock
    from kvatlas.engine.intake import Intake


class LayerSlots:
    """The stores of a layer (what is kept, and perhaps an archive of what was evicted) and the sequences' state."""

    intake: Intake
    clock: Clock

    def __init__(
        self,
        strategy: Strategy,
        facts: LayerFacts,
        port: Port,
        shared: Shared | None,
        constants: Mapping[str, Tensor] | None,
    ) -> None:
        self.strategy, self.facts, self.port = strategy, facts, port
        self.keep, self.place, self.shared, self.constants = strategy.keep, strategy.place, shared, constants or {}
        self.read: Read = strategy.read if self._reads_by_choice() else Read()
        self.state: dict[str, Tensor] = {}
        self.encode = strategy.encode.bind(facts, port, self.constants, self.state)
        self.columns = self._columns()
        self.selection: Selection | None = None
        self.archive: Store | None = None
        self.last_archived: tuple[Tensor, Tensor] | None = None

    def _reads_by_choice(self) -> bool:
        """The read rule works in this layer: not in its first ones, nor on an archive that nothing will come to."""
        if self.facts.layer < self.strategy.read.first_layer:
            return False
        return not self.place.archives or "capacity" in self.keep.plan(1)

    def _columns(self) -> tuple[Column, ...]:
        facts = self.facts
        rules = (*self.keep.columns(facts), *self.read.columns(facts))
        if self.encode.positions and POS not in rules:
            rules = (POS, *rules)
        return (*self.encode.columns(facts.head_dim, facts.dtype), *rules)

    @property
    def has_positions(self) -> bool:
        """The true positions are stored; otherwise a slot's number is its position."""
        return POS in self.columns

    @property
    def chosen_from(self) -> Store:
        """The store that the read rule chooses from."""
        return self.store if self.archive is None else self.archive

    @property
    def encode_of_chosen(self) -> Encode:
        """The encoder of that store."""
        return self.chosen_from.layout.encode

    # ------------------------------------------------------------------ start

    def begin(self, prompts: list[int], reserve: int, reused: list[int] | None = None) -> None:
        """Make the stores for sequences with prompts of these lengths, ``reserve`` tokens to come."""
        device = self.facts.device
        plans = [self.keep.plan(n) for n in prompts]
        self.plan = {key: torch.tensor([p[key] for p in plans], device=device) for key in plans[0]}
        self.prompts, self.ends = prompts, list(prompts)
        self.seen = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        self.store = self.place.store(self.planned(prompts, reserve), self.shared)
        self.store.most = self._most()
        if self.place.wants_inputs:
            self.store.recompute = partial(self.port.recompute, self.facts.layer)
        if (archived := self.planned_archive(prompts, reserve)) is not None:
            self.archive = self.place.archive(archived, self.shared)
        self._slots = self.chosen_from.layout.capacity
        self._begin_state(len(prompts))
        for row, n in enumerate(reused or []):
            if n:
                self.store.begin(row, n)
                self.seen[row] = n

    def expect(self, row: int, more: int) -> None:
        """A run of ``more`` tokens of one sequence is about to come, perhaps in chunks."""
        self.ends[row] = int(self.seen[row]) + more

    def capacity_for(self, prompts: list[int], reserve: int) -> int:
        """Slots per sequence that the store starts with."""
        plans = [self.keep.plan(n) for n in prompts]
        if self._bounded(plans[0]):
            return max(min(p["capacity"] + 1, n + max(reserve, 1)) for p, n in zip(plans, prompts))
        return max(min(p.get("capacity", n), n) for p, n in zip(plans, prompts)) + max(reserve, 1)

    def planned(self, prompts: list[int], reserve: int) -> Layout:
        """The store that these prompts will begin with."""
        layout = self.layout(len(prompts), self.capacity_for(prompts, reserve))
        return replace(layout, tokens=max(prompts) + max(reserve, 1)) if layout.hidden else layout

    def planned_archive(self, prompts: list[int], reserve: int) -> Layout | None:
        """The archive that these prompts will begin with; None where the place has none or nothing is evicted."""
        plans = [self.keep.plan(n) for n in prompts]
        if not self.place.archives or "capacity" not in plans[0]:
            return None
        encode = self.encode
        if encode.raw and (other := self.place.archive_encode()) is not None:
            encode = other.bind(self.facts, self.port, self.constants, self.state)
        columns = encode.columns(self.facts.head_dim, self.facts.dtype)
        if encode.positions or self.clock.diagnose:
            columns = (*columns, POS)
        gone = tuple(max(0, n - p["capacity"]) for p, n in zip(plans, prompts))
        layout = self.layout(len(prompts), max(gone) + max(reserve, 1), encode, columns)
        return replace(layout, expected=gone)

    def _bounded(self, plan: Mapping[str, object]) -> bool:
        """No sequence will ever hold more than its capacity."""
        return "capacity" in plan and not self.keep.grows()

    def _most(self) -> int | None:
        """Slots that the fullest sequence will ever need: its capacity, and one for the newest token."""
        return int(self.plan["capacity"].max()) + 1 if self._bounded(self.plan) else None

    def layout(
        self, rows: int, capacity: int, encode: Encode | None = None, columns: tuple[Column, ...] | None = None
    ) -> Layout:
        """What a store of this layer has to hold."""
        facts = self.facts
        return Layout(
            columns or self.columns,
            encode or self.encode,
            rows,
            facts.kv_heads,
            facts.head_dim,
            facts.dtype,
            capacity,
            facts.device,
            self.read.limit if self.read.selects else None,
            hidden=facts.hidden if self.place.wants_inputs else 0,
            layer=facts.layer,
        )

    # ------------------------------------------------------------------ state

    def _new_state(self) -> dict[str, Tensor]:
        return {**self.encode.begin(self.facts), **self.read.begin(self.facts, self._slots)}

    def _begin_state(self, rows: int) -> None:
        self.state.clear()
        for name, tensor in self._new_state().items():
            self.state[name] = tensor.unsqueeze(0).repeat(rows, *(1 for _ in tensor.shape))

    def grow_state(self) -> None:
        """Where the store that is chosen from has grown, so does what the read rule keeps for each of its slots."""
        store = self.chosen_from
        if store.filled <= self._slots:
            return
        self._slots = store.filled + max(GROWTH, store.filled // 8)
        for name, tensor in self._new_state().items():
            old = self.state[name]
            if tensor.shape != old.shape[1:]:
                new = tensor.unsqueeze(0).repeat(len(old), *(1 for _ in tensor.shape))
                new[tuple(slice(0, n) for n in old.shape)] = old
                self.state[name] = new

    def row_state(self, row: int) -> dict[str, Tensor]:
        """One sequence's state, ``[1, ...]`` each; writes reach it."""
        return {name: tensor[row : row + 1] for name, tensor in self.state.items()}

    def set_state(self, row: int, state: Mapping[str, Tensor]) -> None:
        """What a rule says of one sequence (tensors without a batch dimension)."""
        for name, tensor in state.items():
            if name not in self.state:
                self.state[name] = tensor.new_zeros(len(self.prompts), *tensor.shape)
            self.state[name][row] = tensor

    # ---------------------------------------------------------------- archive

    def archived(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns of evicted tokens as the archive holds them: as they are, or encoded now for the first time."""
        assert self.archive is not None
        layout = self.archive.layout
        out = dict(values)
        if layout.encode is not self.encode:
            k, v = self.encode.decode(values)
            positions = values["pos"] if "pos" in values else torch.zeros(k.shape[:-1], dtype=torch.int32)
            out |= layout.encode.encode(k, v, positions)
        return {spec.name: out[spec.name] for spec in layout.columns}

    def put_away(self, victims: Tensor) -> None:
        """Slots ``[B, H]`` (-1 for none) go to the archive before they are freed."""
        archive = self.archive
        assert archive is not None
        if not bool((victims >= 0).any()):
            return
        at = victims.clamp(min=0).unsqueeze(-1)
        taken = {c.name: self.store.take(c.name, at) for c in self.columns if c.kind == "payload" or c.name == "pos"}
        values = {name: tensor.squeeze(2) for name, tensor in self.archived(taken).items()}
        slots = archive.append(values)
        none = victims < 0
        archive.drop(torch.where(none, slots, -1))  # what was not evicted is overwritten by the next
        key = self.encode.decode(taken)[0].squeeze(2)
        self.last_archived = torch.where(none, -1, slots), key
        self.grow_state()

    # ------------------------------------------------------------ other places

    def positions(self, store: Store, n: int) -> Tensor:
        """True positions of a store's first ``n`` slots, ``[B, H, n]`` int64."""
        if any(spec.name == "pos" for spec in store.layout.columns):
            return store.column("pos").long()
        return torch.arange(n, device=self.facts.device).expand(*store.lengths.shape, n)

    def to_origin(self, k: Tensor, positions: Tensor) -> Tensor:
        """Keys ``[B, H, n, D]`` at positions ``[B, H, n]``, turned back to position 0."""
        return self.port.rotate(self.facts.layer, k, positions, torch.zeros_like(positions))

    # ------------------------------------------------------------------- rows

    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat sequences (``rows [n]``): every tensor of their state follows."""
        self.compact()
        for store in (self.store, self.archive):
            if store is not None:
                store.select_rows(rows)
        if self.last_archived is not None:
            self.last_archived = self.last_archived[0][rows], self.last_archived[1][rows]
        self.seen = self.seen[rows]
        self.plan = {key: value[rows] for key, value in self.plan.items()}
        self.store.most = self._most()
        for name, tensor in list(self.state.items()):
            self.state[name] = tensor[rows]
        self.prompts = [self.prompts[i] for i in rows.tolist()]
        self.ends = [self.ends[i] for i in rows.tolist()]

    def compact(self) -> None:
        """Close the holes that evictions left. Tokens move, so the read rule looks at its slots anew."""
        moved = self.chosen_from.holes
        for store in (self.store, self.archive):
            if store is not None:
                store.compact()
        if moved and self.read.selects:
            for row in range(len(self.prompts)):
                self.intake.settle(row)

    def kept_slots(self, row: int) -> Tensor:
        """Slots ``[H, n]`` that hold a sequence's tokens, in the order of their positions."""
        store = self.store
        lengths, free = store.lengths[row].unsqueeze(-1), store.next[row].unsqueeze(-1)
        n = int(lengths[0] - (free < lengths).long()[0])  # a freed slot waits for the next token
        slots = torch.arange(store.filled, device=self.facts.device).expand(self.facts.kv_heads, -1)
        at = store.column("pos")[row].long() if self.has_positions else slots
        return at.masked_fill((slots >= lengths) | (slots == free), torch.iinfo(torch.int64).max).argsort(-1)[:, :n]

    def kept_positions(self) -> list[Tensor]:
        """Sorted true positions that each sequence keeps, ``[H, n]`` each."""
        out = [self.kept_slots(row) for row in range(len(self.prompts))]
        if not self.has_positions:
            return out
        pos = self.store.column("pos").long()
        return [pos[row].gather(-1, slots) for row, slots in enumerate(out)]

    # ------------------------------------------------------------------ counts

    def held_tokens(self) -> float:
        """Tokens kept, summed over sequences (mean over KV heads)."""
        return _tokens(self.store) / self.facts.kv_heads

    def archived_tokens(self) -> float:
        """Tokens in the archive, summed over sequences (mean over KV heads)."""
        return 0.0 if self.archive is None else _tokens(self.archive) / self.facts.kv_heads

    def read_tokens(self) -> float:
        """Tokens that the last step attended to, summed over sequences (mean over KV heads)."""
        if self.archive is None:
            counted = self.store.lengths if self.selection is None else self.selection.counts()
            return float(counted.sum()) / self.facts.kv_heads
        beyond = self.archived_tokens() if self.selection is None else float(self.selection.counts().sum())
        return (float(self.store.lengths.sum()) + beyond) / self.facts.kv_heads

    def read_bytes(self) -> int:
        """Payload bytes that the last step attended to."""
        slot = sum(spec.slot_bytes() for spec in self.columns if spec.kind == "payload")
        return int(self.read_tokens() * self.facts.kv_heads * slot)

    def bytes_held(self, prompts: list[int], reserve: int) -> int:
        """What ``bytes().total`` will be, in closed form: prompts of these lengths, up to ``reserve`` new tokens."""
        rows, slots = len(prompts), len(prompts) * self.facts.kv_heads
        counts = 8 * slots * (2 if self._bounded(self.keep.plan(prompts[0])) else 1)  # filled slots; which is free
        layout, archive = self.planned(prompts, reserve), self.planned_archive(prompts, reserve)
        held = self.place.bytes_held(layout) + counts
        if archive is not None:
            held += self.place.archive_bytes(archive) + 16 * slots
        chosen = layout if archive is None else archive
        state = self.read.state_bytes(self.facts, chosen.capacity)
        return held + rows * (state + sum(t.nbytes for t in self.encode.begin(self.facts).values()))

    def bytes(self) -> Bytes:
        """Bytes held by the stores and the rules' state (scratch of an unfinished prefill included)."""
        held = self.store.bytes()
        for other in (self.archive, *self.intake.scratch.values()):
            if other is not None:
                held += other.bytes()
        return held + Bytes(device_metadata=sum(t.untyped_storage().nbytes() for t in self.state.values()))


def _tokens(store: Store) -> float:
    return float(torch.where(store.next < store.lengths, store.lengths - 1, store.lengths).sum())
