"""Keys and values in host memory; a step fetches what it reads into staging buffers on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.attention.choose import move
from kvatlas.attention.decode import take_slots
from kvatlas.attention.tiles import TILE, Tile
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Layout, Place, Selection, Shared, Span
from kvatlas.strategy.place.device import SlotStore, tiles_of
from kvatlas.strategy.place.link import STAGES, Link
from kvatlas.strategy.place.store import Bytes, Store
from kvatlas.strategy.registry import Preset, register


@dataclass(frozen=True)
class Host(Place):
    """Payload on the host, metadata (and what a reader scores with) on the device.

    ``overlap`` starts a layer's fetch while the layer before computes; without it each step waits for its transfer, as
    the study's systems did. ``link`` emulates a link of that many GB/s.
    """

    source: ClassVar[str] = "FlexGen, ICML 2023; InfiniGen, OSDI 2024"
    tier: ClassVar[Literal["device", "host"]] = "host"
    overlap: bool = True
    link: float | None = None

    def __post_init__(self) -> None:
        if self.link is not None and not self.link > 0:
            raise UserError(f"link must be above 0 GB/s, not {self.link:g}")

    def words(self) -> str:
        speed = "" if self.link is None else f", link emulated at {self.link:g} GB/s"
        return "host, fetched " + ("a layer ahead" if self.overlap else "when needed") + speed

    def shared(self, layers: int) -> Link:
        return Link(self.overlap, self.link)

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, Link)
        return HostStore(layout, shared)

    def staging(self, layout: Layout) -> int:
        """Two buffers of what a selection may fetch and the newest token, or of a tile where everything is read."""
        tokens = min(TILE, layout.capacity) if layout.limit is None else layout.limit(layout.capacity) + 1
        return STAGES * layout.rows * layout.kv_heads * tokens * layout.slot_bytes("payload")


class HostStore(SlotStore):
    """Slots whose payload columns are host tensors (pinned, where the device is CUDA)."""

    def __init__(self, layout: Layout, link: Link) -> None:
        self.link = link
        self._ahead: tuple[Selection | None, dict[str, Tensor], Callable[[], None]] | None = None
        super().__init__(layout)

    def _empty(self, name: str, capacity: int) -> Tensor:
        fresh = super()._empty(name, capacity)
        pinned = self.layout.device.type == "cuda" and fresh.device.type == "cpu"
        return fresh.pin_memory() if pinned else fresh

    def _device(self, name: str) -> torch.device:
        return torch.device("cpu") if self._spec(name).kind == "payload" else self.layout.device

    def column(self, name: str) -> Tensor:
        return super().column(name).to(self.layout.device)

    def prefetch(self, selection: Selection | None) -> None:
        """Bring a selection, or the first tile of everything, while another layer computes."""
        if selection is None or self._ahead is not None:
            return
        staged, wait = self._fetch(selection.index, head=1, ahead=True)
        self._ahead = (selection, staged, wait)

    def tiles(self, selection: Selection | None, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        if selection is None:
            yield from self._everything(spans)
            return
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is selection.foreseen:
            foreseen, staged, wait = ahead
            assert foreseen is not None
            wait()
            new = selection.index[..., : selection.index.shape[-1] - foreseen.index.shape[-1]]
            assert new.shape[-1] == 1, "staging leaves room for the newest token"
            for name, buffer in staged.items():
                buffer[:, :, 0] = take_slots(self.data[name], new)[:, :, 0]
        else:
            if ahead is not None:
                ahead[2]()
            staged, wait = self._fetch(selection.index, head=0, ahead=False)
            wait()
        k, v = self.layout.encode.decode(staged)
        yield Tile(k, v, selection.count)

    def _fetch(self, index: Tensor, head: int, ahead: bool) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Gather host slots ``index [B, H, n]`` into staging, after ``head`` free slots."""
        batch, heads, n = index.shape
        limit = self.layout.limit(self.capacity) if self.layout.limit is not None else self.capacity
        most = (limit + 1) * batch * heads
        self.link.turn("selection")
        staged = {}
        for spec in self.layout.columns:
            if spec.kind == "payload":
                shape = (batch, heads, n + head, *spec.tail)
                size = most * torch.Size(spec.tail).numel()
                staged[spec.name] = self.link.stage("selection", spec.name, shape, size, spec.dtype, self.layout.device)
        sources = {name: self.data[name] for name in staged}

        def copy() -> int:
            at = index.cpu()
            return sum(move(buffer[:, :, head:], sources[name], at, beside=ahead) for name, buffer in staged.items())

        return staged, self.link.start(copy, self.layout.device, ahead)

    def _everything(self, spans: Sequence[Span] | None) -> Iterator[Tile]:
        """All slots, a tile at a time, the next one under way while this one is attended to."""
        spans = spans or (Span(0, None, None),)
        pieces = [
            (start, min(stop, start + TILE), span)
            for span in spans
            for stop in [self.filled if span.stop is None else min(self.filled, span.stop)]
            for start in range(span.start, stop, TILE)
        ]
        under_way = None
        for i in range(len(pieces) + 1):
            coming = self._copy_range(*pieces[i][:2], ahead=i > 0) if i < len(pieces) else None
            if under_way is not None:
                yield from self._arrived(*under_way, pieces[i - 1])
            under_way = coming

    def _copy_range(self, start: int, stop: int, ahead: bool) -> tuple[dict[str, Tensor], Callable[[], None]]:
        self.link.turn("tile")
        sources = {n: self.data[n][:, :, start:stop] for n in self._payload()}
        size = len(self.lengths) * self.layout.kv_heads * min(TILE, self.capacity)
        staged = {
            n: self.link.stage("tile", n, tuple(s.shape), size * s[0, 0, 0].numel(), s.dtype, self.layout.device)
            for n, s in sources.items()
        }

        def copy() -> int:
            return sum(move(buffer, sources[name], beside=ahead) for name, buffer in staged.items())

        return staged, self.link.start(copy, self.layout.device, ahead)

    def _arrived(
        self, staged: dict[str, Tensor], wait: Callable[[], None], piece: tuple[int, int, Span]
    ) -> Iterator[Tile]:
        wait()
        start, stop, span = piece
        lengths = (self.lengths - start).clamp(0, stop - start) if self.ragged else None
        view = (Span(0, None, span.query_at),)
        for tile in tiles_of(self.layout, staged, lengths, None, view):
            if "pos" in self.data:
                tile.positions = self.data["pos"][:, :, start:stop]
            yield tile

    def row_columns(self, row: int) -> dict[str, Tensor]:
        return {n: c.to(self.layout.device) for n, c in super().row_columns(row).items()}

    def bytes(self) -> Bytes:
        return self._count(self.data, "host")


register(Preset("host", {"place": Host}, "every key and value in host memory, fetched by tiles"))
