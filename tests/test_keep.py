"""Keep rules against slow, plain versions of themselves: what they count and whom they keep."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from specs import lm_of, prompts
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvatlas.engine.replay import replay
from kvatlas.errors import UserError
from kvatlas.strategy.budget import divide_budget
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import LayerShares

HEADS, GROUP, DIM = 2, 3, 16


def recorded(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS * GROUP, n, DIM, generator=g) * 2
    return q, torch.randn(HEADS, n, DIM, generator=g), torch.randn(HEADS, n, DIM, generator=g)


def weights_at(q: Tensor, k: Tensor, t: int, kept: list[int], head: int) -> Tensor:
    """``[G, n]`` softmax weights of the queries at position t of one KV head over the kept keys."""
    mine = q[head * GROUP : (head + 1) * GROUP, t].double()
    return torch.softmax(mine @ k[head, kept].double().T * DIM**-0.5, -1)


# ------------------------------------------------------------------------ snapkv


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("gqa", ["mean", "max", "sum"])
@pytest.mark.parametrize("prefill", ["flash", "eager", "chunked:9", "chunked:50"])
def test_snapkv_votes_once(pool: str, gqa: str, prefill: str) -> None:
    """The vote of the prompt's last window, however the prompt came; what is generated stays."""
    n, window, capacity, kernel = 80, 12, 30, 3
    q, k, v = recorded(n + 6)
    spec = f"snapkv:window={window},capacity={capacity},kernel={kernel},pool={pool},gqa={gqa},prefill={prefill}"
    result = replay(spec, q, k, v, n)
    for head in range(HEADS):
        votes = torch.zeros(GROUP, n, dtype=torch.float64)
        for t in range(n - window, n):
            votes[:, : t + 1] += weights_at(q, k, t, list(range(t + 1)), head)
        smooth = {"avg": avg_pool1d, "max": max_pool1d}[pool]
        pooled = smooth(votes[:, :-window], kernel, stride=1, padding=kernel // 2)
        rank = {"mean": pooled.mean(0), "max": pooled.amax(0), "sum": pooled.sum(0)}[gqa]
        best = rank.topk(capacity - window)
        want = {*best.indices.tolist(), *range(n - window, n)}
        got = set(result.kept[0][head].tolist())
        ties = rank[sorted(got - set(range(n - window, n)))].min() >= best.values[-1] - 1e-6  # max-pooling makes some
        assert got == want or (pool == "max" and ties and len(got) == capacity)
        assert set(result.kept[-1][head].tolist()) == got | set(range(n, n + 6))


def test_snapkv_keeps_later_turns_whole() -> None:
    lm, ids = lm_of("llama"), prompts(40)
    cache = lm.new_cache("snapkv:0.3")
    lm.prefill(cache, ids, reserve=4)
    lm.extend(cache, 0, prompts(9)[0])
    kept = cache.layers[1].kept_positions()[0]
    assert kept.shape[1] == 12 + 9 and kept[0, -9:].tolist() == list(range(40, 49))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("snapkv:0.3,capacity=20", "either a budget or capacity"),
        ("snapkv:capacity=16,window=32", "window of 32"),
        ("snapkv:24,window=32", "window of 32"),
        ("snapkv:0.3,kernel=4", "odd"),
        ("snapkv:0.3,window=0", "at least 1"),
        ("snapkv:0.3,pool=median", "avg or max"),
        ("scissorhands:0.3,history=0", "at least 1"),
        ("scissorhands:8,recent=10", "does not fit"),
        ("alisa:0.3,window=2", "share of the budget"),
        ("alisa:0.3,history=0", "at least 1"),
        ("full:layers=pyramid", "nothing is evicted"),
        ("h2o:0.3,layers=steep", "layers=pyramid"),
        ("h2o:0.3,layers=1/0", "above 0"),
        ("recall:0.3,pages=0", "at least 1"),
        ("recall:0.3,page=0", "at least 1"),
        ("recall:0.3+quest:0.5", "both answer 'read'"),
    ],
)
def test_bad_parameters_are_one_clear_line(spec: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["snapkv:0.1,window=32", "scissorhands:0.1,recent=20"])
def test_windows_of_the_user_above_his_budget_are_errors_of_that_prompt(spec: str) -> None:
    """A share of a prompt is known with the prompt; then the user's own window is not shrunk in silence."""
    lm = lm_of("llama")
    with pytest.raises(UserError, match="does not fit"):
        lm.prefill(lm.new_cache(spec), prompts(60), reserve=2)


# ------------------------------------------------------------------ scissorhands


