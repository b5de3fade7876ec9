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
    "scissorhands:1.0",
    "scissorhands:1000",
    "snapkv:1.0",
    "snapkv:1000",
    "alisa:1.0",
    "alisa:1000",
    "quest:1.0",
    "quest:1000",
    "pqcache:1.0",
    "recall:1.0",
    "recall:0.3,pages=1000",
    "snapkv:0.3+recall:pages=1000",
    "disk",
    "disk:direct=false,overlap=false",
    "virtual",
    "flexgen:device=30,host=40,disk=30+raw",
    "host+raw",
)
EVICTING = (
    "streaming:0.3",
    "streaming:0.3,positions=true",
    "h2o:0.3",
    "h2o:0.4,variant=flexgen,gqa=max",
    "h2o:0.3,sinks=2,normalise=true,gqa=sum",
    "h2o:heavy=5,recent=3",
    "random:0.3",
    "scissorhands:0.3",
    "scissorhands:0.3,history=11,gqa=max",
    "snapkv:0.3",
    "snapkv:capacity=12,window=4,kernel=3,pool=max",
    "alisa:0.3",
    "h2o:0.3,layers=pyramid",
    "h2o:0.3+host",
    "h2o:0.3+virtual",
    "h2o:0.3+disk",
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
    "quest:0.3,page=4",
    "quest:12,page=2,gqa=max,newest=false",
    "pqcache:0.3",
    "pqcache:0.3,bits=3,parts=4,policy=lru,cache=16,block=4",
    "oracle:0.3+disk",
)
ENCODED = ("int8", "int4", "kvquant", "kvquant:bits=3", "kvquant:bits=2")
TOGETHER = (
    "h2o:0.3+int4",
    "snapkv:0.3+quest:0.5,page=4",
    "snapkv:0.3+quest:0.5,page=4+int4",
    "infinigen:0.2+int4",
    "streaming:0.2+host",
    "quest:0.3,page=4+int8+host",
    "h2o:0.5+quest:0.5,page=4",
    "recall:0.3,page=4,pages=2",
    "recall:0.3,page=4,pages=2,archive_as=int8",
    "recall:0.3,page=4,pages=2,share=true",
    "snapkv:0.3+recall:page=4,pages=2+int4",
    "scissorhands:0.3+kvquant",
    "oracle:0.2+kvquant+host",
    "pqcache:0.3+int8",
    "pqcache:0.3+disk",
    "infinigen:0.2+disk",
    "h2o:0.4+int4+disk",
    "flexgen:device=30,host=40,disk=30",
    "infllm:0.4,block=4",
    "squeezed:quantile=0.8,clusters=0.3,recent=10",
    "squeezed:quantile=0.8,clusters=0.3,recent=10+paged",
    "pqcache:0.3+paged",
)
LOSSY = EVICTING + READING
ALL = LOSSLESS + LOSSY + ENCODED + TOGETHER


def rotates(spec: str) -> bool:
    """Does this strategy see keys from another position?"""
    if spec.startswith("infllm"):
        return True
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
