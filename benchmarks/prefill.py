"""Prefill with and without heavy-hitter scores: time and peak memory, each contender in a process of its own.

    python benchmarks/prefill.py [--tokens 8192]
    python benchmarks/prefill.py --device cuda --model llama-3.1-8b --load-format dummy --tokens 32768

Bars (8,192 tokens, bf16): h2o at most 2 x full's time, at most 200 MB more at the peak; prefill=eager needs several GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch
from common import arguments, start, synchronise

from kvatlas.measure.memory import PeakMemory
from kvatlas.workload.text import default_text, prompts, random_prompts

CONTENDERS = ("full", "h2o:0.3", "h2o:0.3,prefill=eager")


def main() -> None:
    parser = arguments(__doc__ or "", tokens=8192, repeats=3)
    parser.add_argument("--strategies", default=";".join(CONTENDERS), help="separated by ;")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options)))
        return
    print(f"prefill of {options.tokens} tokens, {options.dtype}, {options.device}, {options.threads} threads")
    base = None
    for spec in options.strategies.split(";"):
        done = subprocess.run([sys.executable, *sys.argv, "--only", spec], capture_output=True, text=True)
        if done.returncode:
            print(f"{spec:26} failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        base = base or found
        print(line(spec, found, base, options.repeats), flush=True)


def line(spec: str, found: dict[str, float], base: dict[str, float], repeats: int) -> str:
    """One contender, against the first."""
    slower, more = found["seconds"] / base["seconds"], (found["peak"] - base["peak"]) / 1e6
    return (
        f"{spec:26} {found['seconds']:7.2f} s ({slower:.2f} x)   peak {found['peak'] / 1e6:7.0f} MB ({more:+.0f} MB)"
        f"   held {found['held'] / 1e6:6.1f} MB   best of {repeats}"
    )


def measure(options) -> dict[str, float]:
    """The best time of the repeats, and the process's peak over them."""
    lm = start(options)
    if lm.tokenizer is None:
        ids = random_prompts(lm.facts.vocab, 1, options.tokens)[0].ids
    else:
        ids = prompts(lm.tokenizer, default_text(), 1, options.tokens)[0].ids
    memory, times, held = PeakMemory(lm.facts.device), [], 0
    for repeat in range(options.repeats + 1):  # the first one warms up
        if repeat == 1:
            memory.reset()
        cache = lm.new_cache(options.only)
        synchronise(options.device)
        began = time.perf_counter()
        with torch.no_grad():
            lm.prefill(cache, [ids], reserve=16)
        synchronise(options.device)
        times.append(time.perf_counter() - began)
        held = cache.bytes().total
        del cache
    return {"seconds": min(times[1:]), "peak": memory.read(), "held": held}


if __name__ == "__main__":
    main()
