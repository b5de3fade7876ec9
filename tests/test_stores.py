"""Stores: growth, forks that part, shared blocks, freed rows, closed holes, counted transfers."""

from __future__ import annotations

import pytest
import torch
from specs import ALL, lm_of, prompts, tokens
from tiny import HEAD_DIM, KV_HEADS, LAYERS

from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM

SPECS = (
    "full",
    "paged",
    "paged:block=4",
    "host",
    "streaming:0.3",
    "h2o:0.3",
    "random:9",
    "oracle:0.2",
    "infinigen:0.3",
    "infinigen:0.3,pool=0.5",
    "oracle:0.3+paged",
    "h2o:0.3+host",
    "disk",
    "h2o:0.3+disk",
    "infinigen:0.3+disk",
    "virtual",
    "snapkv:0.3+virtual",
    "scissorhands:0.3",
    "alisa:0.3",
    "quest:0.3,page=4",
    "pqcache:0.3",
    "recall:0.3,page=4,pages=2",
    "infllm:0.4,block=4",
    "squeezed:quantile=0.8,clusters=0.3,recent=10",
    "flexgen:device=30,host=40,disk=30",
    "int8",
    "int4",
    "kvquant",
)
TINY = (
    "streaming:1",
    "streaming:2",
    "h2o:1",
    "h2o:1,variant=flexgen",
    "h2o:3,sinks=2,variant=flexgen",
    "random:2",
    "infinigen:0.3,pool=1",
    "infinigen:0.3,pool=2,policy=lru",
)
TOKEN = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4  # bytes of one token's keys and values


def started(lm: LM, spec: str, ids: list[list[int]], reserve: int = 20) -> tuple[KVCache, torch.Tensor]:
    cache = lm.new_cache(spec)
    return cache, lm.prefill(cache, ids, reserve).argmax(-1)


def steps(lm: LM, cache: KVCache, first: torch.Tensor, n: int) -> list[list[int]]:
    """``n`` greedy tokens after ``first``, one list per sequence."""
    out, token = [], first
    for _ in range(n):
        token = lm.step(cache, token).argmax(-1)
        out.append(token)
    return torch.stack(out, 1).tolist()


def same(one: KVCache, other: KVCache) -> None:
    """Two caches keep the same positions everywhere."""
    for a, b in zip(one.layers, other.layers):
        assert a.seen.tolist() == b.seen.tolist()
        assert all(torch.equal(x, y) for x, y in zip(a.kept_positions(), b.kept_positions(), strict=True))


# ------------------------------------------------------------------------- growth


@pytest.mark.parametrize("spec", [*SPECS, "h2o:60", "streaming:60", "random:60", "infinigen:0.3,pool=60", "infinigen"])
@pytest.mark.parametrize("lengths", [(40,), (40, 23)])
def test_growing_past_what_was_reserved_changes_nothing(spec: str, lengths: tuple[int, ...]) -> None:
    """Room for one token, then many: the same tokens as with room for all, also where a budget is reached late."""
    lm, ids = lm_of("llama"), prompts(*lengths)
    small, first = started(lm, spec, ids, reserve=1)
    large, _ = started(lm, spec, ids, reserve=30)
    assert steps(lm, small, first, 24) == steps(lm, large, first, 24)
    same(small, large)


@pytest.mark.parametrize("spec", ["h2o:60", "streaming:60", "random:60", "infinigen:0.3,pool=60"])
def test_a_bounded_store_never_grows_past_its_budget(spec: str) -> None:
    lm = lm_of("llama")
    cache, first = started(lm, spec, prompts(40, 23), reserve=1)
    steps(lm, cache, first, 50)
    for layer in cache.layers:
        assert layer.store.column("k").shape[2] == 61
        assert [kept.shape[1] for kept in layer.kept_positions()] == [60, 60]


