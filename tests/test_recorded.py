"""One prefill forward for all strategies that prefill alike."""

from __future__ import annotations

import weakref

import pytest
import torch
from specs import lm_of, prompts

from kvatlas.engine.recorded import Recorded, prefill_many
from kvatlas.strategy.spec import parse

ALIKE = ("full", "paged", "streaming:0.3", "h2o:0.3", "h2o:0.5,gqa=max", "infinigen:0.3", "oracle:0.1", "random:0.3")
APART = ("h2o:0.3,prefill=chunked:16,evict=chunk", "full:prefill=chunked-isolated:16")


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss"])
def test_a_shared_prefill_is_each_strategys_own(arch: str) -> None:
    lm, ids = lm_of(arch), prompts(60, 37)
    specs = ALIKE + APART
    shared, own = [lm.new_cache(s) for s in specs], [lm.new_cache(s) for s in specs]
    logits = [after for _, after in prefill_many(lm, shared, ids, reserve=4)]
    alone = [lm.prefill(cache, ids, reserve=4) for cache in own]
    token = torch.tensor([3, 4])
    for spec, a, b, x, y in zip(specs, shared, own, logits, alone):
        assert torch.equal(x, y), spec
        for _ in range(3):
            assert torch.equal(lm.step(a, token), lm.step(b, token)), spec
        assert a.bytes() == b.bytes(), spec


@pytest.mark.parametrize("spec", ["h2o:0.3,prefill=chunked:16", "h2o:0.3,prefill=eager"])
def test_other_exact_prefills_share_within_rounding(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(60, 37)
    shared, own = lm.new_cache(spec), lm.new_cache(spec)
    list(prefill_many(lm, [shared, lm.new_cache("full")], ids, reserve=2))
    lm.prefill(own, ids, reserve=2)
    token = torch.tensor([3, 4])
    torch.testing.assert_close(lm.step(shared, token), lm.step(own, token), atol=1e-4, rtol=1e-4)


def test_strategies_that_prefill_alike_cost_one_forward() -> None:
    lm, ids, calls = lm_of("llama"), prompts(20, 12, 15), []
    caches = [lm.new_cache(spec) for spec in ALIKE + APART[1:]]
    handle = lm.model.register_forward_hook(lambda *_: calls.append(1))
    list(prefill_many(lm, caches, ids, reserve=1))
    handle.remove()
    assert len(calls) == len(ids) * (1 + 2) - 2, "one each for all, and two chunks (the last two prompts fit in one)"


def test_which_prefills_are_exact() -> None:
    exact = ("full", "h2o:0.3,prefill=eager", "h2o:0.3,prefill=chunked:8", "streaming:0.3")
    assert all(parse(spec).prefills_exactly for spec in exact)
    assert not any(parse(spec).prefills_exactly for spec in APART)


def test_caches_are_filled_one_after_another() -> None:
    """What is let go of is gone before the next one takes memory."""
    lm, ids = lm_of("llama"), prompts(60, 37)
    before = None
    for cache, _ in prefill_many(lm, [lm.new_cache(spec) for spec in ("full", "h2o:0.3", "paged")], ids, reserve=2):
        assert before is None or before() is None
        assert cache.started
        before = weakref.ref(cache)
        del cache


def test_a_recording_is_of_prompts() -> None:
    lm = lm_of("llama")
    recorded = Recorded([lm.new_cache("full")])
    assert not recorded.started
    recorded.begin([3], 1)
    run = torch.zeros(4, 3, 16), torch.zeros(2, 3, 16), torch.zeros(2, 3, 16)
    recorded.prefill(0, 0, *run)
    with pytest.raises(AssertionError, match="serves prompts"):
        recorded.prefill(0, 0, *run)
