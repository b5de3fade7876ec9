"""The disk tier in less memory than full needs: the same tokens, each contender in a process of its own.

    python benchmarks/disk.py [--sequences 24 --tokens 2000 --new 16] [--dir FOLDER]

`full` runs first and says how much private memory it took at its peak (VmData). Then `--strategies` run with that
limited (RLIMIT_DATA) to `--less` bytes less. Bar: at least 2 GiB of keys and values, 1 GiB less memory, full's tokens.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from common import arguments, start

from kvatlas.workload.text import default_text, prompts, random_prompts


def main() -> None:
    parser = arguments(__doc__ or "", sequences=24, tokens=2000, new=16, less=1 << 30)
    parser.set_defaults(dtype="float32")
    parser.add_argument("--strategies", default="disk", help="separated by ;")
    parser.add_argument("--dir", default="", help="where the files are put (default: the system's temporary folder)")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(run(options)))
        return
    print(f"{options.sequences} x {options.tokens} tokens, {options.dtype}, {options.threads} threads")
    full = child("full", 0)
    tell("full", full)
    for spec in options.strategies.split(";"):
        limit = full["private"] - options.less
        where = f"{',' if ':' in spec.split('+')[-1] else ':'}dir={options.dir}" if options.dir else ""
        found = child(spec + where, limit)
        same = found["tokens"] == full["tokens"]
        tell(spec, found, f"limited to {limit / 2**30:.2f} GiB: {'the tokens of full' if same else 'OTHER TOKENS'}")


def child(spec: str, limit: int) -> dict:
    """One contender in a process of its own, whose private memory may not exceed ``limit`` (0: no limit)."""
    command = [sys.executable, *sys.argv, "--only", spec, "--limit", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{spec} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def tell(name: str, found: dict, more: str = "") -> None:
    print(
        f"{name:10} {found['kv'] / 2**30:5.2f} GiB of keys and values ({found['tiers']}); private memory at the peak "
        f"{found['private'] / 2**30:.2f} GiB; prefill {found['prefill']:.0f} s, a step {found['step']:.2f} s. {more}",
        flush=True,
    )


def run(options) -> dict:
    """Prefill and greedy steps."""
    if options.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (options.limit, options.limit))
    peak = Peak()
    lm = start(options)
    n, length = options.sequences, options.tokens
    if lm.tokenizer is None:
        ids = [p.ids for p in random_prompts(lm.facts.vocab, n, length)]
    else:
        ids = [p.ids for p in prompts(lm.tokenizer, default_text(), n, length, overlap=True)]
    cache = lm.new_cache(options.only)
    began = time.perf_counter()
    tokens = [lm.prefill(cache, ids, options.new).argmax(-1)]
    prefill, began = time.perf_counter() - began, time.perf_counter()
    for _ in range(options.new - 1):
        tokens.append(lm.step(cache, tokens[-1]).argmax(-1))
    step = (time.perf_counter() - began) / max(1, options.new - 1)
    held = cache.bytes()
    tiers = ", ".join(
        f"{name} {size / 2**30:.2f}"
        for name, size in (("device", held.device), ("host", held.host), ("disk", held.disk))
        if size
    )
    return {
        "tokens": torch.stack(tokens, 1).tolist(), "private": peak.stop(), "prefill": prefill, "step": step,
        "kv": held.device_payload + held.host_payload + held.disk_payload, "tiers": tiers,
    }  # fmt: skip


class Peak:
    """The most private writable memory (VmData, what RLIMIT_DATA limits) of this process, looked at all the time."""

    def __init__(self) -> None:
        self._most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        status = Path("/proc/self/status")
        while not self._over.wait(0.005):
            line = next(text for text in status.read_text().splitlines() if text.startswith("VmData:"))
            self._most = max(self._most, int(line.split()[1]) * 1024)

    def stop(self) -> int:
        """The peak so far, and no more looking."""
        self._over.set()
        self._thread.join()
        return self._most


if __name__ == "__main__":
    main()
