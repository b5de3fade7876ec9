"""Codes of 8 or 4 bits in groups along the head dimension (FlexGen)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvatlas.attention.packed import code_bytes, quantise, unpack
from kvatlas.attention.tiles import Packed
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode
from kvatlas.strategy.registry import Preset, register
from kvatlas.strategy.view import Column, LayerFacts, Port


@dataclass(frozen=True)
class Groups(Encode):
    """Asymmetric codes between the least and the largest value of each ``group`` elements of a key or value.

    Scale and zero are float16, one of each per token, KV head and group. What moves between slots are the codes, so
    nothing is quantised twice.
    """

    source: ClassVar[str] = "FlexGen, ICML 2023, section 4"
    bits: ClassVar[int] = 8
    group: int = 64

    def __post_init__(self) -> None:
        if self.group < 1:
            raise UserError(f"int{self.bits}: group must be at least 1 element, not {self.group}")

    def words(self) -> str:
        return f"{self.bits} bits, groups of {self.group}"

    def lossless(self) -> bool:
        return False

    def bind(self, facts: LayerFacts, port: Port, constants: Mapping[str, Tensor], state: dict[str, Tensor]) -> Encode:
        return GroupCodes(self.bits, self.group, facts.head_dim, facts.dtype)

    def columns(self, head_dim: int, dtype: torch.dtype) -> tuple[Column, ...]:
        return GroupCodes(self.bits, self.group, head_dim, dtype).columns(head_dim, dtype)

    def encode(self, k: Tensor, v: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return GroupCodes(self.bits, self.group, k.shape[-1], k.dtype).encode(k, v, positions)

    def decode(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        raise TypeError("codes alone do not tell their head size and dtype: decode with what `bind` returns")


@dataclass(frozen=True)
class Int8(Groups):
    """8 bits."""

    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(Groups):
    """4 bits, two codes to a byte."""

    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class GroupCodes(Encode):
    """The same in a layer whose head size and dtype are known."""

    bits: int
    group: int
    head_dim: int
    dtype: torch.dtype

    def columns(self, head_dim: int, dtype: torch.dtype) -> tuple[Column, ...]:
        codes, scales = (code_bytes(head_dim, self.bits),), (-(-head_dim // self.group), 2)
        return tuple(
            column
            for x in ("k", "v")
            for column in (
                Column(f"{x}_codes", codes, torch.uint8, "payload"),
                Column(f"{x}_scale", scales, torch.float16, "payload"),
            )
        )

    def encode(self, k: Tensor, v: Tensor, positions: Tensor) -> dict[str, Tensor]:
        k_codes, k_scale = quantise(k, self.bits, self.group)
        v_codes, v_scale = quantise(v, self.bits, self.group)
        return {"k_codes": k_codes, "k_scale": k_scale, "v_codes": v_codes, "v_scale": v_scale}

    def decode(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return unpack(self.packed(values), self.dtype)

    def packed(self, values: Mapping[str, Tensor]) -> Packed:
        codes = (values["k_codes"], values["v_codes"], values["k_scale"], values["v_scale"])
        return Packed(*codes, self.bits, self.group, self.head_dim)

    def lossless(self) -> bool:
        return False


register(Preset("int8", {"encode": Int8}, "keys and values in 8 bits, groups of 64"))
register(Preset("int4", {"encode": Int4}, "keys and values in 4 bits, groups of 64"))
