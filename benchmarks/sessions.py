"""A long context once: prefilling it, against saving, loading and forking the session that holds it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import arguments, forget, say, start

from kvatlas.engine.session import Session
from kvatlas.workload.text import default_text, prompts


def timed(call: Callable[[], object], n: int) -> list[float]:
    """Milliseconds of each of ``n`` calls."""
    times = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
        forget()
    return times


def main() -> None:
    parser = arguments(__doc__, prompt_tokens=4096, prefills=3, repeats=7)
    parser.add_argument("--strategies", default="full,h2o:0.1")
    options = parser.parse_args()
    lm = start(options)
    context = list(prompts(lm.tokenizer, default_text(), 1, options.prompt_tokens)[0].ids[: options.prompt_tokens])
    print(f"{options.model}, {options.dtype}, {len(context)} tokens, {options.threads} threads, {options.device}")
    for spec in options.strategies.split(","):
        sessions = [lm.session(spec) for _ in range(options.prefills)]
        left = iter(sessions)
        prefill = timed(lambda left=left: next(left).append(context), options.prefills)
        session = sessions[-1]
        del sessions, left
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "context.kv"
            saving = timed(lambda s=session, f=file: s.save(f), options.repeats)
            print(f"{spec}: {file.stat().st_size / 1e6:.1f} MB in the file, {session.bytes().total / 1e6:.1f} MB held")
            say(f"{spec} prefill", prefill)
            against = statistics.median(prefill)
            say(f"{spec} save", saving, against)
            say(f"{spec} load", timed(lambda f=file: Session.load(f, lm), options.repeats), against)
            say(f"{spec} fork", timed(session.fork, options.repeats), against)


if __name__ == "__main__":
    main()
