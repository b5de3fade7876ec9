"""Bytes of every strategy on a tiny model from shapes alone: what docs/strategies.md says, written down once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny import HEAD_DIM, KV_HEADS, LAYERS, WINDOW

from kvatlas.strategy.spec import parse

HEADS = 4


def element(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def shape_of(arch: str) -> tuple[int, int]:
    """KV heads and head dimension."""
    return (4, 16) if arch == "opt" else (KV_HEADS, HEAD_DIM)


def parts_of(spec: str) -> list[str]:
    return [part.split(":")[0] for part in spec.split("+")]


def payload_bytes(spec: str, dim: int, dtype: torch.dtype) -> int:
    """Keys and values of one token of one KV head."""
    encode: Any = parse(spec).encode
    name = type(encode).__name__
    if name == "Encode":
        return 2 * dim * element(dtype)
    if name in ("Int8", "Int4"):
        codes = dim if name == "Int8" else -(-dim // 2)
        return 2 * (codes + 4 * -(-dim // encode.group))
    assert name == "KVQuant"
    apart = -(-dim * encode.outliers // 1)  # elements of a vector, half precision and a byte for the index
    return int(2 * -(-dim * encode.bits // 8) + 2 + 2 * apart * 3)


def metadata_bytes(spec: str, layer: int, dim: int, dtype: torch.dtype) -> int:
    """What the rules remember of one token of one KV head: its position (4), scores, codes."""
    strategy: Any = parse(spec)
    keep, read, total = strategy.keep, strategy.read, 0
    rule = type(keep).__name__
    if rule != "Keep" and not (rule == "Pool" and keep.budget == 1.0):
        total += 4
        total += {"HeavyHitters": 4, "Chance": 4, "Pool": 4}.get(rule, 0)
        if rule == "Persistent" and not keep.lossless():
            total += -(-keep.history // 8) + 4
        if rule == "SparseWindow" and not keep.lossless():
            total += 2 * keep.history
    elif type(strategy.encode).__name__ == "KVQuant":
        total += 4
    if layer < read.first_layer:
        return total
    total += {
        "Speculated": lambda: int(dim * read.partial) * element(dtype),
        "ProductQuantised": lambda: read.parts if read.budget != 1.0 else 0,
        "Squeezed": lambda: 2 if read.selects else 0,
    }.get(type(read).__name__, lambda: 0)()
    return total


def state_bytes(spec: str, arch: str, layer: int, slots: int, dtype: torch.dtype) -> int:
    """What the rules remember of one sequence."""
    strategy: Any = parse(spec)
    read, encode, (heads, dim), size = strategy.read, strategy.encode, shape_of(arch), element(dtype)
    total = 0
    if type(encode).__name__ == "KVQuant" and encode.first:
        total += 2 * heads * encode.first * dim * size + 4
    if layer < read.first_layer:
        return total
    name = type(read).__name__
    if name == "Speculated":
        return total + heads * dim * (int(dim * read.partial) * size + 4)  # the prompt's basis and its sums
    if (name == "Quest" and read.budget != 1.0) or (name == "SecondChance" and not strategy.keep.lossless()):
        return total + 2 * heads * -(-slots // read.page) * dim * size
    if name == "ProductQuantised" and read.budget != 1.0:
        return total + heads * dim * 2**read.bits * size + 1
    if name == "Squeezed" and read.selects:
        clusters = max(1, int(read.clusters * slots))
        return total + heads * clusters * (dim * size + 4) + HEADS * read.recent * dim * size + 12
    if name == "RepresentedBlocks":
        return total + -(-slots // read.block) * HEADS * dim * size + heads * dim * 4 + 32
    return total


def closed_form(spec: str, arch: str, dtype: torch.dtype, lengths: Sequence[int], reserve: int) -> int:
    """All bytes of a cache after prompts of these lengths with ``reserve`` tokens to come, staging apart."""
    strategy: Any = parse(spec)
    rows, (heads, dim) = len(lengths), shape_of(arch)
    counts, total = rows * heads * 8, 0  # filled slots, int64
    for layer in range(LAYERS):
        if arch in ("gemma3", "gpt_oss") and layer % 2 == 0:
            own = 2 * dim * element(dtype) + 4
            total += rows * heads * min(WINDOW, max(lengths) + reserve) * own + 2 * counts
            continue
        plans = [keep_of(strategy, layer, arch).plan(n) for n in lengths]
        slots = max(lengths) + reserve
        bounded = "capacity" in plans[0] and not strategy.keep.grows()
        if bounded:
            slots = max(min(p["capacity"] + 1, n + reserve) for p, n in zip(plans, lengths))
            total += counts  # and which slot is free
        elif "capacity" in plans[0]:
            slots = max(min(p["capacity"], n) for p, n in zip(plans, lengths)) + reserve
        payload, metadata = payload_bytes(spec, dim, dtype), metadata_bytes(spec, layer, dim, dtype)
        total += placed_bytes(spec, rows, heads, slots, payload, metadata) + counts
        chosen = slots
        if getattr(strategy.place, "archives", False) and "capacity" in plans[0]:
            chosen = max(max(0, n - p["capacity"]) for p, n in zip(plans, lengths)) + reserve
            as_codes = {"raw": payload, "int8": 2 * (dim + 4), "int4": 2 * (dim // 2 + 4)}[strategy.place.archive_as]
            if strategy.place.share:  # of each sequence's own number of slots, two int32 each, and a map of int32
                gone = sum(max(0, n - p["capacity"]) for p, n in zip(plans, lengths)) + rows * reserve
                total += heads * gone * (as_codes + 8) + 4 * rows * heads * chosen + 2 * counts
            else:
                total += rows * heads * chosen * as_codes + 2 * counts
        total += rows * state_bytes(spec, arch, layer, chosen, dtype)
    return total


def keep_of(strategy: Any, layer: int, arch: str) -> Any:
    """The keep rule of a layer; a pyramid's share falls evenly from 1.95 to 0.05 over the layers that it works in."""
    if strategy.layers is None:
        return strategy.keep
    assert strategy.layers.weights is None
    layers, at = (LAYERS // 2, layer // 2) if arch in ("gemma3", "gpt_oss") else (LAYERS, layer)
    return strategy.keep.with_budget(strategy.keep.budget * (1.95 - 1.9 * at / (layers - 1)))


def placed_bytes(spec: str, rows: int, heads: int, slots: int, payload: int, metadata: int) -> int:
    """A store's columns: in whole blocks where the place has them."""
    block = getattr(parse(spec).place, "block", 1) if "paged" in parts_of(spec) else 1
    return rows * heads * -(-slots // block) * block * (payload + metadata)


OF_THEIR_OWN = ("virtual", "disk", "flexgen", "pqcache", "infllm", "blockcache", "alisa")
"""Presets whose places hold whole pages, files, blocks or inputs: their closed forms are tested with their stores."""
