"""Keys and values at 2 to 4 bits on levels of the layer's own, the worst served elements apart (KVQuant)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode
from kvatlas.strategy.encode.levels import at_level, fit_levels, nearest_level, pack, packed_bytes, unpack
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column, LayerFacts, Port

SMALLEST = 1e-8
"""The least half-range: a channel of one value only."""
STEPS = 8
"""A value's half-range is stored as a power of two in eighths."""


@dataclass(frozen=True)
class KVQuant(Encode):
    """Non-uniform levels, few bits.

    Keys are turned back to position 0 and brought to [-1, 1] by constant ranges of each channel, values by the range of
    each token; both then become codes of the layer's own ``2 ** bits`` levels, which calibration finds by k-means
    weighted by the squared gradient. ``outliers`` of head_dim, at least one element a vector, are kept apart in float16
    with their index. The prompt's ``first`` tokens are kept raw.

    The authors' code keeps every element beyond a threshold in a sparse matrix (and at most 21 at each end of a vector
    of all heads where it runs in kernels). Here the number of places is fixed: a key's go to the elements that the
    levels serve worst, which are those beyond their channel's range first, a value's to the extremes whose absence
    leaves the least range. Vectors are those of one KV head. A token's range is held in two bytes, not four: its half
    as a power of two in eighths, the middle in 127ths of that half. Their optional Q-Norm is left out.

    Keys whose positions are no rotation (learned, or RoPE that changes with the length) are encoded as they come.
    """

    source: ClassVar[str] = "KVQuant, NeurIPS 2024, section 3"
    positions: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    bits: int = 4
    outliers: float = 0.01
    first: int = 1

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise UserError(f"kvquant: bits must be 2, 3 or 4, not {self.bits}")
        if not 0 <= self.outliers < 0.5:
            raise UserError(f"kvquant: outliers must be 0 or more and below 0.5 (a share), not {self.outliers:g}")
        if self.first < 0:
            raise UserError(f"kvquant: first must be 0 or more tokens, not {self.first}")

    def words(self) -> str:
        return f"{self.bits} bits on fitted levels, keys before RoPE, {self.outliers:.0%} apart, first {self.first} raw"

    def lossless(self) -> bool:
        return False

    def places(self, head_dim: int) -> int:
        """Elements of a vector that are kept apart."""
        return math.ceil(self.outliers * head_dim)

    def columns(self, head_dim: int, dtype: torch.dtype) -> tuple[Column, ...]:
        places, size = self.places(head_dim), packed_bytes(head_dim, self.bits)
        index = torch.uint8 if head_dim <= 256 else torch.int16
        codes = (
            Column("k_codes", (size,), torch.uint8, "payload"),
            Column("v_codes", (size,), torch.uint8, "payload"),
            Column("v_range", (2,), torch.uint8, "payload"),
        )
        if not places:
            return codes
        apart = Column("apart", (2 * places,), torch.float16, "payload")  # a key's, then a value's
        return (*codes, apart, Column("apart_at", (2 * places,), index, "payload"))

    def begin(self, facts: LayerFacts) -> dict[str, Tensor]:
        if not self.first:
            return {}
        raw = torch.zeros(facts.kv_heads, self.first, facts.head_dim, dtype=facts.dtype, device=facts.device)
        count = torch.zeros((), dtype=torch.int32, device=facts.device)
        return {"first_k": raw, "first_v": raw.clone(), "first_count": count}

    def bind(self, facts: LayerFacts, port: Port, constants: Mapping[str, Tensor], state: dict[str, Tensor]) -> Encode:
        return Fitted(self, facts, port if turns(facts, port) else None, constants, state)


