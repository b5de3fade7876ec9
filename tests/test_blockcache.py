"""The device's blocks of a host store: the same attention, nothing stale, what is used stays, bytes exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specs import lm_of, prompts
from test_matrix import RAGGED, ran, reachable
from test_stores import started, steps
from tiny import HEAD_DIM, KV_HEADS, LAYERS

from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode, Layout
from kvatlas.strategy.place.blockcache import BlockCache, CachedStore, CachedTransfers, CountingLink
from kvatlas.strategy.place.device import SlotStore
from kvatlas.strategy.place.resident import AGE, Resident
from kvatlas.strategy.spec import parse
from kvatlas.strategy.view import Column, Selection

ROWS, HEADS, DIM = 3, 2, 4
SLOT = 2 * DIM * 4
CACHES = (
    "block=8,cache=16",
    "block=8,cache=24,topk=1",
    "block=3,cache=9,policy=lru",
    "block=1,cache=5",
    "block=64,cache=64",
)


def layout_of(capacity: int, rows: int = ROWS) -> Layout:
    columns = (*Encode().columns(DIM, torch.float32), Column("mark", (), torch.int32))
    return Layout(
        columns, Encode(), rows, HEADS, DIM, torch.float32, capacity, torch.device("cpu"), limit=lambda length: length
    )


def store_of(place: BlockCache, capacity: int = 40, rows: int = ROWS) -> CachedStore:
    store = place.store(layout_of(capacity, rows), place.shared(1))
    assert isinstance(store, CachedStore)
    return store


def picked(*rows: list[list[int]]) -> Selection:
    """A selection, one list of slots per sequence and KV head."""
    count = torch.tensor([[len(slots) for slots in heads] for heads in rows])
    width = max(1, int(count.max()))
    index = torch.zeros(len(rows), len(rows[0]), width, dtype=torch.int64)
    for b, heads in enumerate(rows):
        for h, slots in enumerate(heads):
            index[b, h, : len(slots)] = torch.tensor(slots, dtype=torch.int64)
    return Selection(index, count)


def token(*shape: int) -> dict[str, torch.Tensor]:
    mark = torch.randint(0, 99, shape, dtype=torch.int32)
    return {"k": torch.randn(*shape, DIM), "v": torch.randn(*shape, DIM), "mark": mark}


# ----------------------------------------------------------------------------- equal


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "reader", ["oracle:0.3", "oracle:5", "quest:0.3,page=4", "h2o:0.6+oracle:0.4", "oracle:0.5+h2o:9"]
)
def test_attention_is_that_of_the_host(reader: str, cache: str) -> None:
    """Ragged prompts, room for one token only, many steps."""
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    want, first = started(lm, f"{reader}+host", ids, reserve=1)
    got, _ = started(lm, f"{reader}+blockcache:{cache}", ids, reserve=1)
    token = first
    for _ in range(40):
        one, other = lm.step(want, token), lm.step(got, token)
        assert torch.equal(one, other)
        token = one.argmax(-1)
    moved = got.transfers()
    assert isinstance(moved, CachedTransfers) and moved.hits > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_what_was_foreseen_comes_through_the_cache_too(overlap: bool) -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    plain = parse("infinigen:0.3")
    cached = replace(plain, place=BlockCache(overlap=overlap, cache=16, block=4))
    caches = [lm.new_cache(strategy) for strategy in (plain, cached)]
    logits = [lm.prefill(cache, ids, reserve=30) for cache in caches]
    for _ in range(20):
        token = logits[0].argmax(-1)
        logits = [lm.step(cache, token) for cache in caches]
        torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    moved = caches[1].transfers()
    assert isinstance(moved, CachedTransfers) and moved.hits > 0


def test_forks_and_later_turns() -> None:
    lm, ids, turn = lm_of("llama"), prompts(40, 23), prompts(11)[0]
    logits = []
    for place in ("host", "blockcache:block=4,cache=12"):
        cache, first = started(lm, f"oracle:0.3+{place}", ids)
        steps(lm, cache, first, 5)
        cache.select_rows([1, 0, 0])
        steps(lm, cache, torch.tensor([7, 8, 9]), 6)
        after = [lm.extend(cache, 1, turn)]
        token = torch.tensor([3, 4, 5])
        for _ in range(6):
            after.append(lm.step(cache, token))
            token = after[-1].argmax(-1)
        logits.append(torch.cat(after))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("most", [None, 12])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_stale_is_served(policy: str, most: int | None, seed: int) -> None:
    """Whatever is done to the slots, what is read is what a plain store holds."""
    torch.manual_seed(seed)
    place = BlockCache(cache=12, block=4, policy=policy, topk=2)  # type: ignore[arg-type]
    ours, plain = store_of(place, 10), SlotStore(layout_of(10))
    stores = (ours, plain)
    for store in stores:
        store.most = most
    for row in range(ROWS):
        values = token(HEADS, 8 - row)
        for store in stores:
            store.extend(row, values)
    for _ in range(150):
        what, batch = int(torch.randint(0, 9, ())), len(plain.lengths)
        if what < 3:
            values = token(batch, HEADS)
            for store in stores:
                store.append(values)
            if most is not None:
                victims = torch.where(plain.lengths == most, (torch.rand(batch, HEADS) * most).long(), -1)
                for store in stores:
                    store.drop(victims)
        elif what == 3:
            order = torch.rand(batch, HEADS, plain.filled).argsort(-1)[..., :5]
            slots = torch.where(order < plain.lengths.unsqueeze(-1), order, -1)
            values = torch.randn(*slots.shape, DIM)
            for store in stores:
                store.write("k", slots, values)
        elif what == 4:
            rows = torch.randint(0, batch, (ROWS,))
            for store in stores:
                store.compact()
                store.select_rows(rows)
        elif what == 5 and most is None:
            values = token(HEADS, 3)
            for store in stores:
                store.extend(0, values)
        else:
            count = (torch.rand(batch, HEADS) * plain.lengths).long() + 1
            index = torch.rand(batch, HEADS, plain.filled)
            index = index.masked_fill(torch.arange(plain.filled) >= plain.lengths.unsqueeze(-1), 2).argsort(-1)
            chosen = Selection(index[..., : int(count.max())], count)
            (tile,) = list(ours.tiles(chosen))
            for name, got in (("k", tile.k), ("v", tile.v)):
                want = plain.take(name, chosen.index)
                valid = torch.arange(got.shape[2]) < count.unsqueeze(-1)
                assert torch.equal(got[valid], want[valid])
    assert ours.link.hits > 50 and (most is None or plain.capacity <= most)


# ---------------------------------------------------------------------------- policy


def blocks_of(resident: Resident, row: int = 0, head: int = 0) -> set[int]:
    return {int(b) for b in resident.table[row, head] if b >= 0}


def seen(resident: Resident, *hits: dict[int, int]) -> None:
    """Steps of one head that select so many slots of each block."""
    for step in hits:
        resident.admit(picked([[b * resident.block + i for b, n in step.items() for i in range(n)]]))


def one_head(cache: int, policy: str, topk: int = 9, block: int = 4) -> Resident:
    layout = replace(layout_of(100, 1), kv_heads=1)
    return Resident(layout, 100, cache, block, policy, topk)  # type: ignore[arg-type]


def test_the_blocks_with_most_slots_enter_first() -> None:
    resident = one_head(8, "lfu")
    seen(resident, {0: 1, 3: 4, 7: 3, 9: 2})
    assert blocks_of(resident) == {3, 7}


def test_only_topk_blocks_are_considered() -> None:
    resident = one_head(16, "lfu", topk=2)
    seen(resident, {0: 1, 3: 4, 7: 3, 9: 2})
    assert blocks_of(resident) == {3, 7}


def test_the_least_frequently_used_leave() -> None:
    resident = one_head(8, "lfu")
    seen(resident, {0: 1, 1: 1}, {0: 1}, {0: 1})
    assert blocks_of(resident) == {0, 1}
    seen(resident, {2: 4})
    assert blocks_of(resident) == {0, 1}, "used once, as block 1 was: it stays"
    seen(resident, {2: 1})
    assert blocks_of(resident) == {0, 2}


def test_the_least_recently_used_leave() -> None:
    resident = one_head(8, "lru")
    seen(resident, {0: 1, 1: 1}, {0: 1}, {0: 1}, {1: 1}, {2: 1})
    assert blocks_of(resident) == {1, 2}
    seen(resident, {3: 1, 4: 2, 5: 3})
    assert blocks_of(resident) == {4, 5}


def test_old_fame_fades() -> None:
    resident = one_head(4, "lfu")
    seen(resident, *([{0: 1}] * 2 * AGE))
    news = 0
    while blocks_of(resident) == {0}:
        seen(resident, {1: 1})
        news += 1
    assert news <= AGE


def test_a_resident_block_stays_in_its_place() -> None:
    resident = one_head(12, "lru")
    seen(resident, {0: 1, 1: 2, 2: 3})
    before = resident.place.clone()
    seen(resident, {2: 1}, {0: 1}, {7: 1})
    assert torch.equal(resident.place[..., [0, 2]], before[..., [0, 2]])
    assert int(resident.place[..., 7]) == int(before[..., 1]) and int(resident.place[..., 1]) == -1


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_table_and_places_agree_and_company_changes_nothing(policy: str) -> None:
    layout = layout_of(50)
    many = Resident(layout, 50, 20, 5, policy, 3)  # type: ignore[arg-type]
    alone = [Resident(replace(layout, rows=1), 50, 20, 5, policy, 3) for _ in range(ROWS)]  # type: ignore[arg-type]
    for step in range(150):
        count = torch.randint(0, 20, (ROWS, HEADS))
        index = torch.stack([torch.randperm(50)[:20] for _ in range(ROWS * HEADS)]).view(ROWS, HEADS, 20)
        entered = many.admit(Selection(index, count))
        single = [one.admit(Selection(index[r : r + 1], count[r : r + 1])) for r, one in enumerate(alone)]
        assert len(entered[0]) == sum(len(e[0]) for e in single)
        for r, one in enumerate(alone):
            assert torch.equal(one.table[0], many.table[r]) and torch.equal(one.place[0], many.place[r])
        for b in range(ROWS):
            for h in range(HEADS):
                held = {int(n): p for p, n in enumerate(many.table[b, h].tolist()) if n >= 0}
                assert {n: p for n, p in enumerate(many.place[b, h].tolist()) if p >= 0} == held
        assert all(many.table[b, h, p] == n for b, h, n, p in zip(*(t.tolist() for t in entered))), step


# ------------------------------------------------------------------------- transfers


def test_only_what_is_not_there_is_moved() -> None:
    store = store_of(BlockCache(cache=8, block=4), rows=1)
    store.extend(0, token(HEADS, 20))
    link = store.link
    chosen = picked([[0, 1, 2, 9], [17]])

    list(store.tiles(chosen))
    assert (link.hits, link.misses) == (0, 5)
    store._entered()
    assert link.transfers().bytes == (5 + 3 * 4) * SLOT, "five slots, then three blocks"
    list(store.tiles(chosen))
    assert (link.hits, link.misses) == (5, 5)
    store._entered()
    assert link.transfers().bytes == (5 + 3 * 4) * SLOT
    list(store.tiles(picked([[0, 5], [16, 18]])))
    assert (link.hits, link.misses) == (8, 6), "block 0 of one head, block 4 of the other"
    assert link.transfers().bytes == (5 + 3 * 4 + 1) * SLOT


def test_a_new_token_is_there_at_once() -> None:
    """It is written to the block that it is in, when that is on the device."""
    store = store_of(BlockCache(cache=8, block=4), rows=1)
    store.extend(0, token(HEADS, 5))
    list(store.tiles(picked([[4], [4]])))
    store.append(token(1, HEADS))
    hits = store.link.hits
    list(store.tiles(picked([[5], [5]])))
    assert store.link.hits == hits + 2


def test_the_hit_rate_of_a_real_reader() -> None:
    """With room for everything, every slot moves but once or twice."""
    lm = lm_of("llama")
    cache, first = started(lm, "oracle:0.3+blockcache:block=4,cache=256", prompts(*RAGGED), reserve=40)
    steps(lm, cache, first, 30)
    moved, everything = cache.transfers(), sum(RAGGED) + 3 * 30
    assert isinstance(moved, CachedTransfers)
    assert moved.hits > 4 * moved.misses
    assert moved.bytes < 2 * everything * LAYERS * KV_HEADS * 2 * HEAD_DIM * 4


# ----------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("cache", ["block=8,cache=16", "block=7,cache=30,policy=lru", "block=128,cache=4096"])
@pytest.mark.parametrize("reader", ["oracle:0.3", "h2o:0.5+oracle:0.3", "quest:0.3,page=4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_the_closed_form_and_the_storage(reader: str, cache: str, dtype: torch.dtype) -> None:
    lm = lm_of("llama", dtype)
    held = ran(lm, f"{reader}+blockcache:{cache}", prompts(*RAGGED), 4)[0]
    assert held.bytes().total == reachable(held) == held.bytes_held(RAGGED, 5)
    plain = ran(lm, f"{reader}+host:link=1000", prompts(*RAGGED), 4)[0]
    place, slot = parse(f"oracle:0.3+blockcache:{cache}").place, 2 * HEAD_DIM * dtype.itemsize
    assert isinstance(place, BlockCache)
    extra = 0
    for layer in held.layers:
        if layer.read.selects:
            blocks = -(-layer.store.capacity // place.block)  # type: ignore[attr-defined]
            places = min(place.cache // place.block, blocks)
            extra += 3 * KV_HEADS * (places * (place.block * slot + 8) + 16 * blocks)
    assert held.bytes().device - plain.bytes().device <= extra
    assert held.bytes().host == plain.bytes().host and held.bytes().device_payload == 0


def test_where_everything_is_read_there_are_no_blocks() -> None:
    cache, _ = ran(lm_of("llama"), "blockcache", prompts(*RAGGED), 4)
    plain, _ = ran(lm_of("llama"), "host", prompts(*RAGGED), 4)
    assert cache.bytes() == plain.bytes()
    assert cache.transfers().bytes == plain.transfers().bytes > 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("blockcache:block=0", "block must be at least 1 token"),
        ("blockcache:cache=64", "cache must hold at least one block of 128 tokens, not 64"),
        ("blockcache:topk=0", "topk must be at least 1 block a step"),
        ("blockcache:policy=random", "lfu or lru"),
        ("blockcache:link=-1", "above 0 GB/s"),
        ("host+blockcache", "both answer 'place'"),
    ],
)
def test_bad_parameters_get_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(spec)
    assert "\n" not in str(error.value)


def test_a_link_that_counts_says_so() -> None:
    link = BlockCache(link=2.0).shared(4)
    assert isinstance(link, CountingLink) and link.speed == 2.0
    assert link.transfers() == CachedTransfers(0, 0, 0.0, 0, 0)
