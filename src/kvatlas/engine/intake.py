"""How one layer takes in runs of tokens: attend, let the rules choose, store. One sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import proxy

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvatlas.attention.prefill import attend_prefill
from kvatlas.attention.tiles import Rotate, Tile
from kvatlas.strategy.place.device import SlotStore
from kvatlas.strategy.place.store import Store
from kvatlas.strategy.view import Span, View

if TYPE_CHECKING:
    from kvatlas.engine.layer import LayerCache


class Intake:
    """Prompts and later turns of a layer's sequences, whole or in chunks."""

    def __init__(self, layer: LayerCache) -> None:
        self.layer: LayerCache = proxy(layer)  # a cache's memory goes with its last user, not with the next collection
        self.scratch: dict[int, Store] = {}
        self._statistics: dict[int, Tensor] = {}
        self._began: dict[int, int] = {}  # where a prompt or turn that is not yet all here began

    def run(self, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool) -> Tensor:
        """Attend to what is held and to the run itself, and store it; ``[T, Hq, D]``."""
        layer, first = self.layer, int(self.layer.seen[row])
        layer.compact()
        past = self._past(row, q, first) if first and layer.strategy.prefill.kind != "chunked-isolated" else []
        ends = first + q.shape[1] if final or layer.strategy.prefill.evict_chunks else layer.ends[row]
        out, statistic = attend_prefill(
            q, k, v, layer.how, past=past, first=first, wants=layer.wants, ends=ends,
            rotate=self._rotate(first, q.shape[1]),
        )  # fmt: skip
        if statistic is not None and past and layer.archive is not None:
            statistic = self._without_archive(row, statistic)
        with layer.clock("compress"):
            self.take(row, q, k, v, statistic, final)
        return out

    def take(self, row: int, q: Tensor, k: Tensor, v: Tensor, statistic: Tensor | None, final: bool) -> None:
        """Store a run that has been attended to, or what the keep rule leaves of it."""
        layer = self.layer
        first = int(layer.seen[row])
        fresh = self._fresh_columns(row, q, k, v, first)
        self._began.setdefault(row, first)
        layer.seen[row] += q.shape[1]
        left = self._store(row, fresh, statistic, final)
        if final or layer.strategy.prefill.evict_chunks:
            del self._began[row]
        if not final:
            return
        if 0 < first < layer.prompts[row] and layer.read.whole_prompt:
            self._renew(row)
        self.settle(row, left)

    # --------------------------------------------------------------- what is held

    def held(self, row: int) -> tuple[Store, int]:
        """Where a sequence's tokens are, and under which number: apart while its prompt comes in chunks."""
        return (self.scratch[row], 0) if row in self.scratch else (self.layer.store, row)

    def _past(self, row: int, q: Tensor, first: int) -> list[Tile]:
        held, index = self.held(row)
        tiles = list(held.row_tiles(index, self._row_spans(row, int(held.lengths[index, 0]), q, first)))
        if self.layer.archive is not None and int(self.layer.archive.lengths[row, 0]):
            self.layer.archive.compact()
            tiles += list(self.layer.archive.row_tiles(row))
        return tiles

    def _without_archive(self, row: int, statistic: Tensor) -> Tensor:
        """What the keep rule learns of the tokens that it still holds."""
        assert self.layer.archive is not None
        held, index = self.held(row)
        n, gone = int(held.lengths[index, 0]), int(self.layer.archive.lengths[row, 0])
        return torch.cat([statistic[:, :n], statistic[:, n + gone :]], 1)

    def _row_spans(self, row: int, held: int, q: Tensor, first: int) -> list[Span] | None:
        """The rules' spans for the queries of a run.

        Inside a cache of the keep rule's each later query stands one place further; a read rule sees far keys from one
        place, whatever the query.
        """
        view, n = self._view(row, {}, held), q.shape[1]
        if (kept := self.layer.keep.spans(view)) is not None:
            steps = torch.arange(1, n + 1, device=q.device)
            return [
                Span(s.start, s.stop, None if s.query_at is None else (s.query_at + steps).clamp(max=first + steps - 1))
                for s in kept
            ]
        if (far := self.layer.read.spans(view)) is not None:
            return [Span(s.start, s.stop, None if s.query_at is None else s.query_at.expand(n)) for s in far]
        return None

    def _rotate(self, first: int, n: int) -> Rotate:
        layer = self.layer

        def turn(q: Tensor, to: Tensor) -> Tensor:
            here = torch.arange(first, first + n, device=q.device).unsqueeze(0)
            return layer.port.rotate(layer.facts.layer, q, here, to)

        return turn

    # --------------------------------------------------------------------- storing

    def _fresh_columns(self, row: int, q: Tensor, k: Tensor, v: Tensor, first: int) -> dict[str, Tensor]:
        """Every column of the new tokens, ``[H, T, ...]`` each."""
        layer, facts, n = self.layer, self.layer.facts, k.shape[1]
        positions = torch.arange(first, first + n, device=k.device)
        if first < layer.prompts[row]:
            so_far = {name: tensor[0] for name, tensor in layer.row_state(row).items()} if first else {}
            layer.set_state(row, layer.read.observe_prefill(facts, layer.constants, q, k, so_far))
            layer.encode.note({name: t[0] for name, t in layer.row_state(row).items()}, k, v, positions)
        values = layer.encode.encode(k, v, positions.expand(facts.kv_heads, n))
        fresh = {**layer.read.fresh(layer.constants, layer.row_state(row), k.unsqueeze(0)),
                 **layer.keep.fresh(positions.unsqueeze(0), facts.kv_heads)}  # fmt: skip
        values |= {name: tensor.squeeze(0) for name, tensor in fresh.items()}
        for spec in layer.columns:
            if spec.name == "pos":
                values["pos"] = positions.int().expand(facts.kv_heads, n)
            elif spec.name not in values:
                values[spec.name] = torch.zeros(facts.kv_heads, n, *spec.tail, dtype=spec.dtype, device=k.device)
        return values

    def _store(self, row: int, fresh: dict[str, Tensor], statistic: Tensor | None, final: bool) -> Tensor | None:
        """Store a run; returns the statistic of what is held now, where nothing was evicted."""
        layer = self.layer
        held, index = self.held(row)
        before = int(held.lengths[index, 0])
        total = before + next(iter(fresh.values())).shape[1]
        statistic = self._summed(row, statistic, total)
        evicts = final or layer.strategy.prefill.evict_chunks
        if statistic is not None and not evicts:  # a rule sees a prompt's statistic whole, however it came
            self._statistics[row] = statistic
        if not layer.keep.evicts or "capacity" not in layer.plan:
            layer.store.extend(row, fresh)
            return statistic
        candidates = held.row_columns(index) if before else {}
        everything = {n: torch.cat([candidates[n], c], 1) if before else c for n, c in fresh.items()}
        if not evicts:
            if row not in self.scratch:
                self.scratch[row] = SlotStore(layer.layout(1, layer.prompts[row], layer.encode.of_row(row)))
            self.scratch[row].load(0, everything) if before else self.scratch[row].extend(0, everything)
            return None
        self._evict(row, everything, total, statistic)
        return None

    def _summed(self, row: int, statistic: Tensor | None, total: int) -> Tensor | None:
        """The statistic of all ``total`` tokens, over the chunks so far."""
        if statistic is None:
            return None
        if (short := total - statistic.shape[1]) > 0:  # chunks blind to each other
            statistic = pad(statistic, (0, 0) * (statistic.dim() - 2) + (short, 0))
        earlier = self._statistics.pop(row, None)
        if earlier is not None:
            statistic[:, : earlier.shape[1]] += earlier
        return statistic

    def _evict(self, row: int, everything: dict[str, Tensor], total: int, statistic: Tensor | None) -> None:
        layer = self.layer
        view = self._view(row, everything, total, statistic)
        if statistic is not None:
            layer.keep.observe(view)
        survivors = layer.keep.survivors(view)
        self.scratch.pop(row, None)
        if survivors is not None:
            if layer.archive is not None:
                gone = _others(survivors[0], total)
                evicted = {n: _gather(c, gone) for n, c in everything.items()}
                layer.archive.evicted(row, layer.archived(evicted), evicted.get("pos", gone))
            everything = {name: _gather(column, survivors[0]) for name, column in everything.items()}
        layer.store.load(row, everything)

    def _renew(self, row: int) -> None:
        """The read rule's columns of a prompt that came in chunks, by what the rule knows at its end."""
        layer = self.layer
        values = layer.store.row_columns(row)
        keys, _ = layer.encode.of_row(row).decode(_batched(values))
        fresh = layer.read.fresh(layer.constants, layer.row_state(row), keys)
        layer.store.rewrite(row, {name: tensor.squeeze(0) for name, tensor in fresh.items()})

    def settle(self, row: int, statistic: Tensor | None = None) -> None:
        """The read rule brings its state up to date with what is stored."""
        layer = self.layer
        if not layer.read.selects:
            return
        layer.grow_state()
        store, encode = layer.chosen_from, layer.encode_of_chosen.of_row(row)
        n = int(store.lengths[row, 0])
        values = store.row_columns(row)
        view = self._view(row, values, n, statistic)
        view.keys = lambda: encode.decode(_batched(values))[0]
        layer.read.settle(view)
        store.rewrite(row, {c.name: values[c.name] for c in layer.read.columns(layer.facts) if c.name in values})
        slots = layer.read.turned(view)
        if slots is not None:
            k, index = values["k"], slots[0]
            where = values["pos"].long().gather(1, index) if "pos" in values else index
            turned = layer.to_origin(_gather(k, index).unsqueeze(0), where.unsqueeze(0))[0]
            store.rewrite(row, {"k": k.scatter(1, index.unsqueeze(-1).expand_as(turned), turned)})

    def _view(self, row: int, columns: Mapping[str, Tensor], n: int, statistic: Tensor | None = None) -> View:
        """One sequence's ``n`` candidates."""
        layer = self.layer
        return View(
            layer=layer.facts,
            column=lambda name: columns[name].unsqueeze(0),
            lengths=torch.full((1, layer.facts.kv_heads), n, dtype=torch.int64, device=layer.facts.device),
            width=n,
            now=layer.seen[row : row + 1] - 1,
            plan={key: value[row : row + 1] for key, value in layer.plan.items()},
            weights=None if statistic is None else statistic.unsqueeze(0),
            run=int(layer.seen[row]) - self._began.get(row, 0),
            state=layer.row_state(row),
            constants=layer.constants,
            port=layer.port,
            ragged=False,
        )


def _batched(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.unsqueeze(0) for name, tensor in values.items()}


def _gather(column: Tensor, index: Tensor) -> Tensor:
    """``[H, n, ...]`` at ``[H, m]`` -> ``[H, m, ...]``."""
    heads = torch.arange(column.shape[0], device=index.device).unsqueeze(1)
    return column[heads.to(column.device), index.to(column.device)]


def _others(index: Tensor, n: int) -> Tensor:
    """Of 0 .. n - 1 those that are not in ``index [H, m]``: ``[H, n - m]``, ascending."""
    left = torch.ones(index.shape[0], n, dtype=torch.bool, device=index.device).scatter_(1, index, False)
    return left.nonzero()[:, 1].view(index.shape[0], -1)
