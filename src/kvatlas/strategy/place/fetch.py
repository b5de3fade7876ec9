"""Stores whose keys and values are fetched run by run, ahead of their use where the link allows it."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvatlas.attention.decode import take_slots
from kvatlas.attention.tiles import TILE, Tile
from kvatlas.strategy.answers import Layout
from kvatlas.strategy.place.device import SlotStore, tiles_of
from kvatlas.strategy.place.link import Link, Wait
from kvatlas.strategy.place.store import payload, put_slots
from kvatlas.strategy.view import Selection, Span

Arrive = Callable[[], dict[str, Tensor]]
"""Wait for what is on its way and give its columns ``[B, H, n, ...]``."""


@dataclass(frozen=True, slots=True)
class Run:
    """Slots ``start .. stop - 1``; ``here``: they can be read where they are."""

    start: int
    stop: int
    here: bool


@dataclass(slots=True)
class Fetched:
    """A run on its way to the device. ``ahead``: it may lack what was appended since."""

    run: Run
    arrive: Arrive
    ahead: bool


class FetchingStore(SlotStore):
    """What all stores that fetch have in common.

    Reading everything goes through a ring of buffers that all layers share: while a run is attended to, the next ones
    are on their way, and after a layer's last run the first ones of the layer that comes next (``prefetch(None)``).
    """

    def __init__(self, layout: Layout, link: Link) -> None:
        self.link = link
        self._ahead: deque[Fetched] = deque()
        self._late: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._foreseen: tuple[Selection, Arrive] | None = None
        super().__init__(layout)

    # ------------------------------------------------------- what a place has to say

    @abstractmethod
    def _runs(self, stop: int) -> list[Run]:
        """Slots 0 .. ``stop`` - 1 as runs; those that are not here have at most ``TILE`` slots."""

    @abstractmethod
    def _here(self, run: Run) -> dict[str, Tensor]:
        """The payload of a run that is here, as views."""

    @abstractmethod
    def _fetch(self, run: Run, ahead: bool) -> Arrive:
        """Start to bring a run's payload."""

    @abstractmethod
    def _bring(self, part: Selection, head: int, ahead: bool) -> Arrive:
        """Start to bring the payload of a selection, ``[B, H, n, ...]``, after ``head`` free places."""

    def _all_here(self) -> dict[str, Tensor] | None:
        """The whole payload, where a selection can be attended to in place."""
        return None

    def _note_chosen(self, part: Selection) -> None:
        """A selection is attended to in place."""

    # --------------------------------------------------------------------- reading

    def prefetch(self, selection: Selection | None) -> None:
        """Bring a selection, or the first runs of everything, while another layer computes."""
        if selection is None:
            self.link.comes_next(self)
        elif self._foreseen is None and self._all_here() is None:
            self._foreseen = selection, self._bring(selection, head=1, ahead=True)

    def tiles(self, selection: Selection | None, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        self.link.claim(self)
        if selection is None:
            yield from self._everything(tuple(spans or (Span(0, None, None),)))
            return
        here = self._all_here()
        if here is not None:
            for part in selection.parts():
                self._note_chosen(part)
            yield from tiles_of(self.layout, here | self._beside(slice(None)), None, selection, None)
            return
        for part in selection.parts():
            values = self._arrived(part) | self._beside(part.index)
            yield from tiles_of(self.layout, values, part.count, None, (Span(0, None, part.query_at),))

    def _beside(self, at: slice | Tensor) -> dict[str, Tensor]:
        """What decoding needs that is not payload."""
        names = [n for n in self._needs() if n in self.data and n not in self._payload()]
        if isinstance(at, Tensor):
            return {n: take_slots(self.data[n], at) for n in names}
        return {n: self.data[n][:, :, at] for n in names}

    def _arrived(self, selection: Selection) -> dict[str, Tensor]:
        """The payload of a selection, ``[B, H, n, ...]``; where it was foreseen, the new token is put before it."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or foreseen[0] is not selection.foreseen:
            if foreseen is not None:
                foreseen[1]()
            return self._bring(selection, head=0, ahead=False)()
        values = foreseen[1]()
        new = selection.index[..., : selection.index.shape[-1] - foreseen[0].index.shape[-1]]
        assert new.shape[-1] == 1, "staging leaves room for the newest token"
        for name, buffer in values.items():
            buffer[:, :, :1] = self.take(name, new)
        return values

    def _everything(self, spans: Sequence[Span]) -> Iterator[Tile]:
        runs = self._runs(self.filled)
        coming, self._ahead = self._ahead, deque()
        left = deque([run for run in runs if not run.here][len(coming) :])
        for run in runs:
            if not run.here and not coming:
                coming.append(self._start(left.popleft(), ahead=False))
            fetched = None if run.here else coming.popleft()
            self._keep_busy(coming, left)
            values = self._here(run) if fetched is None else self._complete(fetched, run)
            yield from self._run_tiles(run, values | self._beside(slice(run.start, run.stop)), spans)
        self._late.clear()

    def _run_tiles(self, run: Run, values: dict[str, Tensor], spans: Sequence[Span]) -> Iterator[Tile]:
        """A run's tiles, seen from where the spans say."""
        lengths = (self.lengths - run.start).clamp(0, run.stop - run.start) if self.ragged else None
        positions = self.data["pos"][:, :, run.start : run.stop] if "pos" in self.data else None
        size = run.stop - run.start
        cut = []
        for span in spans:
            start, stop = span.start - run.start, size if span.stop is None else span.stop - run.start
            if start < size and stop > 0:
                cut.append(Span(max(0, start), min(size, stop), span.query_at))
        if cut:
            yield from tiles_of(self.layout, values, lengths, None, cut, positions)

    # -------------------------------------------------------------------- the ring

    def _start(self, run: Run, ahead: bool) -> Fetched:
        return Fetched(run, self._fetch(run, ahead), ahead)

    def _keep_busy(self, coming: deque[Fetched], left: deque[Run]) -> None:
        """Fill idle buffers: with this layer's next runs, then with the first ones of the layer that comes next."""
        room = self.link.stages - 1 if self.link.overlap else 0
        while len(coming) < room and left:
            coming.append(self._start(left.popleft(), ahead=True))
        reader = None if left else self.link.reader
        while reader is not None and len(coming) + len(reader._ahead) < room and reader.read_on():
            self.link.holds(reader)

    def read_on(self) -> bool:
        """Start to bring one more run before this store is read; False when all are on their way."""
        runs = [run for run in self._runs(min(self.filled + 1, self.capacity)) if not run.here]
        if len(runs) == len(self._ahead):
            return False
        self._ahead.append(self._start(runs[len(self._ahead)], ahead=True))
        return True

    def _complete(self, fetched: Fetched, run: Run) -> dict[str, Tensor]:
        """A run that has arrived, with the tokens that were appended since it was fetched."""
        values = {name: column[:, :, : run.stop - run.start] for name, column in fetched.arrive().items()}
        if fetched.ahead:
            for slots, fresh in self._late:
                local = torch.where((slots >= run.start) & (slots < run.stop), slots - run.start, -1).unsqueeze(-1)
                for name, column in values.items():
                    put_slots(column, local, fresh[name].unsqueeze(2))
        return values

    def forget_ahead(self) -> None:
        """What was fetched ahead is of no use any more."""
        while self._ahead:
            self._ahead.popleft().arrive()
        if self._foreseen is not None:
            self._foreseen[1]()
        self._foreseen = None
        self._late.clear()

    # --------------------------------------------------------------------- writing

    def append(self, values: Mapping[str, Tensor]) -> Tensor:
        slots = super().append(values)
        if self._ahead:
            self._late.append((slots, {name: values[name] for name in self._payload()}))
        return slots

    def extend(self, row: int, values: Mapping[str, Tensor]) -> None:
        self.forget_ahead()
        super().extend(row, values)

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        self.forget_ahead()
        super().write(name, slots, values)

    def compact(self) -> None:
        if self.holes:
            self.forget_ahead()
        super().compact()

    def select_rows(self, rows: Tensor) -> None:
        self.forget_ahead()
        super().select_rows(rows)


def cut(start: int, stop: int, size: int = TILE) -> Iterator[tuple[int, int]]:
    """``start .. stop`` in pieces that end at multiples of ``size`` from ``start``."""
    for at in range(start, stop, size):
        yield at, min(stop, at + size)


def staged(link: Link, layout: Layout, use: str, n: int, most: int) -> dict[str, Tensor]:
    """The next buffers of a use for the payload of ``n`` slots, cut from ones of ``most`` slots."""
    link.turn(use)
    rows = layout.rows * layout.kv_heads
    return {
        c.name: link.stage(
            use, c.name, (layout.rows, layout.kv_heads, n, *c.tail), rows * most * torch.Size(c.tail).numel(), c.dtype,
            layout.device,
        )
        for c in payload(layout.columns)
    }  # fmt: skip


def after(wait: Wait, values: dict[str, Tensor]) -> Arrive:
    """These values, once ``wait`` has returned."""

    def arrive() -> dict[str, Tensor]:
        wait()
        return values

    return arrive
