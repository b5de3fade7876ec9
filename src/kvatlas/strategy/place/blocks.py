"""Which block of a pool belongs to which sequence: the one table that all layers of a cache share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kvatlas.strategy.answers import Shared


class BlockTable(Shared):
    """Block numbers per sequence, reference counts, a free list, and the prompts' blocks by their text.

    Kept on the host as NumPy arrays; a step touches it with a few vector operations. A block with more than one
    reference is never written: the writer gets a copy (``copies_since`` tells the layers).
    """

    def __init__(self, block: int, share: bool) -> None:
        self.block, self.share = block, share
        self.table = np.zeros((0, 0), dtype=np.int64)
        self.owned = np.zeros(0, dtype=np.int64)  # blocks of each sequence
        self.refs = np.zeros(0, dtype=np.int64)
        self.free: list[int] = []
        self.used = 0  # blocks that the pools must hold
        self._by_text: dict[bytes, int] = {}
        self._text_of: dict[int, bytes] = {}
        self._copies = np.zeros((0, 2), dtype=np.int64)
        self._lengths = np.zeros(0, dtype=np.int64)
        self._device: Tensor | None = None
        self._selected: Tensor | None = None

    def open(self, rows: int) -> None:
        """Make room for ``rows`` sequences (the first layer's store; the others find it done)."""
        if len(self.owned) < rows:
            self.table = np.zeros((rows, 0), dtype=np.int64)
            self.owned, self._lengths = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)

    def match_prefix(self, row: int, ids: list[int]) -> int:
        """Give the sequence the blocks that already hold the start of its prompt; how many tokens that is.

        At least one token is left to compute. Blocks of a prompt become findable by ``register``.
        """
        if not self.share:
            return 0
        found = []
        for text in block_texts(ids[: len(ids) - 1], self.block):
            number = self._by_text.get(text)
            if number is None:
                break
            found.append(number)
        self._widen(len(found))
        self.table[row, : len(found)] = found
        self.owned[row] = len(found)
        self.refs[found] += 1
        self._lengths[row] = len(found) * self.block
        self._device = None
        return len(found) * self.block

    def register(self, row: int, ids: list[int]) -> None:
        """The sequence's prompt is stored: its full blocks can serve others."""
        if not self.share:
            return
        for i, text in enumerate(block_texts(ids, self.block)):
            number = int(self.table[row, i])
            if text not in self._by_text:
                self._by_text[text], self._text_of[number] = number, text

    def reserve(self, row: int, length: int) -> None:
        """Blocks for ``length`` tokens of one sequence; a shared block that will be written is replaced by a copy."""
        lengths = self._lengths.copy()
        lengths[row] = length
        self.reserve_all(lengths)

    def reserve_all(self, lengths: np.ndarray) -> None:
        """Blocks for all sequences to hold ``lengths`` tokens. Asking again (the next layer) changes nothing."""
        if np.array_equal(lengths, self._lengths):
            return
        grows = lengths > self._lengths
        last = self._lengths // self.block  # the first block to be written
        partial = grows & (self._lengths % self.block > 0)
        if partial.any():
            rows = np.nonzero(partial)[0]
            self.own(rows, last[rows])
        want = -(-lengths // self.block)
        self._widen(int(want.max(initial=0)))
        short = want - self.owned
        if (short > 0).any():
            rows = np.repeat(np.arange(len(want)), np.maximum(short, 0))
            first = np.repeat(np.cumsum(np.maximum(short, 0)) - np.maximum(short, 0), np.maximum(short, 0))
            columns = self.owned[rows] + np.arange(len(rows)) - first
            self.table[rows, columns] = self._take(len(rows))
            self.owned = np.maximum(self.owned, want)
            self._device = None
        self._lengths = lengths.copy()

    def own(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Sequences ``rows`` will write to their blocks ``columns``, each pair once: shared ones become copies.

        One sequence may keep a block of which it ends up as the only owner.
        """
        shared = self.refs[self.table[rows, columns]] > 1
        rows, columns = rows[shared], columns[shared]
        if not len(rows):
            return
        old = self.table[rows, columns]
        # The last sharer of a block may keep it: as many copies as there are writers, less one if no one else holds it.
        order = np.argsort(old, kind="stable")
        rank = np.empty(len(rows), dtype=np.int64)
        _, starts, counts = np.unique(old[order], return_index=True, return_counts=True)
        rank[order] = np.arange(len(rows)) - np.repeat(starts, counts)
        copying = self.refs[old] - rank > 1
        rows, columns, old = rows[copying], columns[copying], old[copying]
        if not len(rows):
            return
        new = self._take(len(rows))
        np.subtract.at(self.refs, old, 1)
        self.table[rows, columns] = new
        self._copies = np.concatenate([self._copies, np.stack([old, new], 1)])
        self._device = None

    def forget(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """What these blocks hold no longer follows from their text alone: they serve no new sequence."""
        for number in self.table[rows, columns].tolist():
            self._by_text.pop(self._text_of.pop(number, b""), None)

    def _take(self, count: int) -> np.ndarray:
        reused = [self.free.pop() for _ in range(min(count, len(self.free)))]
        new = np.concatenate([np.array(reused, dtype=np.int64), np.arange(self.used, self.used + count - len(reused))])
        self.used += count - len(reused)
        if self.used > len(self.refs):
            self.refs = np.concatenate([self.refs, np.zeros(max(self.used - len(self.refs), 64), dtype=np.int64)])
        assert (self.refs[new] == 0).all(), "a free block has no references"
        self.refs[new] = 1
        return new

    def _widen(self, blocks: int) -> None:
        if blocks > self.table.shape[1]:
            more = np.zeros((len(self.table), max(blocks - self.table.shape[1], 16)), dtype=np.int64)
            self.table = np.concatenate([self.table, more], 1)
            self._device = None

    def copies_since(self, seen: int) -> tuple[np.ndarray, int]:
        """Pairs ``[n, 2]`` (from, to) of blocks copied since the first ``seen``, and the new count."""
        return self._copies[seen:], len(self._copies)

    def locate(self, row: int, start: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Block and offset of tokens ``start .. start + n - 1`` of a sequence."""
        at = np.arange(start, start + n)
        return torch.from_numpy(self.table[row, at // self.block]).to(device), torch.from_numpy(at % self.block).to(
            device
        )

    def tail(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Block and offset of the newest token of every sequence."""
        at = self._lengths - 1
        numbers = self.table[np.arange(len(at)), at // self.block]
        return torch.from_numpy(numbers).to(device), torch.from_numpy(at % self.block).to(device)

    def device_table(self, device: torch.device) -> Tensor:
        """``[B, blocks]`` int64."""
        if self._device is None:
            self._device = torch.from_numpy(self.table[:, : int(self.owned.max(initial=1))].copy()).to(device)
        return self._device

    def filled_slots(self, lengths: np.ndarray) -> int:
        """Slots that hold a token, shared ones counted once."""
        if not len(lengths):
            return 0
        columns = np.arange(self.table.shape[1])
        fill = np.clip(lengths[:, None] - columns * self.block, 0, self.block)
        most = np.zeros(self.used + 1, dtype=np.int64)
        owned = columns < self.owned[:, None]
        np.maximum.at(most, self.table[owned], fill[owned])
        return int(most.sum())

    def select_rows(self, index: Tensor) -> None:
        """Keep, reorder or repeat sequences; done by the first of the layers that ask with the same tensor."""
        if self._selected is index:
            return
        self._selected, rows = index, index.cpu().numpy()
        old_rows = np.arange(len(self.owned))
        delta = np.bincount(rows, minlength=len(old_rows)) - 1
        columns = np.arange(self.table.shape[1]) < self.owned[:, None]
        np.add.at(self.refs, self.table[columns], np.repeat(delta, self.owned))
        freed = np.unique(self.table[columns])
        freed = freed[self.refs[freed] == 0]
        for number in freed.tolist():
            self._by_text.pop(self._text_of.pop(number, b""), None)
        self.free.extend(freed.tolist())
        self.table, self.owned, self._lengths = self.table[rows], self.owned[rows], self._lengths[rows]
        self._device = None


def block_texts(ids: list[int], block: int) -> Iterator[bytes]:
    """A digest for each full block that stands for all the text up to its end."""
    digest = b""
    for start in range(0, len(ids) - block + 1, block):
        digest = hashlib.blake2b(digest + np.asarray(ids[start : start + block]).tobytes(), digest_size=16).digest()
        yield digest
