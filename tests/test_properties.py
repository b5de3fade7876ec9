"""What holds for every strategy, whatever the prompt, the budget and the company."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import rope
from specs import lm_of, prompts, tokens
from torch import Tensor

from kvatlas.engine.replay import replay
from kvatlas.engine.sampling import Sampling
from kvatlas.strategy.budget import resolve, resolve_all
from kvatlas.strategy.spec import parse

BUDGETS = st.sampled_from(["1", "2", "3", "5", "17", "200", "0.01", "0.1", "0.3", "0.75", "0.99"])
EVICTORS = (
    "streaming:{b}",
    "streaming:{b},sinks=0",
    "streaming:{b},sinks=9,positions=true",
    "h2o:{b}",
    "h2o:{b},sinks=3",
    "h2o:{b},variant=flexgen",
    "h2o:{b},variant=flexgen,sinks=2",
    "h2o:{b},normalise=true,gqa=max",
    "random:{b}",
    "random:{b},recent=0,sinks=0",
    "random:{b},recent=1,sinks=2",
    "full",
)


def recorded(total: int, seed: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values, scaled so that attention has favourites."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, total, 16, generator=generator) * 1.5 for n in (heads, kv_heads, kv_heads))  # type: ignore


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A strategy, a prompt's length, a number of steps, a seed."""
    spec = draw(st.sampled_from(EVICTORS)).format(b=draw(BUDGETS))
    if draw(st.booleans()):
        spec += ("," if ":" in spec else ":") + draw(
            st.sampled_from(["prefill=chunked:5", "prefill=chunked:5,evict=chunk"])
        )
    return spec, draw(st.integers(1, 40)), draw(st.integers(0, 12)), draw(st.integers(0, 99))


@settings(max_examples=150)
@given(cases())
@example(("h2o:3,sinks=2,variant=flexgen", 20, 6, 0))
@example(("h2o:1,variant=flexgen", 20, 6, 0))
@example(("streaming:2", 20, 6, 0))
@example(("random:1", 20, 6, 0))
def test_what_is_kept_was_seen_is_unique_protected_and_within_budget(case: tuple[str, int, int, int]) -> None:
    spec, prompt, later, seed = case
    q, k, v = recorded(prompt + later, seed)
    result = replay(spec, q, k, v, prompt, rope=lambda x, at: rope(x, at))
    keep = parse(spec).keep
    plan = keep.plan(prompt)
    assert len(result.kept) == later + 1
    gone: list[set[int]] = [set(), set()]
    for step, kept in enumerate(result.kept):
        seen = prompt + step
        assert kept.shape == (2, min(seen, plan.get("capacity", seen))), spec
        for head, row in enumerate(kept.tolist()):
            assert row == sorted(set(row)) and set(row) <= set(range(seen)), spec
            assert not gone[head] & set(row), f"{spec}: an evicted token came back"
            gone[head] = set(range(seen)) - set(row)
            if "capacity" in plan:
                assert set(range(min(seen, plan.get("sinks", 0)))) <= set(row), f"{spec}: a sink is gone"
                recent = (
                    plan["capacity"] - plan.get("sinks", 0) if spec.startswith("streaming") else plan.get("recent", 0)
                )
                if step or not spec.startswith("h2o"):
                    recent = max(recent, 1)
                assert set(range(max(0, seen - recent), seen)) <= set(row), f"{spec}: a recent token is gone"
    assert bool(torch.isfinite(result.output).all())
    for now, read in enumerate(result.read):
        before = result.kept[now].tolist()
        want = [[*row, prompt + now] for row in before]
        assert read.tolist() == want  # type: ignore[union-attr]


@settings(max_examples=60)
@given(BUDGETS, st.integers(1, 40), st.integers(1, 8), st.sampled_from(["mean", "max", "sum"]), st.integers(0, 99))
def test_a_reader_reads_its_budget_of_what_is_there(budget: str, prompt: int, later: int, gqa: str, seed: int) -> None:
    """And the oracle reads the best: no other choice of as many keys covers more of the group's mass."""
    q, k, v = recorded(prompt + later, seed)
    result = replay(f"oracle:{budget},gqa={gqa}", q, k, v, prompt, diagnose=True)
    for step, read in enumerate(result.read):
        seen = prompt + step + 1
        allowed = min(seen, resolve(parse(f"oracle:{budget}").read.budget, seen) or seen)
        rows = [list(map(int, row)) for row in read]
        assert all(row == sorted(set(row)) and set(row) <= set(range(seen)) and len(row) == allowed for row in rows)
    if gqa == "mean":
        assert result.overlap is not None and float(result.overlap.min()) == 1.0


