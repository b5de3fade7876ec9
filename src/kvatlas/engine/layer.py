"""One layer's cache of a batch: the lines that every strategy goes through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kvatlas.attention.decode import attend_step
from kvatlas.attention.prefill import Prefill, attend_prefill
from kvatlas.attention.tiles import Rotate, Tile
from kvatlas.engine.clock import Clock
from kvatlas.strategy.answers import (
    LayerFacts,
    Layout,
    Port,
    Read,
    Selection,
    Shared,
    Span,
    Strategy,
    View,
)
from kvatlas.strategy.place.device import SlotStore
from kvatlas.strategy.place.store import Bytes, Store


class LayerCache:
    """Keys and values of one layer and what the strategy's rules know of them.

    Args:
        strategy: the four answers for this layer.
        facts: of the layer.
        how: scale, the model's own window and sink logits.
        port: what the strategy may ask of the model.
        shared: what the layers have in common, from ``strategy.place.shared``.
        constants: what ``read.calibrate`` found for this layer.
        clock: where a step's time goes.
    """

    def __init__(
        self,
        strategy: Strategy,
        facts: LayerFacts,
        how: Prefill,
        port: Port,
        shared: Shared | None = None,
        constants: Mapping[str, Tensor] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.strategy, self.facts, self.how, self.port = strategy, facts, how, port
        self.keep, self.encode, self.place = strategy.keep, strategy.encode, strategy.place
        self.read: Read = strategy.read if facts.layer >= strategy.read.first_layer else Read()
        self.shared, self.constants, self.clock = shared, constants or {}, clock or Clock(False)
        self.columns = (
            *self.encode.columns(facts.head_dim, facts.dtype),
            *self.keep.columns(facts),
            *self.read.columns(facts),
        )
        self.wants = self.keep.wants()
        self.state: dict[str, Tensor] = {}
        self.selection: Selection | None = None
        self.weights: Tensor | None = None
        self._foreseen: Selection | None = None
        self._scratch: dict[int, Store] = {}
        self._statistics: dict[int, Tensor] = {}

    # ------------------------------------------------------------------ start

    def begin(self, prompts: list[int], reserve: int, reused: list[int] | None = None) -> None:
        """Make the store for sequences with prompts of these lengths, ``reserve`` tokens to come."""
        device, shared = self.facts.device, self.shared
        plans = [self.keep.plan(n) for n in prompts]
        self.plan = {key: torch.tensor([p[key] for p in plans], device=device) for key in plans[0]}
        self.prompts = prompts
        self.seen = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        self.store = self.place.store(self.planned(prompts, reserve), shared)
        self.store.most = self._most()
        for row, n in enumerate(reused or []):
            if n:
                self.store.begin(row, n)
                self.seen[row] = n

    def capacity_for(self, prompts: list[int], reserve: int) -> int:
        """Slots per sequence that the store starts with."""
        plans = [self.keep.plan(n) for n in prompts]
        if self._bounded(plans[0]):
            return max(min(p["capacity"] + 1, n + max(reserve, 1)) for p, n in zip(plans, prompts))
        return max(min(p.get("capacity", n), n) for p, n in zip(plans, prompts)) + max(reserve, 1)

    def planned(self, prompts: list[int], reserve: int) -> Layout:
        """The store that these prompts will begin with."""
        return self._layout(len(prompts), self.capacity_for(prompts, reserve))

    def _bounded(self, plan: Mapping[str, object]) -> bool:
        """No sequence will ever hold more than its capacity."""
        return "capacity" in plan and not self.keep.grows()

    def _most(self) -> int | None:
        """Slots that the fullest sequence will ever need: its capacity, and one for the newest token."""
        return int(self.plan["capacity"].max()) + 1 if self._bounded(self.plan) else None

    def _layout(self, rows: int, capacity: int) -> Layout:
        facts = self.facts
        return Layout(
            self.columns,
            self.encode,
            rows,
            facts.kv_heads,
            facts.head_dim,
            facts.dtype,
            capacity,
            facts.device,
            self.read.limit if self.read.selects else None,
        )

    # ---------------------------------------------------------------- prefill

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool = True) -> Tensor:
        """A run of new tokens of one sequence.

        Args:
            row: the sequence.
            q: ``[Hq, T, D]``; k, v: ``[H, T, D]``, as they reach attention.
            final: the sequence's prompt (or turn) ends here; only then a rule evicts, unless it evicts every chunk.

        Returns:
            ``[T, Hq, D]``.
        """
        size = self.strategy.prefill.chunk or q.shape[1]
        outs = []
        for start in range(0, q.shape[1], size):
            part = slice(start, start + size)
            last = final and start + size >= q.shape[1]
            outs.append(self._run(row, q[:, part], k[:, part], v[:, part], last))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _run(self, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool) -> Tensor:
        first, past = int(self.seen[row]), list[Tile]()
        self.store.compact()
        if first and self.strategy.prefill.kind != "chunked-isolated":
            held, index = self._held(row)
            past = list(held.row_tiles(index, self._row_spans(row, int(held.lengths[index, 0]), q, first)))
        out, statistic = attend_prefill(
            q, k, v, self.how, past=past, first=first, wants=self.wants, rotate=self._rotate(first, q.shape[1])
        )
        with self.clock("compress"):
            self.take(row, q, k, v, statistic, final)
        return out

    def take(self, row: int, q: Tensor, k: Tensor, v: Tensor, statistic: Tensor | None, final: bool = True) -> None:
        """Store a run that has been attended to, or what the keep rule leaves of it.

        ``statistic [Hq, held + T]`` is what the rule wanted of the attention, for what is held and for the run.
        """
        first = int(self.seen[row])
        fresh = self._fresh_columns(row, q, k, v, first)
        self.seen[row] += q.shape[1]
        self._store_run(row, fresh, statistic, final or self.strategy.prefill.evict_chunks)
        if final and 0 < first < self.prompts[row] and self.read.whole_prompt:
            self._renew(row)

    def _held(self, row: int) -> tuple[Store, int]:
        """Where a sequence's tokens are, and under which number: apart while its prompt comes in chunks."""
        return (self._scratch[row], 0) if row in self._scratch else (self.store, row)

    def _renew(self, row: int) -> None:
        """The read rule's columns of a prompt that came in chunks, by what the rule knows at its end."""
        values = self.store.row_columns(row)
        keys, _ = self.encode.decode(values)
        fresh = self.read.fresh(self.constants, self._row_state(row), keys.unsqueeze(0))
        self.store.load(row, values | {name: tensor.squeeze(0) for name, tensor in fresh.items()})

    def _fresh_columns(self, row: int, q: Tensor, k: Tensor, v: Tensor, first: int) -> dict[str, Tensor]:
        """Every column of the new tokens, ``[H, T, ...]`` each."""
        facts, n = self.facts, k.shape[1]
        positions = torch.arange(first, first + n, device=k.device)
        if first < self.prompts[row]:
            so_far = {name: tensor[0] for name, tensor in self._row_state(row).items()} if first else {}
            self._set_state(row, self.read.observe_prefill(facts, self.constants, q, k, so_far))
        values = self.encode.encode(k, v, positions.expand(facts.kv_heads, n))
        fresh = {**self.read.fresh(self.constants, self._row_state(row), k.unsqueeze(0)),
                 **self.keep.fresh(positions.unsqueeze(0), facts.kv_heads)}  # fmt: skip
        values |= {name: tensor.squeeze(0) for name, tensor in fresh.items()}
        for spec in self.columns:
            if spec.name == "pos":
                values["pos"] = positions.int().expand(facts.kv_heads, n)
            elif spec.name not in values:
                values[spec.name] = torch.zeros(facts.kv_heads, n, *spec.tail, dtype=spec.dtype, device=k.device)
        return values

    def _store_run(self, row: int, fresh: dict[str, Tensor], statistic: Tensor | None, evicts: bool) -> None:
        if not self.keep.evicts or "capacity" not in self.plan:
            self.store.extend(row, fresh)
            return
        held, index = self._held(row)
        before = int(held.lengths[index, 0])
        total = before + fresh["k"].shape[1]
        candidates = held.row_columns(index) if before else {}
        everything = {n: torch.cat([candidates[n], c], 1) if before else c for n, c in fresh.items()}
        if statistic is not None and statistic.shape[-1] < total:  # chunks blind to each other
            statistic = torch.nn.functional.pad(statistic, (before, 0))
        if statistic is not None and (earlier := self._statistics.pop(row, None)) is not None:
            statistic[:, : earlier.shape[1]] += earlier
        if not evicts:
            if statistic is not None:  # the rule sees a prompt's statistic whole, however it came
                self._statistics[row] = statistic
            if row not in self._scratch:
                self._scratch[row] = SlotStore(self._layout(1, self.prompts[row]))
            self._scratch[row].load(0, everything) if before else self._scratch[row].extend(0, everything)
            return
        view = self._row_view(row, everything, total, statistic)
        if statistic is not None:
            self.keep.observe(view)
        survivors = self.keep.survivors(view)
        self._scratch.pop(row, None)
        if survivors is not None:
            everything = {name: _gather(column, survivors[0]) for name, column in everything.items()}
        self.store.load(row, everything)

    def _row_view(self, row: int, columns: dict[str, Tensor], n: int, statistic: Tensor | None = None) -> View:
        """One sequence's ``n`` candidates."""
        return View(
            layer=self.facts,
            column=lambda name: columns[name].unsqueeze(0),
            lengths=torch.full((1, self.facts.kv_heads), n, dtype=torch.int64, device=self.facts.device),
            width=n,
            now=self.seen[row : row + 1] - 1,
            plan={key: value[row : row + 1] for key, value in self.plan.items()},
            weights=None if statistic is None else statistic.unsqueeze(0),
            ragged=False,
        )

    def _row_spans(self, row: int, held: int, q: Tensor, first: int) -> list[Span] | None:
        """The keep rule's spans for the queries of a run: each later query stands one place further."""
        spans = self.keep.spans(self._row_view(row, {}, held))
        if spans is None:
            return None
        steps = torch.arange(1, q.shape[1] + 1, device=q.device)
        return [
            Span(s.start, s.stop, None if s.query_at is None else (s.query_at + steps).clamp(max=first + steps - 1))
            for s in spans
        ]

    def _row_state(self, row: int) -> dict[str, Tensor]:
        return {name: tensor[row : row + 1] for name, tensor in self.state.items()}

    def _set_state(self, row: int, state: Mapping[str, Tensor]) -> None:
        for name, tensor in state.items():
            if name not in self.state:
                self.state[name] = tensor.new_zeros(len(self.prompts), *tensor.shape)
            self.state[name][row] = tensor

    # ----------------------------------------------------------------- decode

    def foresee(self, x: Tensor) -> None:
        """The layer before's attention input ``[B, 1, hidden]``: choose for this layer and start to fetch."""
        if not self.read.foresees:
            return
        with self.clock("select"):
            view = self._view()
            self._foreseen = self.read.foresee(view, self.constants, self.port, x, self.seen.unsqueeze(1))
        with self.clock("fetch"):
            if self._foreseen is not None:
                self.store.prefetch(self._foreseen)

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new token per sequence: ``q [B, Hq, D]``, ``k, v [B, H, D]`` -> ``[B, Hq, D]``."""
        clock, now = self.clock, self.seen
        with clock("append"):
            newest = self.store.append(self._encoded(k, v, now))
            self.seen = now + 1
        with clock("select"):
            view = self._view(now, newest)
            chosen = self.read.select(view, q, self._foreseen)
            self._foreseen, self.selection = None, chosen
            if clock.diagnose and chosen is not None:
                has_pos = any(spec.name == "pos" for spec in self.columns)
                self.attended = view.column("pos").long().gather(-1, chosen.index) if has_pos else chosen.index
        tiles = self._fetched(self.store.tiles(chosen, self.keep.spans(view)))
        with clock("attend"):
            out, weights = attend_step(
                q, tiles, scale=self.how.scale, weights=self.wants is not None or clock.diagnose, sink=self.how.sink,
                rotate=self._rotate_step(now),
            )  # fmt: skip
        with clock("drop"):
            self.weights = weights
            self._after_step(view, weights, chosen)
        return out

    def _after_step(self, view: View, weights: Tensor | None, chosen: Selection | None) -> None:
        view.selection = chosen
        if self.wants is not None and weights is not None:
            view.weights = weights if chosen is None else _by_slot(weights, chosen, view.width)
        self.keep.observe(view)
        victims = self.keep.victims(view)
        if victims is not None:
            self.store.drop(victims)

    def _fetched(self, tiles: Iterator[Tile]) -> Iterator[Tile]:
        """The same tiles, their arrival counted as fetching rather than attending."""
        while True:
            with self.clock("fetch"):
                tile = next(tiles, None)
            if tile is None:
                return
            yield tile

    def _encoded(self, k: Tensor, v: Tensor, now: Tensor) -> dict[str, Tensor]:
        facts, positions = self.facts, now.view(-1, 1)
        keys = k.unsqueeze(2)
        values = self.encode.encode(keys, v.unsqueeze(2), positions.unsqueeze(1).expand(-1, facts.kv_heads, 1))
        values |= self.read.fresh(self.constants, self.state, keys)
        values |= self.keep.fresh(positions, facts.kv_heads)
        out = {name: tensor.squeeze(2) for name, tensor in values.items()}
        if any(spec.name == "pos" for spec in self.columns):
            out["pos"] = positions.int().expand(-1, facts.kv_heads)
        return out

    def _view(self, now: Tensor | None = None, newest: Tensor | None = None) -> View:
        store = self.store
        return View(
            layer=self.facts,
            column=store.column,
            lengths=store.lengths,
            width=store.filled,
            now=self.seen - 1 if now is None else now,
            plan=self.plan,
            newest=newest,
            state=self.state,
            keys=store.keys,
            hole=store.next if store.holes else None,
            ragged=store.ragged,
        )

    def _rotate(self, first: int, n: int) -> Rotate:
        def turn(q: Tensor, to: Tensor) -> Tensor:
            return self.port.rotate(
                self.facts.layer, q, torch.arange(first, first + n, device=q.device).unsqueeze(0), to
            )

        return turn

    def _rotate_step(self, now: Tensor) -> Rotate:
        return lambda q, to: self.port.rotate(self.facts.layer, q, now.unsqueeze(1), to)

    # ------------------------------------------------------------------ state

    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat sequences (``rows [n]``): every tensor of their state follows."""
        self.store.compact()
        self.store.select_rows(rows)
        self.seen = self.seen[rows]
        self.plan = {key: value[rows] for key, value in self.plan.items()}
        self.store.most = self._most()
        self.state = {name: tensor[rows] for name, tensor in self.state.items()}
        self.prompts = [self.prompts[i] for i in rows.tolist()]

    def kept_positions(self) -> list[Tensor]:
        """Sorted true positions that each sequence keeps, ``[H, n]`` each."""
        self.store.compact()
        out = []
        for row in range(len(self.prompts)):
            n = int(self.store.lengths[row, 0])
            if any(spec.name == "pos" for spec in self.columns):
                out.append(self.store.column("pos")[row, :, :n].long().sort(-1).values)
            else:
                out.append(torch.arange(n, device=self.facts.device).expand(self.facts.kv_heads, n))
        return out

    def held_tokens(self) -> float:
        """Tokens kept, summed over sequences (mean over KV heads)."""
        store = self.store
        held = torch.where(store.next < store.lengths, store.lengths - 1, store.lengths)
        return float(held.sum()) / self.facts.kv_heads

    def read_tokens(self) -> float:
        """Tokens that the last step attended to, summed over sequences (mean over KV heads)."""
        counted = self.store.lengths if self.selection is None else self.selection.count
        return float(counted.sum()) / self.facts.kv_heads

    def read_bytes(self) -> int:
        """Payload bytes that the last step attended to."""
        slot = sum(spec.slot_bytes() for spec in self.columns if spec.kind == "payload")
        return int(self.read_tokens() * self.facts.kv_heads * slot)

    def bytes_held(self, prompts: list[int], reserve: int) -> int:
        """What ``bytes().total`` will be, in closed form: prompts of these lengths, up to ``reserve`` new tokens."""
        rows, slots = len(prompts), len(prompts) * self.facts.kv_heads
        counts = 8 * slots * (2 if "capacity" in self.keep.plan(prompts[0]) else 1)  # filled slots; which is free
        return self.place.bytes_held(self.planned(prompts, reserve)) + counts + rows * self.read.state_bytes(self.facts)

    def bytes(self) -> Bytes:
        """Bytes held by the store and the rules' state (scratch of an unfinished prefill included)."""
        held = self.store.bytes()
        for scratch in self._scratch.values():
            held += scratch.bytes()
        return held + Bytes(device_metadata=sum(t.untyped_storage().nbytes() for t in self.state.values()))


def _gather(column: Tensor, index: Tensor) -> Tensor:
    """``[H, n, ...]`` at ``[H, m]`` -> ``[H, m, ...]``."""
    heads = torch.arange(column.shape[0], device=index.device).unsqueeze(1)
    return column[heads.to(column.device), index.to(column.device)]


def _by_slot(weights: Tensor, chosen: Selection, width: int) -> Tensor:
    """Weights of a selection ``[B, Hq, n]`` at their slots ``[B, Hq, width]``; what was not read got nothing."""
    group = weights.shape[1] // chosen.index.shape[1]
    index = chosen.index.repeat_interleave(group, 1)
    valid = torch.arange(index.shape[-1], device=index.device) < chosen.count.repeat_interleave(group, 1).unsqueeze(-1)
    out = weights.new_zeros(*weights.shape[:2], width)
    return out.scatter_add_(-1, index, weights.masked_fill(~valid, 0.0))
