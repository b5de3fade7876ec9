"""Product-quantised reading: k-means, codes, approximate scores, what is read, and for how many bytes."""

from __future__ import annotations

import sys

import pytest
import torch
from readers import DIM, GROUP, HEADS, check_forks_part, themed
from specs import lm_of, prompts, tokens
from test_matrix import RAGGED, ran, reachable
from test_stores import started, steps

import kvatlas
from kvatlas.errors import UserError
from kvatlas.strategy.budget import resolve
from kvatlas.strategy.read.kmeans import cluster, nearest
from kvatlas.strategy.read.pqcache import ProductQuantised, scores, tables
from kvatlas.strategy.spec import parse
from kvatlas.strategy.view import LayerFacts

SMALL = "pqcache:0.3,bits=3,sinks=2,block=8,cache=16"


# ------------------------------------------------------------------------- k-means


@pytest.mark.parametrize("cosine", [False, True])
def test_nearest_is_the_nearest(cosine: bool) -> None:
    x, c = torch.randn(2, 3, 5000, 8), torch.randn(2, 3, 20, 8)
    if cosine:
        want = torch.cosine_similarity(x.unsqueeze(-2), c.unsqueeze(-3), dim=-1).argmax(-1)
    else:
        want = torch.cdist(x, c).argmin(-1)
    assert torch.equal(nearest(x, c, cosine=cosine), want)


def test_kmeans_finds_groups_that_are_there() -> None:
    centres = torch.randn(2, 8, 6) * 20
    of = torch.arange(400) % 8
    x = centres[:, of] + torch.randn(2, 400, 6) * 0.1
    for problem, found, centre in zip(x, cluster(list(x), [8, 8], iterations=25, seed=0), centres):
        assert torch.cdist(centre, found).amin(1).max() < 0.5
        labels = nearest(problem, found)
        for i in range(8):
            torch.testing.assert_close(found[i], problem[labels == i].mean(0), atol=1e-3, rtol=1e-3)


def test_kmeans_does_not_depend_on_threads_or_company_and_leaves_torch_alone() -> None:
    x = torch.randn(5, 300, 4)
    torch.set_num_threads(1)
    alone = [cluster([problem], [16], iterations=10, seed=3)[0] for problem in x]
    torch.set_num_threads(2)
    together = cluster(list(x), [16] * 5, iterations=10, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(alone, together))
    assert torch.get_num_threads() == 2
    other = cluster([x[0]], [16], iterations=10, seed=4)[0]
    assert not torch.equal(alone[0], other)


@pytest.mark.parametrize("n", [1, 5, 8])
def test_fewer_vectors_than_centroids_are_their_own(n: int) -> None:
    x = torch.randn(n, 4)
    (found,) = cluster([x], [8], iterations=25, seed=0)
    assert found.shape == (8, 4)
    assert torch.equal(found[nearest(x, found)], x)


def test_kmeans_by_angle_gives_directions() -> None:
    x = torch.randn(200, 6) * torch.rand(200, 1) * 10
    (found,) = cluster([x], [5], iterations=25, seed=0, cosine=True)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(5))


def test_without_faiss_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r"needs faiss.*pip install faiss-cpu"):
        cluster([torch.randn(100, 4)], [8], iterations=5, seed=0)


