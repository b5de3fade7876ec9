"""Host memory with a cache of blocks on the device: what is read again and again is fetched once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.attention.tiles import Tile
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Layout, Shared, Transfers
from kvatlas.strategy.place.fetch import Arrive, after, staged
from kvatlas.strategy.place.host import Host, HostStore
from kvatlas.strategy.place.link import Link, Wait
from kvatlas.strategy.place.resident import Resident
from kvatlas.strategy.place.store import Bytes, Store
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Selection, Span


@dataclass(frozen=True)
class BlockCache(Host):
    """Selected slots come from device blocks where they are there, and from the host where they are not.

    A block is ``block`` slots that follow one another, of one KV head; a layer holds ``cache`` slots of each sequence
    and KV head on the device. After a step the ``topk`` blocks with most selected slots may enter: under ``lru`` they
    do, under ``lfu`` those that were among the ``topk`` more often than a block that is there. New tokens are written
    through, so nothing stale is ever served.

    The authors' blocks hold all KV heads of their tokens, and their counts begin anew when a block comes back. Ours are
    kept, and halved every 64 steps.
    """

    source: ClassVar[str] = "PQCache, 2024, section 3.4"
    cache: int = 4096
    block: int = 128
    policy: Literal["lfu", "lru"] = "lfu"
    topk: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise UserError(f"block must be at least 1 token, not {self.block}")
        if self.cache < self.block:
            raise UserError(f"cache must hold at least one block of {self.block} tokens, not {self.cache}")
        if self.topk < 1:
            raise UserError(f"topk must be at least 1 block a step, not {self.topk}")

    def words(self) -> str:
        return f"{super().words()}; {self.cache} tokens cached on the device in blocks of {self.block}, {self.policy}"

    def shared(self, layers: int) -> Link:
        return CountingLink(self.overlap, self.link)

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, CountingLink)
        return CachedStore(layout, shared, self)

    def in_place(self, layout: Layout) -> bool:
        """Selections go through the cache, also where the model runs on the CPU."""
        return layout.limit is None and super().in_place(layout)

    def bytes_held(self, layout: Layout) -> int:
        """The host's columns, the device's metadata and its blocks."""
        return super().bytes_held(layout) + Resident.bytes_of(layout, self.cache, self.block)


@dataclass(slots=True)
class CachedTransfers(Transfers):
    """With how many of the selected slots were on the device, and how many had to be fetched (of one KV head each)."""

    hits: int = 0
    misses: int = 0


class CountingLink(Link):
    """A link that knows what did not have to pass it."""

    def __init__(self, overlap: bool, speed: float | None) -> None:
        super().__init__(overlap, speed)
        self.hits = self.misses = 0

    def transfers(self) -> CachedTransfers:
        moved = super().transfers()
        return CachedTransfers(
            **{f.name: getattr(moved, f.name) for f in fields(moved)}, hits=self.hits, misses=self.misses
        )


class CachedStore(HostStore):
    """Host slots and the blocks of them that are on the device, where a rule selects."""

    link: CountingLink

    def __init__(self, layout: Layout, link: CountingLink, place: BlockCache) -> None:
        super().__init__(layout, link)
        self.resident = Resident(layout, self.capacity, place.cache, place.block, place.policy, place.topk)
        self._entering: Wait | None = None

    # ------------------------------------------------------------------ reading

    def _all_here(self) -> dict[str, Tensor] | None:
        return None if self.resident.active else super()._all_here()

    def tiles(self, selection: Selection | None, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        yield from super().tiles(selection, spans)
        if self.resident.active and selection is not None:
            for part in selection.parts():
                self._admit(part)

    def _bring(self, part: Selection, head: int, ahead: bool) -> Arrive:
        """What is resident comes from there, the rest by the link."""
        self._entered()
        index, count, n = part.index, part.count, part.index.shape[2]
        at = self.resident.find(index)
        missing = (at < 0) & (torch.arange(n, device=index.device) < count.unsqueeze(-1))
        rows, heads, ranks = missing.nonzero(as_tuple=True)
        source = self._flat(rows, heads, index[rows, heads, ranks], self.capacity).cpu()
        target = self._flat(rows, heads, ranks + head, n + head)
        self.link.misses += len(source)
        self.link.hits += int(count.sum()) - len(source)
        assert self.layout.limit is not None
        buffers = staged(self.link, self.layout, "selection", n + head, self.layout.limit(self.capacity) + 1)

        def copy() -> int:
            moved = 0
            for name, buffer in buffers.items():
                self.resident.read(name, buffer[:, :, head:], at)
                taken = self.data[name].flatten(0, 2).index_select(0, source)
                buffer.flatten(0, 2).index_copy_(0, target, taken.to(buffer.device, non_blocking=True))
                moved += taken.nbytes
            return moved

        return after(_holding(self.link.start(copy, self.layout.device, ahead), at, target), buffers)

    def _flat(self, rows: Tensor, heads: Tensor, slots: Tensor, width: int) -> Tensor:
        """Where ``[rows, heads, slots]`` are in a tensor ``[B, H, width, ...]`` whose first three axes are one."""
        return (rows * self.layout.kv_heads + heads) * width + slots

    # ----------------------------------------------------------------- admission

    def _admit(self, selection: Selection) -> None:
        """Let blocks enter, while the next layers compute."""
        rows, heads, blocks, places = self.resident.admit(selection)
        if len(rows) == 0:
            return
        block, capacity = self.resident.block, self.capacity
        within = torch.arange(block, device=rows.device)
        slots = (blocks.unsqueeze(-1) * block + within).clamp(max=capacity - 1)
        source = self._flat(rows.unsqueeze(-1), heads.unsqueeze(-1), slots, capacity).flatten().cpu()

        def copy() -> int:
            moved = 0
            for name in self._payload():
                taken = self.data[name].flatten(0, 2).index_select(0, source)
                self.resident.fill(name, rows, heads, places, taken)
                moved += taken.nbytes
            return moved

        wait = self.link.start(copy, self.layout.device, ahead=True)
        self._entering = _holding(wait, rows, heads, places)

    def _entered(self) -> None:
        """Wait for blocks that are on their way."""
        if self._entering is not None:
            self._entering()
            self._entering = None

    # ------------------------------------------------------------------- writing

    def append(self, values: Mapping[str, Tensor]) -> Tensor:
        self._entered()
        slots = super().append(values)
        for name in self._payload():
            self.resident.write(name, slots.unsqueeze(-1), values[name].unsqueeze(2))
        return slots

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        self._entered()
        super().write(name, slots, values)
        if name in self.resident.data:
            self.resident.write(name, slots, values)

    def extend(self, row: int, values: Mapping[str, Tensor]) -> None:
        self._entered()
        super().extend(row, values)
        self.resident.forget(row)

    def compact(self) -> None:
        self._entered()
        if self.holes:
            self.resident.forget()
        super().compact()

    def _resize(self, capacity: int) -> None:
        self._entered()
        super()._resize(capacity)
        self.resident.grow(capacity)

    def select_rows(self, rows: Tensor) -> None:
        self._entered()
        super().select_rows(rows)
        self.resident.select_rows(rows)

    def bytes(self) -> Bytes:
        return super().bytes() + Bytes(device_metadata=self.resident.bytes())


def _holding(wait: Wait, *tensors: Tensor) -> Wait:
    """The same wait; until it is over, a copy beside compute may still look at these tensors."""

    def over() -> None:
        nonlocal tensors
        wait()
        tensors = ()

    return over


register(Preset("blockcache", {"place": BlockCache}, "host memory; blocks that are read often stay on the device"))