@settings(max_examples=60)
@given(
    st.integers(1, 60),
    st.sampled_from(["flash", "eager", "chunked:7"]),
    st.sampled_from(["mean", "sum"]),
    st.integers(0, 99),
)
def test_mass_sums_to_the_number_of_queries(length: int, prefill: str, gqa: str, seed: int) -> None:
    """Nothing evicted: the scores of all keys are the prompt's queries, plus one a step (per query head, if summed)."""
    q, k, v = recorded(length + 3, seed)
    result = replay(f"h2o:1000,gqa={gqa},prefill={prefill}", q, k, v, length)
    for step, score in enumerate(result.scores):
        want = (length + step) * (2 if gqa == "sum" else 1)
        torch.testing.assert_close(score.sum(-1), torch.full((2,), float(want)), rtol=1e-5, atol=0)


@settings(max_examples=40)
@given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 99))
def test_an_evicted_keys_mass_is_gone(prompt: int, heavy: int, seed: int) -> None:
    """What is left never weighs more than its queries, and each step adds at most one."""
    q, k, v = recorded(prompt + 6, seed)
    result = replay(f"h2o:heavy={heavy},recent=1", q, k, v, prompt)
    sums = [score.sum(-1) for score in result.scores]
    assert bool((sums[0] <= prompt + 1e-4).all())
    for before, after in pairwise(sums):
        assert bool((after <= before + 1 + 1e-4).all())


