"""The same promises on a CUDA device: exact attention, the engine's tokens, every preset, the host tier's copies."""

from __future__ import annotations

import pytest
import torch
from specs import ALL, LOSSLESS, prompts, served
from tiny import tiny_model

from kvatlas.attention.prefill import Prefill, attend_prefill
from kvatlas.attention.tiles import Wants
from kvatlas.engine.lm import LM
from kvatlas.engine.replay import replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA device"),
]


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt_oss"])
def lm(request: pytest.FixtureRequest) -> LM:
    return LM(tiny_model(request.param).to("cuda"))


def ids_of(lm: LM, spec: str) -> list[list[int]]:
    return [g.ids for g in lm.generate(prompts(40, 23, 31), spec, max_new_tokens=8, stop=[])]


@pytest.mark.parametrize("spec", [s for s in LOSSLESS if s != "full"])
def test_lossless_presets_give_the_tokens_of_full(lm: LM, spec: str) -> None:
    assert ids_of(lm, spec) == ids_of(lm, "full")


@pytest.mark.parametrize("spec", served("llama", ALL))
def test_every_preset_runs(lm: LM, spec: str) -> None:
    assert all(len(ids) == 8 for ids in ids_of(lm, spec))


def test_full_gives_transformers_tokens(lm: LM) -> None:
    for ids in prompts(40, 23):
        given = torch.tensor([ids], device="cuda")
        theirs = lm.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False)
        assert lm.generate([ids], "full", max_new_tokens=8, stop=[])[0].ids == theirs[0, len(ids) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_mass_against_float64(dtype: torch.dtype) -> None:
    q = torch.randn(6, 300, 64, device="cuda").to(dtype)
    k, v = torch.randn(2, 2, 300, 64, device="cuda").to(dtype)
    out, mass = attend_prefill(q, k, v, Prefill(0.125), wants=Wants("mass"))
    scores = (q.double().view(2, 3, 300, 64) @ k.double().unsqueeze(1).transpose(-1, -2)) * 0.125
    hidden = torch.ones(300, 300, dtype=torch.bool, device="cuda").triu(1)
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    want = (p @ v.double().unsqueeze(1)).reshape(6, 300, 64).transpose(0, 1)
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=0)
    assert mass is not None
    torch.testing.assert_close(mass.double(), p.sum(2).reshape(6, 300), atol=0, rtol=atol)


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "oracle:0.2", "host"])
def test_replay_is_that_of_the_cpu(spec: str) -> None:
    q = torch.randn(4, 80, 16)
    k, v = torch.randn(2, 2, 80, 16)
    here, there = replay(spec, q, k, v, 60), replay(spec, q.cuda(), k.cuda(), v.cuda(), 60)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here.kept, there.kept))
    torch.testing.assert_close(there.output.cpu(), here.output, atol=1e-5, rtol=0)
