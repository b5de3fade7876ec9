"""The strategies that the tests run, tiny models to run them on, and what transformers itself gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from tiny import VOCAB, tiny_model
from transformers import DynamicCache

from kvatlas.engine.lm import LM

ARCHS = ("llama", "qwen3", "mistral", "gemma3", "gpt_oss", "opt")
NO_ROPE = ("opt",)
"""Learned positions: nothing can be seen from another position there."""

LOSSLESS = (
    "full",
    "paged",
    "paged:block=4,share=false",
    "host",
    "host:overlap=false",
    "streaming:1.0",
    "h2o:1.0",
    "h2o:1000",
    "random:1.0",
    "oracle:1.0",
    "oracle:1.0+paged",
    "infinigen:1.0,alpha=inf",
    "infinigen:1.0,alpha=inf,overlap=false",
    "infinigen:1.0,alpha=inf,pool=1000",
)
EVICTING = (
    "streaming:0.3",
    "streaming:0.3,positions=true",
    "h2o:0.3",
    "h2o:0.4,variant=flexgen,gqa=max",
    "h2o:0.3,sinks=2,normalise=true,gqa=sum",
    "h2o:heavy=5,recent=3",
    "random:0.3",
    "h2o:0.3+host",
    "infinigen:0.4,pool=0.5",
    "infinigen:0.4,pool=14,policy=lru",
    "infinigen:0.4,pool=0.5,policy=fifo",
)
READING = (
    "oracle:0.2",
    "oracle:5,gqa=max",
    "oracle:0.3+paged:block=4",
    "oracle:0.3+host",
    "infinigen:0.2",
    "infinigen:0.2,overlap=false",
    "infinigen:4,alpha=1.5,partial=0.5,gqa=sum",
)
LOSSY = EVICTING + READING
ALL = LOSSLESS + LOSSY


def rotates(spec: str) -> bool:
    """Does this strategy see keys from another position?"""
    return spec.startswith("streaming") and "positions=true" not in spec and "1.0" not in spec


def served(arch: str, specs: Sequence[str]) -> list[str]:
    """Those of the strategies that an architecture's positions allow."""
    return [s for s in specs if arch not in NO_ROPE or not rotates(s)]


@cache
def lm_of(arch: str, dtype: torch.dtype = torch.float32, lean: bool = True) -> LM:
    """A tiny model in the engine, the same one for all tests."""
    return LM(tiny_model(arch, dtype), lean=lean)


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    """Random token ids; a prompt depends on its length and the seed only."""
    return [
        torch.randint(2, VOCAB, (n,), generator=torch.Generator().manual_seed(1000 * seed + n)).tolist()
        for n in lengths
    ]


def tokens(lm: LM, ids: Sequence[Sequence[int]], spec: str, new: int = 10) -> list[list[int]]:
    """Greedy tokens under a strategy."""
    return [g.ids for g in lm.generate(ids, spec, max_new_tokens=new)]


def padded(ids: Sequence[Sequence[int]], side: str = "left") -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of a batch."""
    width = max(map(len, ids))
    gaps = [[0] * (width - len(i)) for i in ids]
    fill = [
        (g + list(i), g + [1] * len(i)) if side == "left" else (list(i) + g, [1] * len(i) + g)
        for g, i in zip(gaps, ids)
    ]
    return {"input_ids": torch.tensor([f[0] for f in fill]), "attention_mask": torch.tensor([f[1] for f in fill])}


def theirs(model: torch.nn.Module, ids: Sequence[Sequence[int]], new: int = 10, **arguments: object) -> list[list[int]]:
    """transformers' own tokens for a left-padded batch; ``cache=`` makes them ours."""
    inputs = padded(ids)
    arguments = {"do_sample": False, "cache": DynamicCache(config=model.config), **arguments}
    out = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, **arguments)
    return out[:, inputs["input_ids"].shape[1] :].tolist()
