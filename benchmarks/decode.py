"""Decode steps: strategies against transformers' own generate loop, in one run.

    python benchmarks/decode.py [--batch 8 --tokens 8000 --steps 12]
    python benchmarks/decode.py --device cuda --model llama-3.1-8b --load-format dummy

Bars (8 x 8,000 tokens, bf16, 2 threads): full at least 2.3 x transformers, h2o:0.1 at least 7 x.
With --batch 1 --tokens 512: full at least 1.5 x. infinigen:0.3 at most 2.5 x slower than full at 4 x 4,000 tokens.
"""

from __future__ import annotations

import torch
from common import arguments, filled, forget, milliseconds, say, start
from transformers import DynamicCache

from kvatlas.engine.lm import LM, cache_name


def main() -> None:
    parser = arguments(__doc__ or "", batch=8, tokens=8000, steps=12)
    parser.add_argument("--strategies", default="full,paged,streaming:0.1,h2o:0.1,infinigen:0.1,oracle:0.1,random:0.1")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    lm = start(options)
    print(f"{options.batch} x {options.tokens} tokens, {options.dtype}, {options.device}, {options.threads} threads")
    peer = None if options.no_peer else say("transformers generate", peer_steps(lm, options))
    for spec in options.strategies.split(","):
        forget()
        cache = filled(lm, spec, [options.tokens] * options.batch, options.steps + 8)
        token = torch.full((options.batch,), 5, device=lm.facts.device)
        say(spec, milliseconds(lambda: lm.step(cache, token), options.device, options.steps), peer)  # noqa: B023


def peer_steps(lm: LM, options) -> list[float]:
    """The steps of transformers' generate: its forward on a DynamicCache, as its loop calls it."""
    model, shape = lm.model, lm.shape
    make = {"dtype": shape.dtype, "device": shape.device}
    cache = DynamicCache(config=model.config)
    for i in range(shape.layers):
        kv = torch.randn(2, options.batch, shape.kv_heads, options.tokens, shape.head_dim, **make)
        cache.update(kv[0], kv[1], i)
    token = torch.full((options.batch, 1), 5, device=shape.device)

    @torch.no_grad()
    def step() -> None:
        n = cache.get_seq_length()
        mask = torch.ones(options.batch, n + 1, dtype=torch.long, device=shape.device)
        positions = torch.full((options.batch, 1), n, device=shape.device)
        inputs = model.prepare_inputs_for_generation(
            token,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            next_sequence_length=1,
            **{cache_name(): cache},
        )
        model(**inputs).logits[:, -1].argmax(-1)

    return milliseconds(step, options.device, max(4, options.steps // 3))


if __name__ == "__main__":
    main()
