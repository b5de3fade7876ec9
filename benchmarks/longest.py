"""One layer's prefill with heavy-hitter mass up to 131,072 tokens: memory grows with the length, not with its square.

    python benchmarks/longest.py [--lengths 16384,32768,65536,131072]

Bar: 9 query and 3 KV heads of 64, bf16; the extra memory a token stays the same (a score matrix would double it).
"""

from __future__ import annotations

import argparse
import time

import torch

from kvatlas.attention.prefill import Prefill, attend_prefill
from kvatlas.attention.tiles import Wants
from kvatlas.measure.memory import PeakMemory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="16384,32768,65536,131072")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    memory = PeakMemory(device)
    run(256, device)
    for n in map(int, options.lengths.split(",")):
        memory.reset()
        before = memory.read()
        began = time.perf_counter()
        total = run(n, device)
        spent, extra = time.perf_counter() - began, memory.read() - before
        print(
            f"{n:7d} tokens: {spent:6.1f} s, {extra / 1e6:7.1f} MB in all = {extra / n:6.0f} bytes a token;"
            f" mass sums to {total / n / 9:.4f} a query",
            flush=True,
        )


def run(n: int, device: torch.device) -> float:
    """Attention and mass of one layer; returns the mass of all keys."""
    q = torch.randn(9, n, 64, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 3, n, 64, dtype=torch.bfloat16, device=device)
    _, mass = attend_prefill(q, k, v, Prefill(64**-0.5), wants=Wants("mass"))
    assert mass is not None
    return float(mass.double().sum())


if __name__ == "__main__":
    main()
