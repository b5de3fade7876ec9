"""Tokens on the device, then on the host, then dropped and computed again (ALISA's three phases)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvatlas.attention.tiles import TILE
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Layout, Place, Shared
from kvatlas.strategy.place.fetch import Arrive
from kvatlas.strategy.place.link import STAGES, Link, check_speed
from kvatlas.strategy.place.store import GROWTH, Bytes, Store
from kvatlas.strategy.place.tiers import Segment, Tensors, TieredStore, Values


@dataclass(frozen=True)
class Phased(Place):
    """The newest ``device`` tokens on the device, ``host`` older ones on the host; of the oldest no keys and values.

    Those are computed from the layer's attention inputs whenever they are read. Both limits are fractions of the
    planned slots (the prompt, or what the keep rule leaves of it, and the tokens to come), or above 1 whole tokens.
    Slots count as old in the order in which they were first filled.

    The inputs of all positions are kept on the host, one vector a token for all KV heads. Under grouped queries that
    can be more than the keys and values that it replaces; it is counted as ``host_metadata``.
    """

    source: ClassVar[str] = "ALISA, ISCA 2024 (from the paper)"
    tier: ClassVar[Literal["device", "host", "disk"]] = "host"
    wants_inputs: ClassVar[bool] = True
    device: float = 0.5
    host: float = 0.3
    overlap: bool = True
    link: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("device", self.device), ("host", self.host)):
            if limit < 0 or (limit > 1 and limit != int(limit)):
                raise UserError(f"alisa: {name} must be a fraction up to 1 or whole tokens, not {limit:g}")
        check_speed(self.link)

    def words(self) -> str:
        return f"device up to {_told(self.device)}, host up to {_told(self.host)}, older ones computed again"

    def limits(self, planned: int) -> tuple[int, int]:
        """Most slots on the device and on the host."""
        return _slots(self.device, planned), _slots(self.host, planned)

    def shared(self, layers: int) -> Link:
        return Link(self.overlap, self.link)

    def store(self, layout: Layout, shared: Shared | None) -> Store:
        assert isinstance(shared, Link)
        return PhasedStore(layout, self.limits(layout.capacity), shared)

    def bytes_held(self, layout: Layout) -> int:
        """Keys and values of the first two phases, metadata, and the inputs of every position."""
        _, host, device = split(layout.capacity, *self.limits(layout.capacity))
        payload, metadata = layout.slot_bytes("payload"), layout.slot_bytes("metadata")
        held = layout.rows * layout.kv_heads * ((host + device) * payload + layout.capacity * metadata)
        return held + layout.rows * positions(layout) * layout.hidden * layout.dtype.itemsize

    def staging(self, layout: Layout) -> int:
        again, host, device = split(layout.capacity, *self.limits(layout.capacity))
        moves = Link(False, self.link).moves(layout.device)
        if layout.limit is not None:
            alone = not again and (host == 0 or (device == 0 and not moves))
            tokens = 0 if alone else layout.limit(layout.capacity) + 1
        else:
            tokens = min(TILE, host) if moves else 0
        return STAGES * layout.rows * layout.kv_heads * tokens * layout.slot_bytes("payload")


def positions(layout: Layout) -> int:
    """How many tokens a sequence is planned to have, kept or not."""
    return layout.tokens or layout.capacity


def _told(limit: float) -> str:
    return f"{limit:.0%}" if limit <= 1 else f"{limit:.0f} tokens"


def _slots(limit: float, planned: int) -> int:
    return round(limit * planned) if limit <= 1 else int(limit)


def split(capacity: int, most_on_device: int, most_on_host: int) -> tuple[int, int, int]:
    """How many of so many slots are computed again, on the host, on the device; in the order of the slots."""
    device = min(capacity, most_on_device)
    host = min(capacity - device, most_on_host)
    return capacity - device - host, host, device


class Inputs:
    """A layer's attention inputs ``[B, T, hidden]`` by position, in host memory."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.x = torch.zeros(layout.rows, positions(layout), layout.hidden, dtype=layout.dtype)

    def room(self, tokens: int, slack: int) -> None:
        """Have room for so many positions, and some more if there was not."""
        if tokens > self.x.shape[1]:
            new = self.x.new_zeros(self.x.shape[0], tokens + slack, self.x.shape[2])
            new[:, : self.x.shape[1]] = self.x
            self.x = new

    def put(self, row: int, start: int, x: Tensor) -> None:
        self.room(start + len(x), 0)
        self.x[row, start : start + len(x)] = x.to(self.x.device)

    def append(self, x: Tensor, positions: Tensor) -> None:
        at = positions.to(self.x.device)
        self.room(int(at.max()) + 1, max(GROWTH, self.x.shape[1] // 8))
        self.x[torch.arange(len(at)), at] = x.to(self.x.device, self.x.dtype)

    def at(self, positions: Tensor) -> Tensor:
        """``[B, n]`` -> ``[B, n, hidden]`` on the device."""
        at = positions.to(self.x.device)
        return self.x[torch.arange(len(at)).unsqueeze(1), at].to(self.layout.device)

    def of_row(self, row: int, positions: Tensor) -> Tensor:
        """One sequence's: ``[1, n]`` -> ``[1, n, hidden]``."""
        return self.x[row, positions.to(self.x.device)].to(self.layout.device)


class Recomputed(Segment):
    """Slots whose keys and values are not stored. What is written to them is forgotten; their positions are not."""

    tier = "recomputed"
    recompute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    metadata: Mapping[str, Tensor]

    def __init__(self, layout: Layout, slots: int, link: Link, inputs: Inputs) -> None:
        super().__init__(layout, slots, link)
        self.inputs = inputs

    def load(self, row: int, start: int, values: Mapping[str, Tensor]) -> None:
        pass

    def put(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        pass

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        pass

    def take(self, slots: Tensor) -> Values:
        known = self.metadata["pos"].gather(-1, slots).long() if "pos" in self.metadata else slots
        return self._computed(known, *distinct(known))

    def row(self, row: int, stop: int) -> Values:
        positions = self._positions(0, stop)[row : row + 1]
        whole = self._computed(positions, *self._wanted(positions), row)
        return {name: column[0] for name, column in whole.items()}

    def fetch(self, start: int, stop: int, lengths: Tensor, ahead: bool) -> Arrive:
        def arrive() -> Values:
            positions = self._positions(start, stop)
            return self._computed(positions, *self._wanted(positions))

        return arrive

    def _positions(self, start: int, stop: int) -> Tensor:
        """``[B, H, n]`` int64; where they are not stored, a slot's number is its position."""
        if "pos" in self.metadata:
            return self.metadata["pos"][:, :, start:stop].long()
        slots = torch.arange(start, stop, device=self.layout.device)
        return slots.expand(len(self.inputs.x), self.layout.kv_heads, stop - start)

    def _wanted(self, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is to be computed of a run: in order where every KV head holds the same."""
        return distinct(positions) if "pos" in self.metadata else (positions[:, 0], None)

    def _computed(self, positions: Tensor, wanted: Tensor, where: Tensor | None, row: int | None = None) -> Values:
        """Payload of the tokens at ``positions [B, H, n]`` (of one sequence, as a batch of one, with ``row``)."""
        assert self.recompute is not None, "the engine says how"
        x = self.inputs.at(wanted) if row is None else self.inputs.of_row(row, wanted)
        self.link.count(1, x.nbytes)
        k, v = self.recompute(x, wanted)
        if where is not None:
            k, v = (torch.take_along_dim(tensor, where.unsqueeze(-1), dim=2) for tensor in (k, v))
        encode = self.layout.encode if row is None else self.layout.encode.of_row(row)
        return encode.encode(k, v, positions)

    def resize(self, slots: int) -> None:
        self.slots = slots

    def select(self, rows: Tensor) -> None:
        pass  # positions and inputs are the store's

    def bytes(self, tokens: int, lengths: Tensor, hole: Tensor) -> Bytes:
        return Bytes()


def distinct(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The different ones of ``[B, H, n]`` for each sequence, ``[B, m]`` ascending, and where each is, ``[B, H, n]``.

    A position is computed once for all KV heads, whichever of them hold it. Short rows end in zeros.
    """
    rows, flat = len(positions), positions.flatten(1)
    present = torch.zeros(rows, int(flat.max()) + 1, dtype=torch.bool, device=flat.device).scatter_(1, flat, True)
    rank = present.cumsum(1) - 1
    row, position = present.nonzero(as_tuple=True)
    wanted = flat.new_zeros(rows, int(rank[:, -1].max()) + 1)
    wanted[row, rank[row, position]] = position
    return wanted, rank.gather(1, flat).view_as(positions)


class PhasedStore(TieredStore):
    """Slots computed again, on the host, on the device; as there come to be more, the oldest move on."""

    def __init__(self, layout: Layout, limits: tuple[int, int], link: Link) -> None:
        self._limits, self.inputs = limits, Inputs(layout)
        again, host, device = split(layout.capacity, *limits)
        self._again = Recomputed(layout, again, link, self.inputs)
        self._kept = [Tensors(layout, host, link, "host"), Tensors(layout, device, link, "device")]
        super().__init__(layout, [self._again, *self._kept], link)
        self._again.metadata = self.data

    @property
    def recompute(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        return self._again.recompute

    @recompute.setter
    def recompute(self, how: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None) -> None:
        self._again.recompute = how

    def put_inputs(self, row: int, start: int, x: Tensor) -> None:
        self.inputs.put(row, start, x)

    def append_inputs(self, x: Tensor, positions: Tensor) -> None:
        self.inputs.append(x, positions)

    def row_inputs(self, row: int, tokens: int) -> Tensor:
        return self.inputs.x[row, :tokens]

    def write(self, name: str, slots: Tensor, values: Tensor) -> None:
        if name not in self.data and bool(((slots >= 0) & (slots < self._again.slots)).any()):
            raise UserError(
                "alisa: keys of the oldest tokens are computed again each time, so a read rule cannot turn them; set "
                "device and host so that all are stored"
            )
        super().write(name, slots, values)

    def _resize(self, capacity: int) -> None:
        """The oldest on the device go to the host, and the oldest there are dropped."""
        self.forget_ahead()
        sizes = split(capacity, *self._limits)
        old = [(at, segment) for at, segment in self._placed() if isinstance(segment, Tensors)]
        start = sizes[0]
        for i, (tier, slots) in enumerate(zip(("host", "device"), sizes[1:])):
            new = Tensors(self.layout, slots, self.link, tier)  # type: ignore[arg-type]
            for at, segment in old:
                first, stop = max(start, at), min(start + slots, at + segment.slots)
                if first < stop:
                    for name, column in segment.data.items():
                        new.data[name][:, :, first - start : stop - start] = column[:, :, first - at : stop - at]
            self._kept[i] = new
            start += slots
        self._again.resize(sizes[0])
        self.segments = [self._again, *self._kept]
        super(TieredStore, self)._resize(capacity)

    def select_rows(self, rows: Tensor) -> None:
        self.inputs.x = self.inputs.x[rows.to(self.inputs.x.device)]
        super().select_rows(rows)

    def bytes(self) -> Bytes:
        return super().bytes() + Bytes(host_metadata=self.inputs.x.untyped_storage().nbytes())