def test_a_growing_store_grows_seldom_and_a_reserved_one_never() -> None:
    lm = lm_of("llama")
    cache, first = started(lm, "full", prompts(40), reserve=30)
    before = cache.bytes().total
    steps(lm, cache, first, 29)
    assert cache.bytes().total <= before, "all room was there"
    sizes = set()
    for _ in range(60):
        steps(lm, cache, first, 1)
        sizes.add(cache.bytes().device_payload + cache.bytes().device_padding)
    assert len(sizes) <= 2


# --------------------------------------------------------------------------- forks


@pytest.mark.parametrize("spec", SPECS)
def test_forks_part_and_do_not_touch_each_other(spec: str) -> None:
    """A sequence forked after some steps, its copies fed other tokens: each is as if it had run alone."""
    lm, ids = lm_of("llama"), prompts(40, 23)
    cache, first = started(lm, spec, ids)
    steps(lm, cache, first, 3)
    cache.select_rows([0, 1, 0, 0])
    assert cache.rows == 4
    fed = torch.tensor([7, 8, 9, 7])
    together = steps(lm, cache, fed, 8)
    assert together[0] == together[3] != together[2]
    for row, source in enumerate((0, 1, 0)):
        alone, _ = started(lm, spec, ids)
        steps(lm, alone, first, 3)
        alone.select_rows(torch.tensor([source]))
        assert steps(lm, alone, fed[row : row + 1], 8)[0] == together[row]


@pytest.mark.parametrize("spec", SPECS)
def test_a_fork_may_get_a_turn_of_its_own(spec: str) -> None:
    """One of two equal sequences reads on by itself: it is as if it were alone, and the other one does not notice."""
    lm, ids, turn = lm_of("llama"), prompts(41), prompts(11)[0]
    cache, first = started(lm, spec, ids)
    steps(lm, cache, first, 3)
    cache.select_rows([0, 0])
    got = lm.extend(cache, 1, turn)
    alone, _ = started(lm, spec, ids)
    steps(lm, alone, first, 3)
    torch.testing.assert_close(got, lm.extend(alone, 0, turn), atol=1e-3, rtol=1e-3)
    quiet, _ = started(lm, spec, ids)
    steps(lm, quiet, first, 3)
    both = steps(lm, cache, torch.tensor([7, 8]), 5)
    assert both == [steps(lm, quiet, torch.tensor([7]), 5)[0], steps(lm, alone, torch.tensor([8]), 5)[0]]


@pytest.mark.parametrize("spec", SPECS)
def test_reordering_twice_with_one_tensor_is_the_identity(spec: str) -> None:
    lm, swap = lm_of("llama"), torch.tensor([1, 0])
    cache, first = started(lm, spec, prompts(40, 23))
    other, _ = started(lm, spec, prompts(40, 23))
    cache.select_rows(swap)
    cache.select_rows(swap)
    assert steps(lm, cache, first, 6) == steps(lm, other, first, 6)
    same(cache, other)


