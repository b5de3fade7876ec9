"""Kernels in C++, compiled on first use. Never required: plain PyTorch does the same work and is their test."""

from kvatlas.attention.native.build import available, note_once, why
from kvatlas.attention.native.ops import (
    column_mass,
    decode_attend,
    decode_attend_paged,
    isa,
    linear_small,
)

__all__ = [
    "available",
    "column_mass",
    "decode_attend",
    "decode_attend_paged",
    "isa",
    "linear_small",
    "note_once",
    "why",
]