# -------------------------------------------------------------------------- scores


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_scores_are_those_of_the_coded_keys(parts: int) -> None:
    rule = ProductQuantised(0.2, parts=parts, bits=4)
    k, q = torch.randn(2, HEADS, 50, DIM), torch.randn(2, HEADS, GROUP, DIM)
    centroids = torch.randn(2, HEADS, parts, 16, DIM // parts)
    codes = rule.codes(k, centroids)
    assert codes.shape == (2, HEADS, 50, parts) and codes.dtype == torch.uint8
    index = codes.long().transpose(2, 3).unsqueeze(-1).expand(-1, -1, -1, -1, DIM // parts)
    coded = centroids.gather(3, index).transpose(2, 3).flatten(-2)
    want = torch.matmul(q, coded.transpose(-1, -2)) * 0.5
    torch.testing.assert_close(scores(tables(q, centroids, 0.5), codes), want, atol=1e-5, rtol=1e-5)


def recalled(spec: str, n: int = 500, last: int = 12) -> float:
    """Of the keys that the exact scores would have chosen outside of sinks and window, the share that was read."""
    q, k, v = themed(n)
    rule = parse(spec).read
    assert isinstance(rule, ProductQuantised)
    result = kvatlas.replay(spec, q, k, v, n - last)
    shares = []
    for t, read in zip(range(n - last, n), result.read):
        total = resolve(rule.budget, t + 1)
        assert total is not None and isinstance(read, torch.Tensor) and read.shape == (HEADS, total)
        sinks = 8
        recent = int((total - sinks) * rule.recent)
        best = total - sinks - recent
        mass = torch.softmax(q[:, t].view(HEADS, GROUP, DIM) @ k[:, : t + 1].transpose(1, 2) * DIM**-0.5, -1).sum(1)
        for head in range(HEADS):
            mine = read[head]
            assert torch.equal(mine[:sinks], torch.arange(sinks))
            assert torch.equal(mine[-recent:], torch.arange(t + 1 - recent, t + 1))
            exact = mass[head, sinks : t + 1 - recent].topk(best).indices + sinks
            shares.append(torch.isin(exact, mine).float().mean())
    return float(torch.stack(shares).mean())


def test_the_best_keys_are_found() -> None:
    """Far above chance, and the better the finer the codes."""
    coarse, usual, fine = (recalled(f"pqcache:0.2,sinks=8,{more}") for more in ("bits=2", "bits=6", "bits=6,parts=8"))
    chance = 0.1
    assert coarse > 2 * chance and usual > 5 * chance and fine > 0.8
    assert coarse < usual < fine


def test_more_attention_is_covered_than_by_lot() -> None:
    q, k, v = themed(400)
    ours, lot = (kvatlas.replay(s, q, k, v, 380, diagnose=True).covered for s in ("pqcache:0.2", "random:0.2"))
    assert ours is not None and lot is not None
    assert ours.mean() > lot.mean() + 0.2


def test_later_tokens_get_codes_by_the_old_centroids() -> None:
    lm = lm_of("llama")
    cache, first = started(lm, SMALL, prompts(40, 23))
    before = [layer.state["centroids"].clone() for layer in cache.layers]
    steps(lm, cache, first, 5)
    lm.extend(cache, 0, prompts(9)[0])
    for layer, centroids in zip(cache.layers, before):
        assert torch.equal(layer.state["centroids"], centroids)
        keys, codes = layer.store.keys(), layer.store.column("codes")
        assert torch.equal(codes[0], layer.read.codes(keys, centroids)[0])
        n = int(layer.store.lengths[1, 0])
        assert torch.equal(codes[1, :, :n], layer.read.codes(keys, centroids)[1, :, :n])


@pytest.mark.parametrize(("sinks", "left_out"), [(4, 4), (30, 0)])
def test_sinks_have_no_part_in_the_centroids(sinks: int, left_out: int) -> None:
    """Unless the prompt is hardly longer than they are."""
    cache, _ = started(lm_of("llama"), f"pqcache:0.4,bits=3,sinks={sinks}", prompts(40))
    for layer in cache.layers:
        keys = layer.store.keys()[0, :, left_out:].unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1)
        want = torch.stack(cluster(list(keys), [8] * len(keys), iterations=25, seed=0))
        assert torch.equal(layer.state["centroids"][0].flatten(0, 1), want)


# ---------------------------------------------------------------------- in a model


@pytest.mark.parametrize(
    "spec", ["pqcache", "pqcache:1.0,bits=4", "pqcache:1000,bits=3", "pqcache:60,block=8,cache=16"]
)
def test_reading_all_gives_the_tokens_of_full(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    assert tokens(lm, ids, spec) == tokens(lm, ids, "full")


def test_without_a_budget_nothing_is_clustered() -> None:
    cache, _ = ran(lm_of("llama"), "pqcache", prompts(40), 2)
    assert all(not layer.state and layer.selection is None for layer in cache.layers)


@pytest.mark.parametrize("lengths", [(1,), (2, 40), (9,), (63, 64, 65)])
@pytest.mark.parametrize(
    "spec", ["pqcache:0.4", "pqcache:1", "pqcache:3,recent=1", "pqcache:0.3,recent=0,sinks=0", "pqcache:0.3,sinks=40"]
)
def test_short_prompts(lengths: tuple[int, ...], spec: str) -> None:
    """Also with fewer tokens than centroids."""
    _, logits = ran(lm_of("llama"), spec, prompts(*lengths), 5)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("spec", [SMALL, "pqcache:9,bits=2", "pqcache:0.3,gqa=max,parts=4,bits=2,policy=lru"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "opt"])
def test_the_budget_is_met_and_company_changes_nothing(arch: str, spec: str) -> None:
    lm, ids = lm_of(arch), prompts(*RAGGED)
    cache, together = ran(lm, spec, ids, 6)
    for layer in cache.layers:
        if layer.read.selects:
            assert layer.selection is not None
            want = [resolve(layer.read.budget, n + 6) for n in RAGGED]
            assert layer.selection.count.tolist() == [[n] * layer.facts.kv_heads for n in want]
    for row, one in enumerate(ids):
        torch.testing.assert_close(ran(lm, spec, [one], 6)[1][0], together[row], atol=1e-4, rtol=1e-4)


def test_other_heads_read_other_tokens() -> None:
    cache, _ = ran(lm_of("llama"), SMALL, prompts(40))
    picked = [layer.selection.index.sort(-1).values for layer in cache.layers]  # type: ignore[union-attr]
    assert any(not torch.equal(index[0, 0], index[0, 1]) for index in picked)


@pytest.mark.parametrize("mode", ["chunked:7", "eager"])
def test_chunks_change_nothing(mode: str) -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    whole, parts = (ran(lm, spec, ids, 4)[1] for spec in (SMALL, f"{SMALL},prefill={mode}"))
    torch.testing.assert_close(parts, whole, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("keep", ["h2o:0.5", "streaming:0.6,positions=true", "random:0.5"])
def test_it_reads_of_what_is_kept(keep: str) -> None:
    """Codes move with their slots when tokens are evicted."""
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    spec = f"{keep}+{SMALL}"
    cache, together = ran(lm, spec, ids, 12)
    for layer in cache.layers:
        layer.store.compact()
        keys, codes = layer.store.keys(), layer.store.column("codes")
        want = layer.read.codes(keys, layer.state["centroids"])
        for row in range(3):
            n = int(layer.store.lengths[row, 0])
            assert torch.equal(codes[row, :, :n], want[row, :, :n])
    alone = ran(lm, spec, ids[1:2], 12)[1]
    torch.testing.assert_close(alone[0], together[1], atol=1e-4, rtol=1e-4)
    everything = f"{keep}+pqcache:1000,bits=2"
    assert tokens(lm, ids, everything) == tokens(lm, ids, keep)


def test_forks_part() -> None:
    check_forks_part(SMALL)


@pytest.mark.parametrize("spec", ["pqcache", SMALL, "pqcache:0.2", "pqcache:0.3,parts=1,bits=8,cache=8,block=3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(spec: str, dtype: torch.dtype) -> None:
    cache, _ = ran(lm_of("llama", dtype), spec, prompts(*RAGGED), 4)
    assert cache.bytes().total == reachable(cache) == cache.bytes_held(RAGGED, 5)
    read = parse(spec).read
    facts = LayerFacts(0, 1, 4, 2, 16, dtype, torch.device("cpu"), 0.25)
    state = 0 if spec == "pqcache" else 2 * 16 * 2**read.bits * dtype.itemsize + 1  # type: ignore[attr-defined]
    assert read.state_bytes(facts, 100) == state == sum(t.nbytes for t in read.begin(facts, 100).values())


# -------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pqcache:0.2,bits=0", "bits must be 1 to 8"),
        ("pqcache:0.2,bits=9", "bits must be 1 to 8"),
        ("pqcache:0.2,parts=0", "parts must be at least 1"),
        ("pqcache:0.2,recent=1.5", "recent must be a share"),
        ("pqcache:0.2,sinks=-1", "sinks must be 0 or more"),
        ("pqcache:30,sinks=40", "sinks=40 leaves nothing else of a budget of 30 tokens"),
        ("pqcache:0.2,iterations=0", "iterations must be at least 1"),
        ("pqcache:0.2,seed=-1", "seed must be 0 or more"),
        ("pqcache:0.2,gqa=most", "mean or max or sum"),
        ("pqcache:0.2,block=0", "block must be at least 1"),
        ("pqcache:0.2,cache=100", "at least one block of 128"),
        ("pqcache:0.2,topk=0", "topk must be at least 1"),
        ("pqcache:0.2,policy=fifo", "lfu or lru"),
        ("pqcache:0.2,link=0", "above 0 GB/s"),
    ],
)
def test_bad_parameters_get_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(spec)
    assert "\n" not in str(error.value)


def test_parts_must_divide_the_head() -> None:
    with pytest.raises(UserError, match="parts=3 must divide head_dim, here 16"):
        lm_of("llama").new_cache("pqcache:0.2,parts=3")