@pytest.mark.parametrize("history", [5, 8, 20, 400])
@pytest.mark.parametrize(("gqa", "prefill"), [("mean", "flash"), ("max", "eager"), ("sum", "chunked:7")])
def test_scissorhands_counts_the_latest_hits(history: int, gqa: str, prefill: str) -> None:
    """Query by query: a hit is a weight above 1 / keys seen; only the last ``history`` queries count."""
    n, steps, capacity, recent = 50, 25, 16, 4
    q, k, v = recorded(n + steps)
    spec = f"scissorhands:{capacity},history={history},recent={recent},gqa={gqa},prefill={prefill}"
    result = replay(spec, q, k, v, n)
    fold = {"mean": lambda w: w.mean(0), "max": lambda w: w.amax(0), "sum": lambda w: w.sum(0)}[gqa]
    for head in range(HEADS):
        kept, hits = list(range(n)), {i: set() for i in range(n)}
        for t in range(n):
            folded = fold(weights_at(q, k, t, list(range(t + 1)), head))
            for i in range(t + 1):
                hits[i] |= {t} if folded[i] > 1 / (t + 1) else set()

        def worst(now: int) -> int:
            free = [i for i in kept if i <= now - recent]  # noqa: B023
            return min(free, key=lambda i: (sum(h > now - history for h in hits[i]), i))  # noqa: B023

        while len(kept) > capacity:
            kept.remove(worst(n - 1))
        assert result.kept[0][head].tolist() == sorted(kept)
        for t in range(n, n + steps):
            kept.append(t)
            hits[t] = set()
            folded = fold(weights_at(q, k, t, kept, head))
            for i, w in zip(kept, folded):
                hits[i] |= {t} if w > 1 / len(kept) else set()
            kept.remove(worst(t))
            assert result.kept[t - n + 1][head].tolist() == sorted(kept), t


# ------------------------------------------------------------------------- alisa


def test_alisa_sums_late_attention_only() -> None:
    n, steps, capacity, history = 40, 30, 14, 6
    q, k, v = recorded(n + steps)
    result = replay(f"alisa:{capacity},window=0.5,history={history}", q, k, v, n)
    recent = capacity // 2
    for head in range(HEADS):
        kept = list(range(n))
        prompt = torch.zeros(n, dtype=torch.float64)
        for t in range(n - history, n):
            prompt[: t + 1] += weights_at(q, k, t, list(range(t + 1)), head).mean(0)
        late = {i: {n - 1: float(prompt[i])} for i in range(n)}  # a prompt's queries count as one sum

        def evict(now: int) -> None:
            free = [i for i in kept if i <= now - recent]  # noqa: B023
            kept.remove(min(free, key=lambda i: sum(w for t, w in late[i].items() if t > now - history)))  # noqa: B023

        while len(kept) > capacity:
            evict(n - 1)
        for t in range(n, n + steps):
            kept.append(t)
            late[t] = {}
            for i, w in zip(kept, weights_at(q, k, t, kept, head).mean(0)):
                late[i][t] = float(w)
            evict(t)
        got, want = set(result.kept[-1][head].tolist()), set(kept)
        assert len(got & want) >= capacity - 1, "half precision may flip one near tie"


# --------------------------------------------------------------- budgets by layer


def test_a_pyramid_falls_and_keeps_its_total() -> None:
    shares = LayerShares().shares(30)
    assert shares[0] == pytest.approx(1.95) and shares[-1] == pytest.approx(0.05)
    assert all(a > b for a, b in pairwise(shares)) and sum(shares) == pytest.approx(30)


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.7, 0.95])
def test_what_a_layer_cannot_use_goes_to_the_others(budget: float) -> None:
    given = divide_budget(budget, LayerShares().shares(12))
    assert sum(given) == pytest.approx(budget * 12) and max(given) <= 1.0
    assert all(a >= b for a, b in pairwise(given))


def test_budgets_by_layer_in_tokens() -> None:
    assert divide_budget(100.0, [2.0, 1.0, 0.5, 0.5]) == [200.0, 100.0, 50.0, 50.0]
    assert divide_budget(-1.0, [1.5, 0.5]) == [2.0, -1.0]
    assert divide_budget(1.0, [2.0, 0.0]) == [1.0, 1.0]


@pytest.mark.parametrize("rule", ["h2o", "snapkv", "streaming", "random", "scissorhands", "alisa"])
def test_every_keep_rule_takes_budgets_by_layer(rule: str) -> None:
    lm, ids = lm_of("llama"), prompts(60)
    even, uneven = (lm.new_cache(f"{rule}:0.4{layers}") for layers in ("", ",layers=pyramid"))
    for cache in (even, uneven):
        lm.step(cache, lm.prefill(cache, ids, reserve=4).argmax(-1))
    assert uneven.bytes().total == uneven.bytes_held([60], 4)
    held = [layer.kept_positions()[0].shape[1] for layer in uneven.layers]
    assert held == sorted(held, reverse=True) and held[0] > held[-1]
    assert abs(sum(held) - sum(layer.kept_positions()[0].shape[1] for layer in even.layers)) <= len(held)


def test_weights_of_the_user_by_layer() -> None:
    lm = lm_of("llama")
    cache = lm.new_cache("h2o:0.2,layers=3/2/2/1")
    lm.prefill(cache, prompts(60), reserve=4)
    assert [layer.kept_positions()[0].shape[1] for layer in cache.layers] == [18, 12, 12, 6]
    with pytest.raises(UserError, match="3 weights, and the rule works in 4 layers"):
        lm.new_cache("h2o:0.2,layers=3/2/2")


def test_a_models_own_windows_take_no_share() -> None:
    cache = lm_of("gemma3").new_cache("h2o:0.4,layers=3/1")
    assert [layer.keep.budget for layer in cache.layers if not layer.facts.windowed] == pytest.approx([0.6, 0.2])
