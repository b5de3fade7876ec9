"""Blocks in a pool (PagedAttention): sequences hold block numbers, share equal prefixes, and copy a block on write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvatlas.attention.decode import gather_blocks
from kvatlas.attention.tiles import TILE, Tile
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Layout, Place, Shared
from kvatlas.strategy.place.blocks import BlockTable
from kvatlas.strategy.place.device import tiles_of
from kvatlas.strategy.place.store import Bytes, Store
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import Selection, Span


@dataclass(frozen=True)
class Paged(Place):
    """Blocks of ``block`` tokens; full blocks of a shared prompt prefix are stored once."""

    source: ClassVar[str] = "vLLM, SOSP 2023, section 4"
    block: int = 16
    share: bool = True

    def __post_init__(self) -> None:
        if self.block < 1:
            raise UserError(f"paged: block must be at least 1 token, not {self.block}")

    def words(self) -> str:
        return f"device, blocks of {self.block}" + (", shared prefixes" if self.share else "")

    def check(self, strategy: Strategy) -> None:
        if strategy.keep.evicts and not strategy.keep.lossless():
            raise UserError(
                f"paged: its blocks hold a token for all KV heads at once, so '{strategy.name}' cannot evict per KV "
                "head from them; leave +paged out"
            )

    def bytes_held(self, layout: Layout) -> int:
        """Whole blocks."""
        blocks = -(-layout.capacity // self.block)
        return super().bytes_held(replace(layout, capacity=blocks * self.block))

    def shared(self, layers: int) -> BlockTable:
        return BlockTable(self.block, self.share)

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, BlockTable)
        return PagedStore(layout, shared)


class PagedStore(Store):
    """One layer's pools ``[blocks, H, block, ...]``; which blocks are whose is the table's, common to all layers."""

    def __init__(self, layout: Layout, table: BlockTable) -> None:
        super().__init__(layout)
        self.table, self._seen_copies = table, 0
        table.open(layout.rows)
        self._heads = torch.arange(layout.kv_heads, device=layout.device)
        self.pools = {
            c.name: torch.zeros(0, layout.kv_heads, table.block, *c.tail, dtype=c.dtype, device=layout.device)
            for c in layout.columns
        }
        self._ensure(layout.rows * -(-layout.capacity // table.block))

    def _ensure(self, blocks: int) -> None:
        held = next(iter(self.pools.values())).shape[0]
        if blocks <= held:
            return
        for name, old in list(self.pools.items()):
            new = old.new_zeros(blocks if held == 0 else max(blocks, held + held // 8 + 1), *old.shape[1:])
            new[:held] = old
            self.pools[name] = new

    def begin(self, row: int, reused: int) -> None:
        self._recount(row, reused)

    def extend(self, row: int, values: Mapping[str, Tensor]) -> None:
        start, n = int(self.lengths[row, 0]), next(iter(values.values())).shape[1]
        self.table.reserve(row, start + n)
        self._follow()
        block, offset = self.table.locate(row, start, n, self.layout.device)
        for name, pool in self.pools.items():
            # indices on both sides of the head dimension put the tokens first: [n, H, ...]
            pool[block, :, offset] = values[name].transpose(0, 1) if name in values else 0
        self._recount(row, start + n)

    def load(self, row: int, values: Mapping[str, Tensor]) -> None:
        raise UserError(
            "paged: blocks hold every token, so no keep rule that evicts goes with it; use full's place for those"
        )

    def _gather(self, name: str, row: int | None = None) -> Tensor:
        self._follow()  # the layer before may have changed the table already
        table = self.table.device_table(self.layout.device)
        return gather_blocks(self.pools[name], table if row is None else table[row : row + 1])

    def row_columns(self, row: int) -> dict[str, Tensor]:
        n = int(self.lengths[row, 0])
        return {name: self._gather(name, row)[0, :, :n] for name in self.pools}

    def append(self, values: Mapping[str, Tensor]) -> Tensor:
        slots = self._advance()
        self.filled += 1
        self.table.reserve_all(self._host_lengths())
        self._follow()
        block, offset = self.table.tail(self.layout.device)
        for name, pool in self.pools.items():
            pool[block, :, offset] = values.get(name, 0)
        return slots

    def _host_lengths(self) -> np.ndarray:
        return self.lengths[:, 0].cpu().numpy()

    def _follow(self) -> None:
        """Room for the table's blocks, and copies of those that it replaced since this layer last looked."""
        self._ensure(self.table.used)
        pairs, self._seen_copies = self.table.copies_since(self._seen_copies)
        if len(pairs):
            moved = torch.from_numpy(pairs).to(self.layout.device)
            for pool in self.pools.values():
                pool[moved[:, 1]] = pool[moved[:, 0]]

    def column(self, name: str) -> Tensor:
        return self._gather(name)[:, :, : self.filled]

    def keys(self) -> Tensor:
        return self.layout.encode.decode({n: self.column(n) for n in self._needs()})[0]

    def take(self, name: str, slots: Tensor) -> Tensor:
        self._follow()
        return self._at(name, slots.clamp(min=0), self.table.device_table(self.layout.device))

    def _at(self, name: str, slots: Tensor, table: Tensor) -> Tensor:
        column = (slots // self.table.block).clamp(max=table.shape[1] - 1)
        block = table.gather(1, column.flatten(1)).view(slots.shape)
        return self.pools[name][block, self._heads.view(1, -1, 1), slots % self.table.block]

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        """Shared blocks that are written become the sequence's own."""
        rows, heads, at = (slots >= 0).nonzero(as_tuple=True)
        chosen = slots[rows, heads, at]
        pairs = torch.stack([rows, chosen // self.table.block]).unique(dim=1).cpu().numpy()
        self.table.own(*pairs)
        self.table.forget(*pairs)
        self._follow()
        block = self.table.device_table(self.layout.device)[rows, chosen // self.table.block]
        self.pools[name][block, heads, chosen % self.table.block] = values[rows, heads, at].to(self.pools[name].dtype)

    def tiles(self, selection: Selection | None, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        table = self.table.device_table(self.layout.device)
        if selection is None and spans is None and self.layout.encode.raw:
            yield Tile(self.pools["k"], self.pools["v"], self.lengths, table=table)
        elif selection is not None:
            for part in selection.parts():
                yield from self._fetched(part, table)
        else:
            values = {n: self.column(n) for n in self._needs()}
            yield from tiles_of(self.layout, values, self.lengths, None, spans)

    def _fetched(self, selection: Selection, table: Tensor) -> Iterator[Tile]:
        for start in range(0, selection.index.shape[-1], TILE):
            index = selection.index[..., start : start + TILE]
            values = {n: self._at(n, index, table) for n in self._needs()}
            k, v = self.layout.encode.decode(values)
            seen_from = None if selection.query_at is None else selection.query_at.view(-1, 1)
            yield Tile(k, v, (selection.count - start).clamp(0, index.shape[-1]), query_at=seen_from)

    def row_tiles(self, row: int, spans: Sequence[Span] | None = None) -> Iterator[Tile]:
        if int(self.lengths[row, 0]) == 0:
            return iter(())
        values = {n: c.unsqueeze(0) for n, c in self.row_columns(row).items()}
        needed = {n: values[n] for n in self._needs()}
        return tiles_of(self._row_layout(row), needed, None, None, spans, values.get("pos"))

    def compact(self) -> None:
        """Nothing is ever dropped."""

    def drop(self, slots: Tensor) -> None:
        raise UserError("paged: blocks hold every token, so no keep rule that evicts goes with it")

    def select_rows(self, rows: Tensor) -> None:
        self.table.select_rows(rows)
        self._select_lengths(rows)
        self.layout = replace(self.layout, rows=len(rows))

    def bytes(self) -> Bytes:
        held, slots = Bytes(), self.table.filled_slots(self._host_lengths())
        for spec in self.layout.columns:
            size = self.pools[spec.name].untyped_storage().nbytes()
            tokens = slots * spec.slot_bytes() * self.layout.kv_heads
            if spec.kind == "payload":
                held += Bytes(device_payload=tokens, device_padding=size - tokens)
            else:
                held += Bytes(device_metadata=size)
        return held + Bytes(device_metadata=self.lengths.nbytes)


register(Preset("paged", {"place": Paged}, "all tokens in blocks, equal prefixes stored once"))