@pytest.mark.parametrize("spec", SPECS)
def test_dropping_a_sequence_frees_it_and_leaves_the_others(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(40, 23, 31)
    cache, first = started(lm, spec, ids)
    whole, _ = started(lm, spec, ids)
    steps(lm, cache, first, 2)
    steps(lm, whole, first, 2)
    before = cache.bytes()
    cache.select_rows([1])
    after = cache.bytes()
    payload = (after.device_payload + after.host_payload) / (before.device_payload + before.host_payload)
    assert payload < 0.4 and cache.rows == 1
    if "paged" not in spec:
        assert after.total - cache_staging(cache) < 0.5 * (before.total - cache_staging(cache))
    assert steps(lm, cache, torch.tensor([5]), 6)[0] == steps(lm, whole, torch.tensor([5, 5, 5]), 6)[1]


def cache_staging(cache: KVCache) -> int:
    return cache.shared.device_bytes() if cache.shared is not None else 0


def test_freed_blocks_serve_again() -> None:
    """After sequences are dropped, what the others still need fits into their blocks: the pool does not grow."""
    lm = lm_of("llama")
    cache, first = started(lm, "paged:block=4", prompts(40, 41, 42), reserve=4)
    steps(lm, cache, first, 2)
    cache.select_rows([2])
    pool = cache.bytes().total
    steps(lm, cache, torch.tensor([5]), 60)
    assert cache.bytes().total == pool


# -------------------------------------------------------------------- shared blocks


def prefix_case(shared: int = 37) -> list[list[int]]:
    start = prompts(shared)[0]
    return [start + prompts(9)[0], start + prompts(14)[0], prompts(25)[0], start + prompts(9)[0]]


@pytest.mark.parametrize("block", [4, 16])
def test_an_equal_prefix_is_computed_and_stored_once(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids, computed = lm_of("llama"), prefix_case(), []
    plain = LM._forward_run

    def counted(self: LM, cache: KVCache, row: int, part: list[int], first: int, final: bool) -> torch.Tensor:
        computed.append(len(part))
        return plain(self, cache, row, part, first, final)

    want = tokens(lm, ids, "full")
    apart, _ = started(lm, f"paged:block={block},share=false", ids)
    monkeypatch.setattr(LM, "_forward_run", counted)
    cache, first = started(lm, f"paged:block={block}", ids)
    full = 37 // block * block
    assert computed == [46, 51 - full, 25, 46 - 45 // block * block]
    saved = full + 45 // block * block
    assert cache.bytes().device_payload == (46 + 51 + 25 + 46 - saved) * TOKEN
    assert apart.bytes().device_payload == (46 + 51 + 25 + 46) * TOKEN
    assert [[a, *b] for a, b in zip(first.tolist(), steps(lm, cache, first, 9))] == want


def test_shared_blocks_are_never_written() -> None:
    """Bytes of a fork are counted once; a fork's write copies the block it would change, and only that."""
    lm, block = lm_of("llama"), 16
    cache, _ = started(lm, f"paged:block={block}", prompts(40))
    once = cache.bytes().device_payload
    assert once == 40 * TOKEN
    cache.select_rows([0, 0, 0])
    assert cache.bytes().device_payload == once
    table = cache.shared
    assert table.refs[table.table[0, :3]].tolist() == [3, 3, 3]  # type: ignore[union-attr]
    frozen = [layer.store.column("k")[0, :, :40].clone() for layer in cache.layers]
    steps(lm, cache, torch.tensor([7, 8, 9]), 3)
    assert cache.bytes().device_payload == (32 + 3 * (8 + 3)) * TOKEN, "two full blocks shared, three last ones apart"
    assert table.refs[table.table[0, :2]].tolist() == [3, 3]  # type: ignore[union-attr]
    assert len({int(n) for n in table.table[:, 2]}) == 3  # type: ignore[union-attr]
    for layer, before in zip(cache.layers, frozen):
        for row in range(3):
            assert torch.equal(layer.store.column("k")[row, :, :40], before)


def test_references_come_to_nothing() -> None:
    """However sequences were forked, shared and dropped, every block is free or has as many references as users."""
    lm = lm_of("llama")
    cache, _ = started(lm, "paged:block=4", prefix_case(), reserve=4)
    table = cache.shared
    for rows, fed in (([0, 0, 1, 3], 4), ([3, 1], 2), ([1, 1, 0], 3), ([2], 1)):
        cache.select_rows(rows)
        steps(lm, cache, torch.arange(3, 3 + fed), 3)
        used = table.table[torch.arange(table.table.shape[1]).numpy() < table.owned[:, None]]  # type: ignore[union-attr]
        counts = torch.bincount(torch.from_numpy(used), minlength=table.used)  # type: ignore[union-attr]
        assert counts.tolist() == table.refs[: table.used].tolist()  # type: ignore[union-attr]
        assert sorted(table.free) == [n for n in range(table.used) if counts[n] == 0]  # type: ignore[union-attr]


# ----------------------------------------------------------------------------- tiers


@pytest.mark.parametrize("link", ["", ":link=100", ":link=100,overlap=false"])
def test_transfers_of_the_host_tier_are_counted(link: str) -> None:
    """Every step brings every layer's keys and values once, as one tile; only a link makes it wait for them."""
    lm = lm_of("llama")
    cache, first = started(lm, f"host{link}", prompts(40), reserve=10)
    assert cache.transfers().count == 0
    steps(lm, cache, first, 3)
    moved = cache.transfers()
    assert moved.count == 3 * LAYERS
    assert moved.bytes == (41 + 42 + 43) * TOKEN
    assert (moved.blocked > 0) == bool(link)
    assert (cache_staging(cache) > 0) == bool(link)
    assert cache.realised().read_bytes == 43 * TOKEN


@pytest.mark.parametrize("more", ["", ",link=100", ",link=100,overlap=false"])
def test_infinigen_moves_only_what_it_chose(more: str) -> None:
    """Layers 0 and 1 read all; the others fetch their selection (the newest token is put beside it)."""
    lm = lm_of("llama")
    cache, first = started(lm, f"infinigen:4,alpha=inf{more}", prompts(40), reserve=10)
    steps(lm, cache, first, 1)
    moved, slot = cache.transfers(), KV_HEADS * 2 * HEAD_DIM * 4
    assert moved.count == LAYERS
    assert moved.bytes == 2 * 41 * slot + 2 * 4 * slot
    for layer in cache.layers[2:]:
        assert layer.selection is not None and layer.selection.count.tolist() == [[5, 5]]
        assert 40 in layer.selection.index[0, 0].tolist(), "the newest token is always read"


def test_a_slow_link_takes_its_time() -> None:
    """120 KiB a step at 0.01 GB/s: at least 12 ms of waiting."""
    lm = lm_of("llama")
    cache, first = started(lm, "host:link=0.01,overlap=false", prompts(40), reserve=10)
    steps(lm, cache, first, 2)
    moved = cache.transfers()
    assert moved.blocked >= moved.bytes / 0.01e9 * 0.99


# ----------------------------------------------------------------------------- holes


@pytest.mark.parametrize("spec", [*(s for s in SPECS if "paged" not in s), *TINY])
def test_closing_holes_changes_no_token(spec: str) -> None:
    lm = lm_of("llama")
    left, first = started(lm, spec, prompts(40, 23))
    closed, _ = started(lm, spec, prompts(40, 23))
    out = []
    token = first
    for _ in range(8):
        for layer in closed.layers:
            layer.store.compact()
        token = lm.step(closed, token).argmax(-1)
        out.append(token)
    assert torch.stack(out, 1).tolist() == steps(lm, left, first, 8)
    same(left, closed)


def test_compaction_moves_every_column() -> None:
    """Payload and metadata of a moved slot stay together."""
    lm = lm_of("llama")
    cache, first = started(lm, "h2o:0.3", prompts(40, 23))
    steps(lm, cache, first, 5)
    store = cache.layers[1].store
    assert store.holes

    def contents() -> dict[int, tuple[float, ...]]:
        gone = store.next if store.holes else store.lengths
        slots = [s for s in range(int(store.lengths[0, 1])) if s != int(gone[0, 1])]
        names = ("k", "v", "score")
        return {
            int(store.column("pos")[0, 1, s]): tuple(float(store.column(n)[0, 1, s].sum()) for n in names)
            for s in slots
        }

    before = contents()
    store.compact()
    assert not store.holes and contents() == before and len(before) == 12


def test_every_strategy_is_in_some_store_test() -> None:
    assert {s.split(":")[0].split("+")[0] for s in SPECS} == {s.split(":")[0].split("+")[0] for s in ALL}
