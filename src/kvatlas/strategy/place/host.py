"""Keys and values in host memory; a step fetches what it reads into staging buffers on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.attention.choose import move
from kvatlas.attention.tiles import TILE
from kvatlas.strategy.answers import Layout, Place, Shared
from kvatlas.strategy.place.fetch import Arrive, FetchingStore, Run, after, cut, staged
from kvatlas.strategy.place.link import STAGES, Link, check_speed
from kvatlas.strategy.place.store import Bytes, Store, storage
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Selection


@dataclass(frozen=True)
class Host(Place):
    """Payload on the host, metadata (and what a reader scores with) on the device.

    ``overlap`` starts a layer's fetch while the layer before computes; without it each step waits for its transfer, as
    the study's systems did. ``link`` emulates a link of that many GB/s.

    Where the model runs on the CPU, host and device are one memory: keys and values are read where they are, and what
    an accelerator would have had to fetch is counted as transferred. Only with ``link`` they are really copied to
    staging buffers, and arrive no sooner than that link allows.
    """

    source: ClassVar[str] = "FlexGen, ICML 2023; InfiniGen, OSDI 2024"
    tier: ClassVar[Literal["device", "host", "disk"]] = "host"
    overlap: bool = True
    link: float | None = None

    def __post_init__(self) -> None:
        check_speed(self.link)

    def words(self) -> str:
        speed = " (on a CPU: read in place)" if self.link is None else f", link emulated at {self.link:g} GB/s"
        return "host, fetched " + ("a layer ahead" if self.overlap else "when needed") + speed

    def shared(self, layers: int) -> Link:
        return Link(self.overlap, self.link)

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, Link)
        return HostStore(layout, shared)

    def in_place(self, layout: Layout) -> bool:
        """Keys and values are read where they are."""
        return layout.device.type == "cpu" and self.link is None

    def staging(self, layout: Layout) -> int:
        """Two buffers of what a selection may fetch and the newest token, or of a tile where everything is read."""
        if self.in_place(layout):
            return 0
        tokens = min(TILE, layout.capacity) if layout.limit is None else layout.limit(layout.capacity) + 1
        return STAGES * layout.rows * layout.kv_heads * tokens * layout.slot_bytes("payload")


class HostStore(FetchingStore):
    """Slots whose payload columns are host tensors (pinned, where the device is CUDA)."""

    def _empty(self, name: str, capacity: int) -> Tensor:
        fresh = super()._empty(name, capacity)
        pinned = self.layout.device.type == "cuda" and fresh.device.type == "cpu"
        return fresh.pin_memory() if pinned else fresh

    def _device(self, name: str) -> torch.device:
        return torch.device("cpu") if self._spec(name).kind == "payload" else self.layout.device

    def column(self, name: str) -> Tensor:
        return super().column(name).to(self.layout.device)

    @property
    def _in_place(self) -> bool:
        return not self.link.moves(self.layout.device)

    def _runs(self, stop: int) -> list[Run]:
        if self._in_place:
            return [Run(0, stop, True)] if stop else []
        return [Run(a, b, False) for a, b in cut(0, stop)]

    def _here(self, run: Run) -> dict[str, Tensor]:
        size = len(self.lengths) * self.layout.kv_heads * self.layout.slot_bytes("payload")
        self.link.count(-(-(run.stop - run.start) // TILE), (run.stop - run.start) * size)
        return self._pieces(run)

    def _pieces(self, run: Run) -> dict[str, Tensor]:
        """A run's payload, ``[B, H, n, ...]``, on the host."""
        return {n: self.data[n][:, :, run.start : run.stop] for n in self._payload()}

    def _source(self, name: str) -> Tensor:
        """A payload column as it is held, ``[B, H, slots, ...]``."""
        return self.data[name]

    def _where(self, slots: Tensor) -> Tensor:
        """Under which numbers ``slots [B, H, m]`` are held in it."""
        return slots

    def _all_here(self) -> dict[str, Tensor] | None:
        return {n: self.data[n] for n in self._payload()} if self._in_place else None

    def _note_chosen(self, part: Selection) -> None:
        fetched = (part.foreseen or part).index.numel()  # a new token is put beside what was foreseen
        self.link.count(1, fetched * self.layout.slot_bytes("payload"))

    def _fetch(self, run: Run, ahead: bool) -> Arrive:
        sources = self._pieces(run)
        buffers = staged(self.link, self.layout, "tile", run.stop - run.start, min(TILE, self.capacity))
        wait = self.link.start(lambda: sum(move(buffers[n], sources[n]) for n in sources), self.layout.device, ahead)
        return after(wait, buffers)

    def _bring(self, part: Selection, head: int, ahead: bool) -> Arrive:
        most = self.layout.limit(self.capacity) if self.layout.limit is not None else self.capacity
        buffers = staged(self.link, self.layout, "selection", part.index.shape[2] + head, most + 1)
        sources = {name: self._source(name) for name in buffers}

        def copy() -> int:
            at = self._where(part.index.cpu())
            return sum(move(buffer[:, :, head:], sources[name], at) for name, buffer in buffers.items())

        return after(self.link.start(copy, self.layout.device, ahead), buffers)

    def row_columns(self, row: int) -> dict[str, Tensor]:
        return {n: c.to(self.layout.device) for n, c in super().row_columns(row).items()}

    def bytes(self) -> Bytes:
        return self._count(storage(self.data), "host")


register(Preset("host", {"place": Host}, "every key and value in host memory, fetched by tiles"))
