"""One layer's cache of a batch: the lines that every strategy goes through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from kvatlas.attention.decode import attend_step
from kvatlas.attention.prefill import Prefill
from kvatlas.attention.tiles import Rotate, Tile
from kvatlas.engine.clock import Clock
from kvatlas.engine.intake import Intake
from kvatlas.engine.slots import LayerSlots
from kvatlas.strategy.answers import Shared
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import LayerFacts, Port, Selection, Span, View


class LayerCache(LayerSlots):
    """Keys and values of one layer and what the strategy's rules know of them.

    Args:
        strategy: the four answers for this layer.
        facts: of the layer.
        how: scale, the model's own window and sink logits.
        port: what the strategy may ask of the model.
        shared: what the layers have in common, from ``strategy.place.shared``.
        constants: what calibration found for this layer.
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
        super().__init__(strategy, facts, port, shared, constants)
        self.how, self.clock = how, clock or Clock(False)
        self._learns = self.keep.wants() is not None
        self.wants = self.keep.wants() or self.read.wants()
        self.weights: Tensor | None = None
        self.attended: list[tuple[Tensor, Tensor]] = []
        self._foreseen: Selection | None = None
        self.intake = Intake(self)

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
        if q.shape[1] > size and not self.strategy.prefill.evict_chunks:
            self.expect(row, q.shape[1])
        outs = []
        for start in range(0, q.shape[1], size):
            part = slice(start, start + size)
            last = final and start + size >= q.shape[1]
            outs.append(self.intake.run(row, q[:, part], k[:, part], v[:, part], last))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def take(self, row: int, q: Tensor, k: Tensor, v: Tensor, statistic: Tensor | None, final: bool = True) -> None:
        """Store a run that has been attended to, or what the keep rule leaves of it.

        ``statistic [Hq, held + T]`` is what the rule wanted of the attention, for what is held and for the run.
        """
        self.intake.take(row, q, k, v, statistic, final)

    def put_inputs(self, row: int, x: Tensor) -> None:
        """The attention input ``[T, hidden]`` of a run that is about to come."""
        self.store.put_inputs(row, int(self.seen[row]), x)

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

    def read_ahead(self) -> None:
        """The layer before is about to compute: start to fetch what will be read whatever the query."""
        if not self.read.selects or self.archive is not None:
            with self.clock("fetch"):
                self.store.prefetch(None)

    def append_inputs(self, x: Tensor) -> None:
        """The attention input ``[B, hidden]`` of the step that is about to come."""
        self.store.append_inputs(x, self.seen)

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new token per sequence: ``q [B, Hq, D]``, ``k, v [B, H, D]`` -> ``[B, Hq, D]``."""
        clock, now = self.clock, self.seen
        with clock("append"):
            newest = self.store.append(self._encoded(k, v, now))
            self.seen = now + 1
            self.grow_state()
        with clock("select"):
            view = self._view(now, newest, k)
            self._turn(view)
            chosen = self.read.select(self._choice(view), q, self._foreseen)
            self._foreseen, self.selection, self.last_archived = None, chosen, None
            if clock.diagnose:
                self._note_attended(view, chosen)
        tiles = self._fetched(self._tiles(view, chosen))
        with clock("attend"):
            out, weights = attend_step(
                q, tiles, scale=self.how.scale, weights=self._learns or clock.diagnose,
                sink=self.how.sink, rotate=self._rotate_step(now),
            )  # fmt: skip
        with clock("drop"):
            self.weights = weights
            self._after_step(view, weights, chosen)
        return out

    def _choice(self, view: View) -> View:
        """What the read rule chooses from: what is kept, or what was evicted to the archive."""
        return view if self.archive is None else self._archive_view(view)

    def _tiles(self, view: View, chosen: Selection | None) -> Iterator[Tile]:
        if self.archive is None:
            return self.store.tiles(chosen, self.spans(view) if chosen is None else self.keep.spans(view))
        kept = self.store.tiles(None, self.keep.spans(view))
        return kept if self.archive.filled == 0 else chain(kept, self.archive.tiles(chosen))

    def _after_step(self, view: View, weights: Tensor | None, chosen: Selection | None) -> None:
        view.selection = chosen if self.archive is None else None
        if self._learns and weights is not None:
            view.weights = weights if view.selection is None else _by_slot(weights, view.selection, view.width)
            view.weights = view.weights[..., : view.width]  # the archive's come after the kept ones
        self.keep.observe(view)
        victims = self.keep.victims(view)
        if victims is None:
            return
        if self.archive is not None:
            self.put_away(victims)
        self.store.drop(victims)

    def _turn(self, view: View) -> None:
        """Keys that the read rule wants to see from one place are turned back to position 0, in place."""
        slots = self.read.turned(view)
        if slots is None:
            return
        at = slots.clamp(min=0)
        k = self.store.take("k", at)
        turned = self.to_origin(k, self.store.take("pos", at).long() if self.has_positions else at)
        self.store.write("k", slots, turned)

    def _note_attended(self, view: View, chosen: Selection | None) -> None:
        """True positions and counts of what this step attends to, for those who look closely."""
        self.attended = []
        if chosen is None or self.archive is not None:
            self.attended.append((self.positions(self.store, view.width), view.lengths))
        if chosen is None and self.archive is not None:
            self.attended.append((self.positions(self.archive, self.archive.filled), self.archive.lengths))
        if chosen is not None:
            store = self.chosen_from
            of = self.positions(store, store.filled)
            self.attended += [(of.gather(-1, part.index), part.count) for part in chosen.parts()]

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
        if self.has_positions:
            out["pos"] = positions.int().expand(-1, facts.kv_heads)
        return out

    def _view(self, now: Tensor | None = None, newest: Tensor | None = None, key: Tensor | None = None) -> View:
        store = self.store
        return View(
            layer=self.facts,
            column=store.column,
            lengths=store.lengths,
            width=store.filled,
            now=self.seen - 1 if now is None else now,
            plan=self.plan,
            newest=newest,
            key=key,
            state=self.state,
            constants=self.constants,
            port=self.port,
            keys=store.keys,
            hole=store.next if store.holes else None,
            ragged=store.ragged,
        )

    def _archive_view(self, view: View) -> View:
        """The archive in the same words; its newest token is the one that was evicted last."""
        store = self.archive
        assert store is not None
        lengths = store.lengths - (store.next < store.lengths).long()
        newest, key = self.last_archived or (None, None)
        return replace(
            view, column=store.column, lengths=lengths, width=store.filled, newest=newest, key=key, keys=store.keys,
            hole=None, ragged=True,
        )  # fmt: skip

    def _rotate_step(self, now: Tensor) -> Rotate:
        return lambda q, to: self.port.rotate(self.facts.layer, q, now.unsqueeze(1), to)

    def spans(self, view: View) -> tuple[Span, ...] | None:
        """Slot ranges that the rules see from another position."""
        return self.keep.spans(view) or self.read.spans(view)


def _by_slot(weights: Tensor, chosen: Selection, width: int) -> Tensor:
    """Weights of a selection ``[B, Hq, n]`` at their slots ``[B, Hq, width]``; what was not read got nothing."""
    out, start = weights.new_zeros(*weights.shape[:2], width), 0
    for part in chosen.parts():
        group, n = weights.shape[1] // part.index.shape[1], part.index.shape[-1]
        index = part.index.repeat_interleave(group, 1)
        valid = torch.arange(n, device=index.device) < part.count.repeat_interleave(group, 1).unsqueeze(-1)
        out.scatter_add_(-1, index, weights[..., start : start + n].masked_fill(~valid, 0.0))
        start += n
    return out