@settings(max_examples=40)
@given(
    st.integers(2, 30),
    st.integers(1, 6),
    st.integers(0, 99),
    st.sampled_from(["full", "h2o:0.5", "streaming:0.5,positions=true"]),
)
def test_output_is_attention_over_what_is_kept(prompt: int, later: int, seed: int, spec: str) -> None:
    q, k, v = recorded(prompt + later, seed)
    result = replay(spec, q, k, v, prompt)
    for step in range(later):
        now, kept = prompt + step, result.kept[step]
        for head in range(4):
            at = [*kept[head // 2].tolist(), now]
            p = torch.softmax(k[head // 2, at].double() @ q[head, now].double() / 4, 0)
            torch.testing.assert_close(
                result.output[step, head].double(), p @ v[head // 2, at].double(), atol=1e-5, rtol=1e-5
            )


def test_streaming_sees_its_sinks_from_inside_the_cache() -> None:
    """The paper's positions: what is far away is seen as if the cache were the whole text."""
    raw = recorded(40, 5)
    at = torch.arange(40)
    q, k, v = rope(raw[0], at), rope(raw[1], at), raw[2]
    result = replay("streaming:12", q, k, v, 30, rope=lambda x, to: rope(x, to))
    for step in range(10):
        now = 30 + step
        kept = [*range(4), *range(now - 8, now + 1)]  # 4 sinks, 8 of the window, the newest
        inside_q = rope(raw[0][:, now : now + 1], torch.tensor([len(kept) - 1]))
        inside_k = rope(raw[1][:, kept], torch.arange(len(kept)))
        for head in range(4):
            p = torch.softmax(inside_k[head // 2].double() @ inside_q[head, 0].double() / 4, 0)
            want = p @ v[head // 2, kept].double()
            torch.testing.assert_close(result.output[step, head].double(), want, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------ company

COMPANY = (
    "full",
    "paged",
    "host",
    "streaming:{b}",
    "streaming:{b},sinks=1",
    "h2o:{b}",
    "h2o:{b},variant=flexgen",
    "h2o:heavy=3,recent=2",
    "random:{b}",
    "oracle:{b}",
    "oracle:{b}+paged:block=4",
    "oracle:{b}+host",
    "infinigen:{b}",
    "infinigen:{b},overlap=false",
    "infinigen:{b},pool=0.3",
    "infinigen:0.5,pool={b},policy=lru",
    "infinigen:0.5,pool={b},policy=fifo",
    "h2o:{b}+oracle:0.5+host",
)
LENGTHS = st.lists(st.integers(1, 45), min_size=2, max_size=4, unique=True)


@pytest.mark.parametrize("spec", COMPANY)
@settings(max_examples=4)
@given(LENGTHS, st.sampled_from(["1", "2", "3", "0.05", "0.3", "0.8", "20"]))
def test_results_do_not_depend_on_who_shares_the_batch(spec: str, lengths: list[int], budget: str) -> None:
    """The same logits (within rounding), positions and tokens alone and in a ragged batch, at tiny budgets too."""
    lm, ids, chosen = lm_of("llama"), prompts(*lengths), spec.format(b=budget)
    together = lm.new_cache(chosen)
    logits = [lm.prefill(together, ids, reserve=4)]
    for _ in range(9):
        logits.append(lm.step(together, logits[-1].argmax(-1)))
    row = len(ids) - 1
    alone = lm.new_cache(chosen)
    own = lm.prefill(alone, ids[row:], reserve=4)
    for step, all_rows in enumerate(logits):
        torch.testing.assert_close(
            own[0], all_rows[row], atol=1e-3, rtol=1e-3, msg=lambda m, at=step: f"{chosen}, step {at}: {m}"
        )
        if step < 9:
            own = lm.step(alone, all_rows[row : row + 1].argmax(-1))
    for one, other in zip(alone.layers, together.layers):
        assert torch.equal(one.kept_positions()[0], other.kept_positions()[row]), chosen


def test_random_eviction_is_random_and_the_seed_decides() -> None:
    lm, ids = lm_of("llama"), prompts(40)
    kept = {}
    for seed in (0, 1):
        cache = lm.new_cache(f"random:0.3,seed={seed}")
        lm.prefill(cache, ids, reserve=4)
        kept[seed] = [layer.kept_positions()[0] for layer in cache.layers]
    assert not torch.equal(kept[0][0], kept[1][0])
    assert not torch.equal(kept[0][0][0], kept[0][0][1]), "heads draw for themselves"
    assert tokens(lm, ids, "random:0.3,seed=1") == tokens(lm, ids, "random:0.3,seed=1")


# ------------------------------------------------------------------------ budgets


@given(st.one_of(st.floats(0.001, 1.0), st.integers(2, 500).map(float), st.just(-1.0)), st.integers(1, 10_000))
def test_budgets_resolve_alike_for_numbers_and_tensors(budget: float, length: int) -> None:
    one = resolve(budget, length)
    assert int(resolve_all(budget, torch.tensor([length]))) == min(length, one if one is not None else length)
    if one is not None:
        assert one >= 1
        if 0 < budget < 1:
            assert math.floor(budget * length) <= max(one, 1) <= max(1, math.floor(budget * length + 1e-6))


@given(BUDGETS, st.integers(1, 500), st.integers(0, 600))
def test_windows_and_sinks_are_scaled_down_to_fit(budget: str, length: int, sinks: int) -> None:
    """No budget is too small for what a method wants: its parts shrink, and the newest token always has a place."""
    for spec in (
        f"streaming:{budget},sinks={sinks}",
        f"h2o:{budget},sinks={sinks}",
        f"random:{budget},sinks={sinks}",
        f"h2o:{budget},sinks={sinks},variant=flexgen",
    ):
        plan = parse(spec).keep.plan(length)
        assert plan["capacity"] == resolve(parse(spec).keep.budget, length)
        assert 0 <= plan.get("sinks", 0) < plan["capacity"]
        assert plan.get("sinks", 0) + plan.get("recent", 0) <= plan["capacity"]


# ----------------------------------------------------------------------- sampling


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_draws_depend_on_seed_and_place_only(batch: int, steps: int, seed: int) -> None:
    sampling, device = Sampling(1.0, 1.0, seed), torch.device("cpu")
    draws, more = sampling.draws(batch, steps, device), sampling.draws(batch + 2, steps, device)
    assert draws is not None and more is not None
    assert torch.equal(draws, more[:batch])
    assert not torch.equal(more[0], more[1])
    assert Sampling(0.0).draws(batch, steps, device) is None


@given(st.floats(0.05, 1.0), st.floats(0.1, 3.0), st.integers(0, 999))
def test_a_sampled_token_is_in_the_smallest_set_that_reaches_top_p(top_p: float, temperature: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 40, generator=generator) * 3
    chosen = Sampling(temperature, top_p).choose(logits, torch.rand(5, generator=generator))
    p = (logits / temperature).softmax(-1)
    for row in range(5):
        better = p[row][p[row] > p[row, chosen[row]]].sum()
        assert float(better) < top_p + 1e-5


def test_samples_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(20_000, -1)
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(Sampling(1.0).choose(logits, draws), minlength=4) / 20_000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.015, rtol=0)
    cut = torch.bincount(Sampling(1.0, 0.75).choose(logits, draws), minlength=4) / 20_000
    torch.testing.assert_close(cut, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.015, rtol=0)
