"""A cache divided among device, host and disk by percentages (FlexGen)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvatlas.attention.tiles import TILE
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Layout, Place, Shared
from kvatlas.strategy.encode.groups import Int4
from kvatlas.strategy.place.disk import DiskLink, FileSegment, check_folder, file_bytes, goes_direct, staged_bytes
from kvatlas.strategy.place.link import STAGES, Link, check_speed
from kvatlas.strategy.place.store import Store
from kvatlas.strategy.place.tiers import Segment, Tensors, TieredStore
from kvatlas.strategy.registry import Preset, register

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Percentages(Place):
    """The first ``device`` % of a sequence's planned slots on the device, the next on the host, the rest on disk.

    What grows beyond the plan goes to the last tier in use. While a layer computes, the next one's tiles are loaded
    (``overlap``). ``link``, ``dir`` and ``direct`` are those of ``host`` and ``disk``. FlexGen divides by whole
    sequences or heads; here it is by tokens, so that each sequence gets its share of each tier.
    """

    source: ClassVar[str] = "FlexGen, ICML 2023, section 4"
    tier: ClassVar[Literal["device", "host", "disk"]] = "host"
    device: float = 20
    host: float = 80
    disk: float = 0
    overlap: bool = True
    link: float | None = None
    dir: str = ""
    direct: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        shares = (self.device, self.host, self.disk)
        told = f"device={self.device:g}, host={self.host:g} and disk={self.disk:g}"
        if not all(0 <= share <= 100 for share in shares):
            raise UserError(f"flexgen: {told} must be percentages, 0 to 100")
        if abs(sum(shares) - 100) > 1e-6:
            raise UserError(f"flexgen: {told} add to {sum(shares):g}; the percentages must add to 100")
        check_speed(self.link)
        check_folder(self.dir)

    def words(self) -> str:
        shares = {"device": self.device, "host": self.host, "disk": self.disk}
        words = ", ".join(f"{share:g} % {tier}" for tier, share in shares.items() if share)
        if self.disk:
            words += f" ({'direct' if goes_direct(self.dir, self.direct) else 'buffered'} I/O)"
        return f"{words}, fetched " + ("a layer ahead" if self.overlap else "when needed")

    def split(self, capacity: int) -> dict[Tier, int]:
        """Slots of each tier in use."""
        first = round(capacity * self.device / 100)
        second = round(capacity * (self.device + self.host) / 100)
        slots: dict[Tier, int] = {"device": first, "host": second - first, "disk": capacity - second}
        used = {"device": self.device, "host": self.host, "disk": self.disk}
        return {tier: n for tier, n in slots.items() if used[tier]}

    @property
    def _stages(self) -> int:
        return STAGES + 1 if self.disk else STAGES

    def shared(self, layers: int) -> DiskLink:
        return DiskLink(self.overlap, self.link, self.dir, self.direct, self._stages)

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, DiskLink)
        made = [segment(tier, layout, slots, shared) for tier, slots in self.split(layout.capacity).items()]
        return TieredStore(layout, made, shared)

    def bytes_held(self, layout: Layout) -> int:
        slots = self.split(layout.capacity)
        memory = (layout.capacity - slots.get("disk", 0)) * layout.slot_bytes("payload")
        metadata = layout.capacity * layout.slot_bytes("metadata")
        files = file_bytes(layout, slots["disk"]) if "disk" in slots else 0
        return layout.rows * layout.kv_heads * (memory + metadata) + files

    def staging(self, layout: Layout) -> int:
        slots = {tier: n for tier, n in self.split(layout.capacity).items() if n}
        moves = Link(False, self.link).moves(layout.device)
        each = layout.rows * layout.kv_heads * layout.slot_bytes("payload")
        if layout.limit is None:
            host = each * min(TILE, slots["host"]) if moves and "host" in slots else 0
            disk = staged_bytes(layout, slots["disk"]) if "disk" in slots else 0
            return self._stages * (host + disk)
        if list(slots) == ["disk"]:
            return self._stages * staged_bytes(layout, layout.capacity)
        here = list(slots) == ["device"] or (list(slots) == ["host"] and not moves)
        return 0 if here else self._stages * each * (layout.limit(layout.capacity) + 1)


def segment(tier: Tier, layout: Layout, slots: int, link: DiskLink) -> Segment:
    """Slots in a tier."""
    return FileSegment(layout, slots, link) if tier == "disk" else Tensors(layout, slots, link, tier)


register(
    Preset(
        "flexgen",
        {"place": Percentages, "encode": Int4},
        "4 bits, divided among device, host and disk by percentages",
        yields=("encode",),
    )
)
