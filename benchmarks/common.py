"""What the benchmarks share: models, filled caches, peaks of memory, and how ratios are printed."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch

from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM
from kvatlas.model.load import load_model


def arguments(about: str, **defaults: object) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser


def start(options: argparse.Namespace) -> LM:
    """The model that a benchmark runs."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    loaded = load_model(options.model, options.dtype, options.device, options.load_format)
    return LM(loaded.model, loaded.tokenizer)


def filled(lm: LM, strategy: str, lengths: list[int], reserve: int) -> KVCache:
    """A cache as after a prefill of random keys and values: what a step costs does not depend on their content."""
    cache, shape = lm.new_cache(strategy), lm.shape
    cache.begin(lengths, reserve)
    make = {"dtype": shape.dtype, "device": shape.device}
    for layer in cache.layers:
        for row, n in enumerate(lengths):
            k, v = torch.randn(2, shape.kv_heads, n, shape.head_dim, **make)
            q = torch.randn(shape.heads, n, shape.head_dim, **make)
            statistic = None if layer.wants is None else torch.rand(shape.heads, n, device=shape.device)
            layer.take(row, q, k, v, statistic)
    return cache


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def milliseconds(step: Callable[[], object], device: str, repeats: int, warm: int = 3) -> list[float]:
    """Times of ``step`` after ``warm`` calls that do not count."""
    for _ in range(warm):
        step()
    times = []
    for _ in range(repeats):
        synchronise(device)
        began = time.perf_counter()
        step()
        synchronise(device)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def say(name: str, times: list[float], against: float | None = None) -> float:
    """One line: the median, its spread, and how many times as fast as ``against`` (ms). Returns the median."""
    middle = statistics.median(times)
    ratio = "" if against is None else f"   {against / middle:5.2f} x as fast"
    print(f"{name:28} {middle:9.1f} ms  ({min(times):.1f} to {max(times):.1f}, n={len(times)}){ratio}", flush=True)
    return middle


def forget() -> None:
    """Free what the last contender held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
