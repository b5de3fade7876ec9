"""Keys and values in files; metadata, staging buffers and the newest tokens are on the device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.attention.tiles import TILE
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Layout, Place, Shared
from kvatlas.strategy.place.fetch import Arrive
from kvatlas.strategy.place.files import Record, SlotFile, aligned
from kvatlas.strategy.place.folder import PAGE, Folder, direct_works
from kvatlas.strategy.place.link import Link
from kvatlas.strategy.place.pages import read_slots, write_slots
from kvatlas.strategy.place.store import Bytes, Store, payload
from kvatlas.strategy.place.tiers import Segment, TieredStore, Values
from kvatlas.strategy.place.writeback import HOLDS, WriteBack
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Selection

STAGES = 3
"""Buffers in flight: the one that a layer reads and those that are being filled."""

RECORDS = "records"
"""The staging buffers that files are read into."""


@dataclass(frozen=True)
class Disk(Place):
    """Payload in files, one for each sequence and layer, in a folder of its own that is gone when the process is.

    ``dir`` is where that folder is made (default: the system's place for temporary files). ``direct`` goes past the
    system's page cache; ``auto`` does so where the filesystem allows it. ``overlap`` reads the next tiles, and the
    first ones of the next layer, while this layer computes.
    """

    source: ClassVar[str] = "after DUAL-BLADE and FlexGen, ICML 2023"
    tier: ClassVar[Literal["device", "host", "disk"]] = "disk"
    dir: str = ""
    direct: bool | Literal["auto"] = "auto"
    overlap: bool = True

    def __post_init__(self) -> None:
        check_folder(self.dir)

    def words(self) -> str:
        where = self.dir or "a temporary folder"
        way = "direct I/O" if self.goes_direct() else "buffered I/O"
        return f"disk, files in {where}, {way}, read " + ("a layer ahead" if self.overlap else "when needed")

    def goes_direct(self) -> bool:
        """Whether files are read and written past the system's page cache."""
        return goes_direct(self.dir, self.direct)

    def shared(self, layers: int) -> DiskLink:
        return DiskLink(self.overlap, None, self.dir, self.direct)

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, DiskLink)
        return TieredStore(layout, [FileSegment(layout, layout.capacity, shared)], shared)

    def bytes_held(self, layout: Layout) -> int:
        """Whole blocks in files, metadata, and the records that wait to be written."""
        metadata = layout.rows * layout.kv_heads * layout.capacity * layout.slot_bytes("metadata")
        return metadata + file_bytes(layout, layout.capacity)

    def staging(self, layout: Layout) -> int:
        return STAGES * staged_bytes(layout, layout.capacity)


def check_folder(folder: str) -> None:
    """Raise UserError where no file can be made in ``folder`` (empty: the temporary one)."""
    if not folder:
        return
    found = _existing(Path(folder))
    if not found.is_dir():
        raise UserError(f"disk: dir={folder} is not a folder")
    if not os.access(found, os.W_OK | os.X_OK):
        raise UserError(f"disk: dir={folder} is not writable; name a folder that you may write to")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))


def goes_direct(folder: str, direct: bool | Literal["auto"]) -> bool:
    """Whether files there (empty: in the temporary folder) go past the system's page cache."""
    return direct_works(str(_existing(Path(folder or tempfile.gettempdir())))) if direct == "auto" else direct


def file_bytes(layout: Layout, slots: int) -> int:
    """Bytes of a ``FileSegment`` in closed form."""
    record = Record.of(payload(layout.columns))
    files = layout.rows * layout.kv_heads * record.slots(slots) * record.size
    return files + WriteBack.bytes_of(layout.rows, layout.kv_heads, record.size)


def staged_bytes(layout: Layout, slots: int) -> int:
    """Bytes of one of its staging buffers."""
    record = Record.of(payload(layout.columns))
    tokens = min(TILE, record.slots(slots)) if layout.limit is None else layout.limit(slots) + 1
    apart = PAGE if layout.device.type == "cpu" else 0
    return layout.rows * layout.kv_heads * tokens * record.size + apart


