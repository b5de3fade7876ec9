"""Samples/s of 5-shot HellaSwag: the choices of a question from one compressed cache, against lm-eval's own HF model.

    python benchmarks/quality.py [--samples 16] [--shots 5] [--strategy full] [--data-dir FOLDER]

Both score the same requests on the same weights. lm-eval runs the whole prompt once for each choice, ours once for all
of them. Bar: 2 x the samples/s, without compression. Scores are compared too: the largest difference of a choice's
log-likelihood, and how many predictions differ.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from common import arguments, start

from kvatlas.quality.reasoning import reasoning_task
from kvatlas.quality.reasoning.model import KVAtlasLM

DATA = os.environ.get("KVATLAS_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")


def main() -> None:
    parser = arguments(
        __doc__ or "", samples=16, shots=5, seed=0, strategy="full", batch_size=1, data_dir=str(DATA), task="hellaswag"
    )
    parser.set_defaults(dtype="float32")
    options = parser.parse_args()
    if not Path(options.data_dir).is_dir():
        sys.exit(print(f"skipped: no folder {options.data_dir} with the task's file (--data-dir)"))
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm = start(options)
    asked = reasoning_task(options.task, options.shots, options.data_dir).samples(options.samples, options.seed)
    requests = [request for one in asked for request in one.requests]
    ours = KVAtlasLM(lm, options.strategy)
    theirs = HFLM(lm.model, tokenizer=lm.tokenizer, batch_size=options.batch_size, max_length=ours.max_length)
    choices = len(asked[0].requests)
    found = []
    for name, model in (("lm-eval's HF model", theirs), (f"kvatlas, {options.strategy}", ours)):
        model.loglikelihood(requests[:choices], disable_tqdm=True)  # warm
        began = time.perf_counter()
        scores = [value for value, _ in model.loglikelihood(requests, disable_tqdm=True)]
        found.append((len(asked) / (time.perf_counter() - began), scores))
        print(f"{name:28} {found[-1][0]:8.3f} samples/s  (n={len(asked)})", flush=True)
    (slow, a), (fast, b) = found
    apart = sum(x != y for x, y in zip(predicted(a, choices), predicted(b, choices)))
    off = max(abs(x - y) for x, y in zip(a, b))
    print(f"{fast / slow:.2f} x as fast")
    print(f"log-likelihoods differ by {off:.1e} at most, and {apart} of {len(asked)} predictions do")


def predicted(scores: list[float], choices: int) -> list[int]:
    """The likeliest choice of each sample."""
    rows = [scores[i : i + choices] for i in range(0, len(scores), choices)]
    return [row.index(max(row)) for row in rows]


if __name__ == "__main__":
    main()
