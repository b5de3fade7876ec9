"""A second owner for the blocks of a pool: two caches hold the same blocks until one of them writes to one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kvatlas.strategy.answers import Shared
from kvatlas.strategy.place.blocks import BlockTable
from kvatlas.strategy.place.paged import PagedStore
from kvatlas.strategy.place.store import Store


def fork_blocks(
    shared: Shared | None, stores: Mapping[int, tuple[Store, Store]]
) -> tuple[Shared, Shared, dict[int, tuple[Store, Store]]] | None:
    """Fork what the layers of a cache share, where it is a block table.

    Args:
        shared: of the cache that is forked.
        stores: by layer, its store and the new cache's empty one.

    Returns:
        the table of the first cache, that of the second, and both their stores by layer, to take the place of those
        that were given; None where nothing can be shared.
    """
    if not isinstance(shared, BlockTable):
        return None
    own = shared if isinstance(shared, OwnTable) else OwnTable.instead_of(shared)
    other = own.fork()
    made: dict[int, tuple[Store, Store]] = {}
    for i, (held, empty) in stores.items():
        assert isinstance(held, PagedStore)
        first = held if isinstance(held, ForkedStore) else ForkedStore(held, held, own)
        made[i] = first, ForkedStore(held, empty, other)
    return own, other, made


class _Common:
    """An attribute that all tables of a pool have in common: that of their root."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, table: OwnTable, owner: type) -> Any:
        return getattr(table.root, self.name)

    def __set__(self, table: OwnTable, value: Any) -> None:
        setattr(table.root, self.name, value)


class OwnTable(BlockTable):
    """One cache's table over a pool that several caches share; its blocks are let go when it is."""

    refs: Any = _Common()
    free: Any = _Common()
    used: Any = _Common()
    _by_text: Any = _Common()
    _text_of: Any = _Common()
    _copies: Any = _Common()

    def __init__(self, root: BlockTable, table: np.ndarray, owned: np.ndarray, lengths: np.ndarray) -> None:
        self.root, self.block, self.share = root, root.block, root.share
        self.table, self.owned, self._lengths = table, owned, lengths
        self._device = self._selected = None

    @classmethod
    def instead_of(cls, root: BlockTable) -> OwnTable:
        """The sequences of a table, moved; what is left of it is the pool's."""
        table = cls(root, root.table, root.owned, root._lengths)
        root.table, root.owned, root._lengths = root.table[:0], root.owned[:0], root._lengths[:0]
        root._device = None
        return table

    def fork(self) -> OwnTable:
        """A table with the same blocks, each of which has one owner more now."""
        held = np.arange(self.table.shape[1]) < self.owned[:, None]
        np.add.at(self.refs, self.table[held], 1)
        return OwnTable(self.root, self.table.copy(), self.owned.copy(), self._lengths.copy())

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        self.select_rows(torch.zeros(0, dtype=torch.int64))


class ForkedStore(PagedStore):
    """A store on pools that several caches hold together, those of ``held``; ``like`` says how it is laid out."""

    def __init__(self, held: PagedStore, like: Store, table: OwnTable) -> None:
        self.layout, self.most, self.table = like.layout, like.most, table
        self._root = held
        if isinstance(held, ForkedStore):
            self._root = held._root
        else:
            held.table = table.root  # what held had is in tables of their own, which can be let go
        self._heads = held._heads
        self.lengths, self.next = held.lengths.clone(), held.next.clone()
        self.filled, self.ragged, self.holes = held.filled, held.ragged, held.holes

    @property
    def pools(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self._root.pools

    @property
    def _seen_copies(self) -> int:  # type: ignore[override]
        return self._root._seen_copies

    @_seen_copies.setter
    def _seen_copies(self, count: int) -> None:
        self._root._seen_copies = count