@dataclass(frozen=True, eq=False)
class Fitted(Encode):
    """KVQuant in one layer. ``port`` is None where keys are not turned; ``row`` where only that sequence is served."""

    positions: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True
    method: KVQuant
    facts: LayerFacts
    port: Port | None
    constants: Mapping[str, Tensor]
    state: dict[str, Tensor]
    row: int | None = None

    def words(self) -> str:
        turned = "" if self.port is not None else ", keys as they come"
        return self.method.words() + turned

    def lossless(self) -> bool:
        return False

    def columns(self, head_dim: int, dtype: torch.dtype) -> tuple[Column, ...]:
        return self.method.columns(head_dim, dtype)

    def begin(self, facts: LayerFacts) -> dict[str, Tensor]:
        return self.method.begin(facts)

    def of_row(self, row: int) -> Encode:
        return Fitted(self.method, self.facts, self.port, self.constants, self.state, row)

    # ------------------------------------------------------------ calibration

    def calibrate(
        self, facts: LayerFacts, q: Tensor, k: Tensor, v: Tensor, grad_k: Tensor | None, grad_v: Tensor | None
    ) -> dict[str, Tensor]:
        """Ranges ``[H, 1, D]`` of the channels of keys and ``[2 ** bits]`` levels of both.

        The ranges are from all N tokens, the levels from the n with gradients. Without gradients every value weighs the
        same. The first tokens take no part, being stored raw.
        """
        n = k.shape[1] if grad_k is None else grad_k.shape[1]
        positions = torch.arange(k.shape[1], device=k.device).expand(k.shape[0], -1)
        apart = slice(min(self.method.first, n - 1), None)
        x = self._turned(k, positions, back=True)
        zero, scale = channel_range(x[:, apart], self.method.outliers)
        slopes = None if grad_k is None else self._turned(grad_k, positions[:, :n], back=True)[:, apart]
        keys = self._fit((x[:, :n][:, apart] - zero) / scale, scale, slopes, None)
        y = v[:, :n][:, apart].float()
        at, low, high = extremes(y, self.method.places(facts.head_dim))
        middle, half = opened(range_codes(low, high))
        slopes = None if grad_v is None else grad_v[:, apart].float()
        return {"k_zero": zero, "k_scale": scale, "k_levels": keys,
                "v_levels": self._fit((y - middle) / half, half, slopes, at)}  # fmt: skip

    def _fit(self, x: Tensor, scale: Tensor, slopes: Tensor | None, at: Tensor | None) -> Tensor:
        """Levels of normalised ``x [H, n, D]``, where an error is really ``scale`` times as large and costs its square.

        A channel's cost is the mean squared gradient: with one squared gradient an element, as in the authors' code, a
        few of so few tokens would decide alone (0.040 instead of 0.031 nats at 3 bits on the default model).
        """
        cost = 1.0 if slopes is None else slopes.square().mean(1, keepdim=True)
        weights = (cost * scale.square()).expand_as(x)
        inside = x.abs() <= 1 if at is None else torch.ones_like(x, dtype=torch.bool).scatter(-1, at, False)
        return fit_levels(x[inside], weights[inside], 2**self.method.bits)

    # ------------------------------------------------------------------- codes

    def note(self, state: Mapping[str, Tensor], k: Tensor, v: Tensor, positions: Tensor) -> None:
        if not self.method.first:
            return
        start, have = int(positions[0]), int(state["first_count"])
        n = min(self.method.first - have, k.shape[1])
        if start == have and n > 0:
            state["first_k"][:, have : have + n] = k[:, :n]
            state["first_v"][:, have : have + n] = v[:, :n]
            state["first_count"].fill_(have + n)

    def encode(self, k: Tensor, v: Tensor, positions: Tensor) -> dict[str, Tensor]:
        method, constants = self.method, self.constants
        places = method.places(k.shape[-1])
        x, y = self._turned(k, positions, back=True), v.float()
        codes = nearest_level((x - constants["k_zero"]) / constants["k_scale"], constants["k_levels"])
        k_at = (x - self._keys(codes)).abs().topk(places, -1).indices
        v_at, low, high = extremes(y, places)
        held = range_codes(low, high)
        middle, half = opened(held)
        values = {
            "k_codes": pack(codes, method.bits),
            "v_codes": pack(nearest_level((y - middle) / half, constants["v_levels"]), method.bits),
            "v_range": held,
        }
        if places:
            most = torch.finfo(torch.float16).max
            apart = torch.cat([x.gather(-1, k_at), y.gather(-1, v_at)], -1)
            values["apart"] = apart.clamp(-most, most).half()
            values["apart_at"] = torch.cat([k_at, v_at], -1).to(torch.uint8 if k.shape[-1] <= 256 else torch.int16)
        return values

    def decode(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        dim, bits = self.facts.head_dim, self.method.bits
        x = self._keys(unpack(values["k_codes"], bits, dim))
        middle, half = opened(values["v_range"])
        y = at_level(unpack(values["v_codes"], bits, dim), self.constants["v_levels"]) * half + middle
        if "apart" in values:
            k_at, v_at = values["apart_at"].long().chunk(2, -1)
            k_apart, v_apart = values["apart"].float().chunk(2, -1)
            x, y = x.scatter(-1, k_at, k_apart), y.scatter(-1, v_at, v_apart)
        k = self._turned(x, values["pos"].long(), back=False).to(self.facts.dtype)
        return self._with_first(k, y.to(self.facts.dtype), values["pos"])

    def _keys(self, codes: Tensor) -> Tensor:
        """Keys at position 0 of codes ``[..., H, n, D]``, float32."""
        return at_level(codes, self.constants["k_levels"]) * self.constants["k_scale"] + self.constants["k_zero"]

    def _turned(self, k: Tensor, positions: Tensor, back: bool) -> Tensor:
        """Keys ``[..., H, n, D]`` at ``positions [..., H, n]`` turned back to position 0, or from there; float32."""
        if self.port is None:
            return k.float()
        x, at = k.float().reshape(-1, *k.shape[-3:]), positions.reshape(-1, *positions.shape[-2:])
        origin = torch.zeros_like(at)
        ends = (at, origin) if back else (origin, at)
        return self.port.rotate(self.facts.layer, x, *ends).reshape(k.shape)

    def _with_first(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same, the prompt's first tokens as they came."""
        first = self.method.first
        if not first:
            return k, v
        rows = slice(None) if self.row is None else slice(self.row, self.row + 1)
        raw_k, raw_v, count = (self.state[name][rows] for name in ("first_k", "first_v", "first_count"))
        kept = (positions < count.view(-1, 1, 1)).unsqueeze(-1)
        if first > 1:
            at = positions.long().clamp(max=first - 1).unsqueeze(-1).expand_as(k)
            raw_k, raw_v = raw_k.gather(2, at), raw_v.gather(2, at)
        return torch.where(kept, raw_k, k), torch.where(kept, raw_v, v)


def turns(facts: LayerFacts, port: Port) -> bool:
    """Whether keys of this layer can be turned to another position."""
    here = torch.ones(1, 1, 1, dtype=torch.int64, device=facts.device)
    probe = torch.zeros(1, 1, 1, facts.head_dim, device=facts.device)
    try:
        port.rotate(facts.layer, probe, here, here - 1)
    except UserError:
        return False
    return True


def channel_range(x: Tensor, outliers: float) -> tuple[Tensor, Tensor]:
    """Middle and half of each channel's range ``[H, 1, D]``, of ``x [H, N, D]`` without the outliers of both tails."""
    ordered = x.sort(1).values
    tail = round(outliers / 2 * (x.shape[1] - 1))
    low, high = ordered[:, tail : tail + 1], ordered[:, x.shape[1] - 1 - tail : x.shape[1] - tail]
    return (low + high) / 2, ((high - low) / 2).clamp(min=SMALLEST)


def extremes(x: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``places`` largest or smallest elements of ``x [..., D]`` whose absence leaves the least range.

    Returns:
        their index ``[..., places]`` int64, and the least and the largest of the others ``[..., 1]``.
    """
    last = x.shape[-1] - 1
    ordered, order = x.sort(-1)
    above = torch.arange(places + 1, device=x.device)  # so many from the upper end, the others from the lower one
    ranges = ordered[..., last - above] - ordered[..., places - above]
    above = ranges.argmin(-1, keepdim=True)
    low, high = ordered.gather(-1, places - above), ordered.gather(-1, last - above)
    place = torch.arange(places, device=x.device)
    taken = torch.where(place < places - above, place, last + 1 - places + place)
    return order.gather(-1, taken), low, high


def range_codes(low: Tensor, high: Tensor) -> Tensor:
    """A range that holds ``low`` to ``high [..., 1]`` and zero, in two bytes ``[..., 2]``."""
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    half = ((high - low) / 2).clamp(min=SMALLEST)
    power = (half.log2() * STEPS).ceil().clamp(-128, 127)
    middle = ((high + low) / 2 / torch.exp2(power / STEPS) * 127).round().clamp(-127, 127)
    return (torch.cat([middle, power], -1) + 128).to(torch.uint8)


def opened(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Middle and half ``[..., 1]`` float32 of ``range_codes``."""
    middle, power = (codes.float() - 128).split(1, -1)
    half = torch.exp2(power / STEPS)
    return middle / 127 * half, half


register(
    Preset(
        "kvquant",
        {"encode": KVQuant},
        "2 to 4 bits on fitted levels, keys before RoPE, outliers and the first tokens apart",
    )
)
