"""What is kept on the device; what the keep rule evicts, on the host, raw or as codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvatlas.strategy.answers import Encode, Layout, Shared
from kvatlas.strategy.encode.groups import Int4, Int8
from kvatlas.strategy.place.device import SlotStore
from kvatlas.strategy.place.host import Host, HostStore
from kvatlas.strategy.place.link import Link
from kvatlas.strategy.place.store import Store


@dataclass(frozen=True)
class Archived(Host):
    """Slots on the device and an archive on the host, fetched from when the read rule names a token of it.

    ``archive`` says in what form evicted tokens are held when the kept ones are raw; kept ones that are encoded move as
    they are.
    """

    source: ClassVar[str] = "ours"
    archives: ClassVar[bool] = True
    archive_as: Literal["raw", "int8", "int4"] = "raw"

    def words(self) -> str:
        form = "" if self.archive_as == "raw" else f" as {self.archive_as}"
        return f"device; what is evicted on the host{form}"

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        return SlotStore(layout)

    def archive(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, Link)
        return HostStore(layout, shared)

    def archive_encode(self) -> Encode | None:
        return {"raw": None, "int8": Int8(), "int4": Int4()}[self.archive_as]
