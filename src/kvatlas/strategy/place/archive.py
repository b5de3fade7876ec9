"""What is kept on the device; what the keep rule evicts, on the host, raw or as codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvatlas.strategy.answers import Encode, Layout, Shared
from kvatlas.strategy.encode.groups import Int4, Int8
from kvatlas.strategy.place.device import SlotStore
from kvatlas.strategy.place.host import Host, HostStore
from kvatlas.strategy.place.link import Link
from kvatlas.strategy.place.pool import PooledLink
from kvatlas.strategy.place.pooled import PooledStore, pooled_bytes
from kvatlas.strategy.place.store import Store


@dataclass(frozen=True)
class Archived(Host):
    """Slots on the device and an archive on the host, fetched from when the read rule names a token of it.

    ``archive`` says in what form evicted tokens are held when the kept ones are raw; kept ones that are encoded move as
    they are. With ``share`` the evicted tokens of a prefix that several prompts have in common are stored once.
    """

    source: ClassVar[str] = "ours"
    archives: ClassVar[bool] = True
    archive_as: Literal["raw", "int8", "int4"] = "raw"
    share: bool = False

    def words(self) -> str:
        form = "" if self.archive_as == "raw" else f" as {self.archive_as}"
        return f"device; what is evicted on the host{form}" + (", shared prefixes once" if self.share else "")

    def shared(self, layers: int) -> Link:
        return PooledLink(self.overlap, self.link) if self.share else super().shared(layers)

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        return SlotStore(layout)

    def archive(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, Link)
        return PooledStore(layout, shared) if isinstance(shared, PooledLink) else HostStore(layout, shared)

    def archive_bytes(self, layout: Layout) -> int:
        """Without a prefix that is shared."""
        return pooled_bytes(layout) if self.share else super().archive_bytes(layout)

    def archive_encode(self) -> Encode | None:
        return {"raw": None, "int8": Int8(), "int4": Int4()}[self.archive_as]