class DiskLink(Link):
    """Aligned staging buffers, and the folder of a cache's files."""

    def __init__(
        self, overlap: bool, speed: float | None, parent: str, direct: bool | Literal["auto"], stages: int = STAGES
    ) -> None:
        super().__init__(overlap, speed, stages)
        self._parent, self._direct = parent, direct
        self._folder: Folder | None = None

    @property
    def folder(self) -> Folder:
        """Made when the first store wants it."""
        if self._folder is None:
            self._folder = Folder(self._parent or None, None if self._direct == "auto" else self._direct)
        return self._folder

    def _new(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if name != RECORDS:
            return super()._new(name, size, dtype, device)
        return aligned(size, pinned=torch.cuda.is_available())

    def device_bytes(self) -> int:
        """On CUDA the pinned buffers that files are read into are not the device's."""
        held = list(self._buffers.values())
        far = [buffer for buffer in held if buffer.device.type != "cpu"]
        return sum(buffer.untyped_storage().nbytes() for buffer in far or held)


class FileSegment(Segment):
    """A file for each sequence. What is appended waits in ``newest`` until that is full."""

    tier = "disk"
    link: DiskLink

    def __init__(self, layout: Layout, slots: int, link: DiskLink) -> None:
        super().__init__(layout, slots, link)
        self.record = Record.of(payload(layout.columns))
        self.files = [SlotFile(link.folder, self.record, layout.kv_heads, slots) for _ in range(layout.rows)]
        self.newest = WriteBack.of(layout.rows, layout.kv_heads, self.record.size, layout.device)

    # --------------------------------------------------------------------- writing

    def load(self, row: int, start: int, values: Mapping[str, Tensor]) -> None:
        """Whole blocks; of the first one what comes before ``start`` is read and written again."""
        self.settle()
        records, block = self.record.pack(values), self.record.block
        stop = start + records.shape[1]
        buffer = aligned(self.layout.kv_heads * block * self.record.size).view(self.layout.kv_heads, block, -1)
        for at in range(start // block * block, stop, block):
            first, last = max(start, at), min(stop, at + block)
            if first > at:
                self.files[row].read_range(buffer.numpy(), at)
            buffer[:, first - at : last - at] = records[:, first - start : last - start].cpu()
            buffer[:, last - at :] = 0
            self.files[row].write_range(buffer.numpy(), at)

    def put(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        slots = torch.where(slots < self.slots, slots, -1).unsqueeze(-1)
        self.newest.put(slots, self.record.pack({c.name: values[c.name].unsqueeze(2) for c in self.record.columns}))

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        slots = torch.where(slots < self.slots, slots, -1)
        for i in range(0, slots.shape[2], HOLDS):
            part = slots[:, :, i : i + HOLDS]
            if not self.newest.room(part.shape[2]):
                self.settle()
            records = self._records(part)
            self.record.views(records)[name].copy_(values[:, :, i : i + HOLDS])
            self.newest.put(part, records)

    def busy(self) -> bool:
        return not self.newest.room(1)

    def settle(self) -> None:
        """What waits goes to the files; it stays where it is should that fail."""
        if self.newest.most == 0:
            return
        slots, records = self.newest.slots.cpu().numpy(), self.newest.records.cpu().numpy()
        for row, file in enumerate(self.files):
            write_slots(file, slots[row], records[row])
        self.newest.clear()

    # --------------------------------------------------------------------- reading

    def _records(self, slots: Tensor) -> Tensor:
        """``[B, H, m, size]`` uint8 on the device, the newest ones."""
        out = torch.zeros(*slots.shape, self.record.size, dtype=torch.uint8)
        at = slots.cpu().numpy()
        for row, file in enumerate(self.files):
            read_slots(file, at[row], out[row].numpy())
        on_device = out.to(self.layout.device)
        self.newest.patch_chosen(on_device, slots)
        return on_device

    def take(self, slots: Tensor) -> Values:
        return self.record.views(self._records(slots))

    def row(self, row: int, stop: int) -> Values:
        whole = self.record.slots(stop)
        buffer = aligned(self.layout.kv_heads * whole * self.record.size).view(self.layout.kv_heads, whole, -1)
        self.files[row].read_range(buffer.numpy(), 0)
        records = buffer[:, :stop].to(self.layout.device)
        self.newest.of_row(row).patch(records.unsqueeze(0), 0)
        return self.record.views(records)

    def fetch(self, start: int, stop: int, lengths: Tensor, ahead: bool) -> Arrive:
        whole = min(self.record.slots(stop - start), self.record.slots(self.slots) - start)
        most = min(TILE, self.record.slots(self.slots))
        near, buffer = self._buffers("tile", whole, most)
        filled = {row: self.record.slots(n - start) for row, n in enumerate(lengths.amax(1).tolist()) if n > start}
        views = {row: near[row, :, :n].numpy() for row, n in filled.items()}

        def copy() -> int:
            return sum(self.files[row].read_range(view, start) for row, view in views.items())

        wait = self.link.beside(copy, ahead)

        def arrive() -> Values:
            wait()
            if buffer is not near:
                buffer.copy_(near)
            self.newest.patch(buffer[:, :, : stop - start], start)
            return self.record.views(buffer)

        return _once(arrive)

    def bring(self, part: Selection, head: int, ahead: bool) -> Arrive:
        """Only the pages in which chosen slots are."""
        n, limit = part.index.shape[2], self.layout.limit
        near, buffer = self._buffers("selection", n + head, 1 + (self.slots if limit is None else limit(self.slots)))
        counted = torch.arange(n, device=part.index.device) < part.count.unsqueeze(-1)
        index = torch.where(counted, part.index, -1)
        at, out = index.cpu().numpy(), near.numpy()

        def copy() -> int:
            return sum(read_slots(file, at[row], out[row, :, head:]) for row, file in enumerate(self.files))

        wait = self.link.beside(copy, ahead)

        def arrive() -> Values:
            wait()
            if buffer is not near:
                buffer.copy_(near)
            self.newest.patch_chosen(buffer[:, :, head:], index)
            return self.record.views(buffer)

        return _once(arrive)

    def _buffers(self, use: str, n: int, most: int) -> tuple[Tensor, Tensor]:
        """Room for ``[B, H, n, size]``: in memory that files are read into, and on the device; on a CPU it is one."""
        layout, size = self.layout, self.record.size
        self.link.turn(use)
        shape, rows = (layout.rows, layout.kv_heads, n, size), layout.rows * layout.kv_heads
        make = (shape, rows * most * size, torch.uint8)
        near = self.link.stage(use, RECORDS, *make, torch.device("cpu"))
        if layout.device.type == "cpu":
            return near, near
        return near, self.link.stage(use, "on device", *make, layout.device)

    # ------------------------------------------------------------------- sequences

    def resize(self, slots: int) -> None:
        for file in self.files:
            file.reserve(slots)
        self.slots = slots

    def select(self, rows: Tensor) -> None:
        used: set[int] = set()
        files = []
        for row in rows.tolist():
            files.append(self.files[row].copy() if row in used else self.files[row])
            used.add(row)
        self.files, self.newest = files, self.newest.select(rows)

    def bytes(self, tokens: int, lengths: Tensor, hole: Tensor) -> Bytes:
        """A token counts where it is: those that wait are not on the disk yet."""
        slot, at = self.layout.slot_bytes("payload"), self.newest.slots
        valid = (at >= 0) & (at < lengths.unsqueeze(-1)) & (at != hole.unsqueeze(-1))
        waiting = int(valid.sum())
        records, slots, count = (t.untyped_storage().nbytes() for t in self.newest.tensors())
        return Bytes(
            device_payload=waiting * slot,
            device_padding=records - waiting * slot,
            device_metadata=slots + count,
            disk_payload=(tokens - waiting) * slot,
            disk_padding=sum(file.bytes for file in self.files) - (tokens - waiting) * slot,
        )


def _once(arrive: Arrive) -> Arrive:
    """The same, done at the first call only."""
    found: Values | None = None

    def again() -> Values:
        nonlocal found
        if found is None:
            found = arrive()
        return found

    return again


register(Preset("disk", {"place": Disk}, "keys and values in files, read a layer ahead"))
