"""An archive that is shared: results are those of one that is not, and what prompts have in common is held once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from specs import lm_of, prompts
from tiny import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, tiny_model

import kvatlas
from kvatlas.engine import saved
from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM
from kvatlas.engine.session import Session
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Read
from kvatlas.strategy.place.pool import Pool
from kvatlas.strategy.place.pooled import PooledStore
from kvatlas.strategy.spec import parse

PLAIN = "recall:0.3,page=4,pages=2"
SHARED = f"{PLAIN},share=true"
DOC = prompts(80)[0]  # five blocks of 16
ASKED = [DOC + prompts(n)[0] for n in (9, 21, 14)]
TOKEN = 2 * HEAD_DIM * 4  # bytes of a key and a value of one KV head


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_collector() -> Iterator[None]:
    """Memory goes with its last user: the garbage collector, which could hide that it does not, rests."""
    lm_of("llama").alive.clear()  # a test that failed may still hold a cache
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def shared_by(spec: str) -> str:
    """The same strategy with a shared archive."""
    head, plus, rest = spec.partition("+")
    return f"{head},share=true{plus}{rest}"


def ran(
    spec: Any, ids: list[list[int]], steps: int = 8, lm: LM | None = None, rows: list[int] | None = None
) -> tuple[KVCache, torch.Tensor]:
    """A cache after a prefill and some greedy steps (after ``rows`` were selected), and all logits."""
    lm = lm or lm_of("llama")
    cache = lm.new_cache(spec)
    logits = [lm.prefill(cache, ids, reserve=steps + 1)]
    if rows is not None:
        cache.select_rows(rows)
        logits = [logits[0][rows]]
    for _ in range(steps):
        logits.append(lm.step(cache, logits[-1].argmax(-1)))
    return cache, torch.stack(logits)


def archives(cache: KVCache) -> list[PooledStore]:
    stores = [layer.archive for layer in cache.layers]
    assert all(isinstance(store, PooledStore) for store in stores)
    return stores  # type: ignore[return-value]


def pools(cache: KVCache) -> list[Pool]:
    return [store.pool for store in archives(cache)]


def payload(*caches: KVCache) -> int:
    return sum(cache.bytes().host_payload for cache in caches)


def audit(*caches: KVCache) -> None:
    """Every pool counts right who names its slots, and the caches' bytes are all that there is, each once."""
    for stores in zip(*map(archives, caches)):
        pool = stores[0].pool
        assert all(store.pool is pool for store in stores)
        pool.settle()
        named = torch.cat([store.member.map[store.member.map >= 0] for store in stores])
        assert torch.equal(named.bincount(minlength=len(pool.refs)), pool.refs.long())
        held = sum(column.untyped_storage().nbytes() for column in pool.data.values())
        books = pool.refs.untyped_storage().nbytes() + pool.home.untyped_storage().nbytes()
        maps = sum(store.member.map.untyped_storage().nbytes() for store in stores)
        assert sum(store.bytes().host for store in stores) == held + books + maps
        found = pool.home[(pool.refs > 0) & (pool.home >= 0)]
        assert len(found.unique()) == len(found), "a token of a text is held twice"


# ----------------------------------------------------------------------- results


@pytest.mark.parametrize(
    "spec",
    [
        PLAIN, f"{PLAIN},archive_as=int8", f"{PLAIN},archive_as=int4", f"{PLAIN}+int4", f"{PLAIN}+kvquant",
        f"{PLAIN},link=100", f"{PLAIN},archive_as=int8,link=100", f"{PLAIN},prefill=chunked:13",
        f"{PLAIN},prefill=chunked:13,evict=chunk", f"{PLAIN},layers=pyramid", "recall:0.3,page=5,pages=1000",
    ],
)  # fmt: skip
def test_results_are_those_of_an_archive_that_is_not_shared(spec: str) -> None:
    """Identical prompts to the bit; prompts that begin alike within what a matmul of another height changes."""
    for ids in ([DOC], [DOC] * 3):
        assert torch.equal(ran(shared_by(spec), ids)[1], ran(spec, ids)[1])
    cache, together = ran(shared_by(spec), ASKED)
    torch.testing.assert_close(together, ran(spec, ASKED)[1], atol=1e-4, rtol=1e-4)
    audit(cache)
    for row, ids in enumerate(ASKED):  # alone, in the pool that the batch has filled
        torch.testing.assert_close(ran(shared_by(spec), [ids])[1][:, 0], together[:, row], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("arch", ["qwen3", "gemma3", "gpt_oss", "opt"])
def test_other_architectures(arch: str) -> None:
    lm = lm_of(arch)
    logits = [ran(spec, ASKED, lm=lm)[1] for spec in (SHARED, PLAIN)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("more", ["", ",link=100"])
def test_reading_all_of_it_is_full(more: str) -> None:
    """By tiles, without a read rule that chooses."""
    strategy = replace(parse(SHARED + more), read=Read(), name=f"all of it{more}")
    logits = ran(strategy, ASKED)[1]
    torch.testing.assert_close(logits, ran("full", ASKED)[1], atol=2e-4, rtol=2e-4)


def test_on_recorded_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, 90, 16, generator=generator) for h in (4, 2, 2))
    one, other = (kvatlas.replay(spec, q, k, v, 70) for spec in (SHARED, PLAIN))
    assert torch.equal(one.output, other.output)
    read = [[[heads.tolist() for heads in step] for step in each.read] for each in (one, other)]
    assert read[0] == read[1]


# ------------------------------------------------------------------------- bytes


def test_identical_prompts_are_held_once() -> None:
    """The host holds one prompt's evicted tokens, and of each sequence its spare slots and its map."""
    n, reserve, gone = 4, 9, len(DOC) - int(0.3 * len(DOC))
    lm = lm_of("llama")
    cache = lm.new_cache(SHARED)
    lm.prefill(cache, [DOC] * n, reserve=reserve)
    held = cache.bytes()
    assert held.host_payload == LAYERS * KV_HEADS * gone * TOKEN
    slots = gone + n * reserve
    assert held.host == LAYERS * KV_HEADS * (slots * (TOKEN + 8) + n * (gone + reserve) * 4)
    audit(cache)
    plain = lm.new_cache(PLAIN)
    lm.prefill(plain, [DOC] * n, reserve=reserve)
    assert 4 * held.host_payload == payload(plain) and held.host < 0.45 * plain.bytes().host


def test_prompts_that_begin_alike_hold_their_beginning_once() -> None:
    """No token of the common blocks is held twice, whoever evicted it; the rest is each one's own."""
    cache, plain = ran(SHARED, ASKED, 0)[0], ran(PLAIN, ASKED, 0)[0]
    audit(cache)
    own = sum(len(ids) - len(DOC) for ids in ASKED)
    assert payload(cache) <= LAYERS * KV_HEADS * (len(DOC) + own) * TOKEN
    assert payload(cache) < 0.6 * payload(plain)
    for store, other in zip(archives(cache), plain.layers):
        assert torch.equal(store.lengths, other.archive.lengths)  # type: ignore[union-attr]
        for row in range(len(ASKED)):
            mine, its = store.row_columns(row), other.archive.row_columns(row)  # type: ignore[union-attr]
            torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", [SHARED, shared_by(f"{PLAIN},archive_as=int8"), shared_by(f"{PLAIN}+int4")])
def test_without_a_common_prefix_bytes_are_the_closed_form(spec: str) -> None:
    lengths = (60, 23, 41)
    cache, _ = ran(spec, prompts(*lengths))
    assert cache.bytes().total == cache.bytes_held(lengths, 9)
    audit(cache)


def test_the_same_block_after_another_beginning_is_another_block() -> None:
    head, other = prompts(16, seed=5)[0], prompts(16, seed=6)[0]
    ids = [head + DOC, other + DOC]
    cache, logits = ran(SHARED, ids)
    plain, want = ran(PLAIN, ids)
    assert payload(cache) == payload(plain)
    assert torch.equal(logits, want)


def test_tokens_after_the_last_full_block_are_each_ones_own() -> None:
    short = DOC[:15]
    cache, plain = (ran(spec, [short] * 2, 0)[0] for spec in (SHARED, PLAIN))
    assert payload(cache) == payload(plain) > 0
    whole = ran(SHARED, [DOC[:16]] * 2, 0)[0]
    assert payload(whole) < payload(ran(PLAIN, [DOC[:16]] * 2, 0)[0])


@pytest.mark.parametrize("mode", ["prefill=chunked:8,evict=chunk", "prefill=chunked-isolated:8"])
def test_what_depends_on_more_than_the_text_is_not_shared(mode: str) -> None:
    cache, plain = (ran(f"{spec},{mode}", [DOC] * 2, 4)[0] for spec in (SHARED, PLAIN))
    assert payload(cache) == payload(plain)


def test_prefill_by_chunks_that_is_exact_is_shared() -> None:
    cache, plain = (ran(f"{spec},prefill=chunked:13", [DOC] * 2, 0)[0] for spec in (SHARED, PLAIN))
    assert 2 * payload(cache) == payload(plain)


def test_what_a_tee_prefills_is_shared_too() -> None:
    from kvatlas.engine.recorded import prefill_many

    lm = lm_of("llama")
    caches = [lm.new_cache(SHARED), lm.new_cache("h2o:0.3"), lm.new_cache(SHARED)]
    list(prefill_many(lm, caches, [DOC], 4))
    alone = lm.new_cache(PLAIN)
    lm.prefill(alone, [DOC], 4)
    assert payload(caches[0], caches[2]) == payload(alone)


# -------------------------------------------------------------- sessions, and time


def asked(lm: LM, spec: str, ids: list[int]) -> Session:
    session = lm.session(spec)
    session.append(ids)
    return session


def test_a_later_session_shares_with_one_that_lives() -> None:
    lm = lm_of("llama")
    first = asked(lm, SHARED, ASKED[0])
    alone = payload(first.cache)
    second = asked(lm, SHARED, ASKED[1])
    assert payload(first.cache) == alone, "the oldest holder pays"
    assert payload(second.cache) < 0.5 * alone
    audit(first.cache, second.cache)
    want = [asked(lm, PLAIN, ids).generate(12).ids for ids in ASKED[:2]]
    assert [first.generate(12).ids, second.generate(12).ids] == want
    audit(first.cache, second.cache)
    both = first.bytes().host + second.bytes().host
    del first
    alike = asked(lm, PLAIN, ASKED[1])
    alike.generate(12)
    assert payload(second.cache) == payload(alike.cache), "now the second one pays for all that it holds"
    assert second.bytes().host < both
    audit(second.cache)
    pool = weakref.ref(pools(second.cache)[0])
    del second
    assert pool() is None and not lm.alive, "the memory is gone with its last user"


def test_a_generate_call_shares_with_a_session() -> None:
    lm = lm_of("llama")
    session = asked(lm, SHARED, DOC)
    before = payload(session.cache)
    stream = lm.stream([DOC], SHARED, 6, kvatlas.engine.lm.Sampling(0.0, 1.0, 0), set())
    next(stream)
    pool = pools(session.cache)[0]
    assert len(pool.members) == 2 and payload(session.cache) == before
    assert int((pool.refs == 2).sum()) == KV_HEADS * 56, "each of the prompt's evicted tokens is held by both"
    stream.close()
    assert lm.generate([DOC], SHARED, max_new_tokens=9)[0].ids == lm.generate([DOC], PLAIN, max_new_tokens=9)[0].ids
    audit(session.cache)


def test_another_strategy_or_model_has_a_pool_of_its_own() -> None:
    lm, other = lm_of("llama"), LM(tiny_model("llama", seed=1))
    sessions = [asked(lm, SHARED, DOC), asked(lm, SHARED.replace("0.3", "0.2"), DOC), asked(other, SHARED, DOC)]
    assert len({id(pools(s.cache)[0]) for s in sessions}) == 3


def test_later_turns_are_each_ones_own() -> None:
    """The same words in a later turn are read with what was left of the first, so they are held twice."""
    lm, turn = lm_of("llama"), prompts(40, seed=8)[0]
    sessions = [asked(lm, SHARED, DOC) for _ in range(2)]
    plain = [asked(lm, PLAIN, DOC) for _ in range(2)]
    once = payload(*[s.cache for s in sessions])
    for session in sessions + plain:
        session.append(turn)
    audit(*[s.cache for s in sessions])
    later = payload(*[s.cache for s in plain]) - 2 * once
    assert payload(*[s.cache for s in sessions]) == once + later
    assert [s.generate(9).ids for s in sessions] == [s.generate(9).ids for s in plain]


def test_a_fork_is_references() -> None:
    lm = lm_of("llama")
    session, plain = asked(lm, SHARED, ASKED[0]), asked(lm, PLAIN, ASKED[0])
    assert session.generate(7).ids == plain.generate(7).ids  # also leaves holes in the archive
    before = payload(session.cache)
    fork = session.fork()
    assert payload(session.cache) == before and payload(fork.cache) == 0
    audit(session.cache, fork.cache)
    turn = prompts(11, seed=8)[0]
    fork.append(turn)
    other = plain.fork()
    other.append(turn)
    assert fork.generate(9).ids == other.generate(9).ids
    assert session.generate(9).ids == plain.generate(9).ids
    audit(session.cache, fork.cache)
    del session
    audit(fork.cache)
    assert fork.generate(5).ids == other.generate(5).ids


def test_a_copy_of_a_ragged_batch_goes_on_exactly() -> None:
    lm = lm_of("llama")
    cache, logits = ran(SHARED, [*ASKED, DOC[:20]])
    made = saved.copy(cache)
    audit(cache, made)
    token = logits[-1].argmax(-1)
    for _ in range(70):  # past the spare slots
        one, other = lm.step(cache, token), lm.step(made, token)
        assert torch.equal(one, other)
        token = one.argmax(-1)
    audit(cache, made)


def test_copies_that_part_write_to_no_slot_of_each_other() -> None:
    """A short prompt that evicts nothing yet leaves a freed slot in the archive: both copies' next token goes there."""
    lm, ids = lm_of("llama"), [DOC, DOC[:20]]
    logits: dict[str, list[torch.Tensor]] = {}
    for spec in (SHARED, PLAIN):
        spec = spec.replace("0.3", "40")
        cache, _ = ran(spec, ids, 6)
        made = saved.copy(cache)
        assert cache.layers[0].archive.holes  # type: ignore[union-attr]
        logits[spec] = []
        for token in range(2, 62):
            for each, tokens in ((cache, [token, token + 1]), (made, [token + 90, token + 91])):
                logits[spec].append(lm.step(each, torch.tensor(tokens)))
    assert all(map(torch.equal, *logits.values()))


# -------------------------------------------------------------------------- rows


def test_rows_that_are_repeated_hold_the_same_slots() -> None:
    rows = [2, 0, 0, 2]
    cache, logits = ran(SHARED, ASKED, 90, rows=rows)
    plain, want = ran(PLAIN, ASKED, 90, rows=rows)
    torch.testing.assert_close(logits, want, atol=1e-3, rtol=1e-3)
    audit(cache)
    assert payload(cache) < 0.7 * payload(plain)


def test_a_sequence_that_is_dropped_frees_its_slots() -> None:
    """What others hold stays, the rest is used by the next; memory goes back when much of it is free."""
    lm, ids = lm_of("llama"), prompts(*(81, 82, 83, 84))
    cache = lm.new_cache(SHARED)
    logits = lm.prefill(cache, ids, reserve=8)
    before = cache.bytes()
    pool = pools(cache)[0]
    cache.select_rows([0, 2, 3])
    assert payload(cache) < before.host_payload and int((pool.refs == 0).sum()) > 0
    slots = len(pool.refs)
    session = asked(lm, SHARED, DOC[:30])
    assert len(pool.refs) < slots + KV_HEADS * (30 + 256), "free slots were used first"
    audit(cache, session.cache)
    del session
    cache.select_rows([1])
    after = cache.bytes()
    assert after.host < 0.35 * before.host
    assert len(pool.refs) == int((pool.refs > 0).sum()), "given back"
    plain = lm.new_cache(PLAIN)
    want = lm.prefill(plain, ids[2:3], reserve=8)
    assert torch.equal(lm.step(cache, logits[2:3].argmax(-1)), lm.step(plain, want.argmax(-1)))
    audit(cache)


def test_a_prompt_that_was_interrupted_lends_its_text_to_no_other_row() -> None:
    cache, _ = ran(SHARED, ASKED, 0)
    cache.announce(1, DOC)
    link: Any = cache.shared
    assert len(link.texts(1)) == 5
    cache.select_rows([1, 0, 2])
    assert not link.texts(0) and not link.texts(1)


def test_dropping_one_of_two_sequences_that_begin_alike_leaves_the_other_whole() -> None:
    lm = lm_of("llama")
    for keep in (0, 1):
        _, logits = ran(SHARED, ASKED[:2], 12, rows=[keep])
        _, want = ran(PLAIN, ASKED[:2], 12, rows=[keep])
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
    assert not lm.alive


def test_a_prefix_is_found_again_after_slots_were_renumbered_and_forgotten_when_all_are_gone() -> None:
    lm = lm_of("llama")
    first, second = asked(lm, SHARED, prompts(200)[0]), asked(lm, SHARED, DOC)
    once = payload(second.cache)
    del first  # most of the pool
    third = asked(lm, SHARED, DOC)
    assert payload(second.cache, third.cache) == once
    audit(second.cache, third.cache)
    del second, third
    fourth = asked(lm, SHARED, ASKED[0])
    assert fourth.generate(8).ids == asked(lm, PLAIN, ASKED[0]).generate(8).ids
    audit(fourth.cache)


@pytest.mark.parametrize(("n", "reserve"), [(90, 4), (24, 60)])
def test_slots_that_are_used_again_are_not_found_by_their_old_text(n: int, reserve: int) -> None:
    """Neither those that hold another prompt now nor those that wait for tokens to come."""
    lm = lm_of("llama")

    def filled(ids: list[int], spec: str = SHARED, reserve: int = 4) -> KVCache:
        cache = lm.new_cache(spec)
        lm.prefill(cache, [ids], reserve)
        return cache

    stays, goes = filled(prompts(400)[0]), filled(DOC)
    slots = len(pools(stays)[0].refs)
    del goes  # too few slots to give back
    next_one, alike = (filled(prompts(n)[0], spec, reserve) for spec in (SHARED, PLAIN))
    assert len(pools(stays)[0].refs) < slots + KV_HEADS * 25
    for token in (2, 3, 4):
        assert torch.equal(*(lm.step(cache, torch.tensor([token])) for cache in (next_one, alike)))
    again, plain = filled(DOC), filled(DOC, PLAIN)
    for one, other in ((next_one, alike), (again, plain)):
        for store, layer in zip(archives(one), other.layers):
            assert torch.equal(store.row_columns(0)["k"], layer.archive.row_columns(0)["k"])  # type: ignore[union-attr]
    audit(stays, next_one, again)


def test_churn() -> None:
    """Sessions come, fork, go on and go, in any order: the books stay right and answers are as without sharing."""
    lm, generator = lm_of("llama"), torch.Generator().manual_seed(3)
    live: list[tuple[Session, Session]] = []
    for _ in range(40):
        what = int(torch.randint(5, (1,), generator=generator))
        at = int(torch.randint(max(1, len(live)), (1,), generator=generator))
        if what == 0 or not live:
            cut = int(torch.randint(20, 100, (1,), generator=generator))
            live.append((asked(lm, SHARED, ASKED[1][:cut]), asked(lm, PLAIN, ASKED[1][:cut])))
        elif what == 1:
            live.append((live[at][0].fork(), live[at][1].fork()))
        elif what == 2 and len(live) > 1:
            del live[at]
        elif what == 3 and len(live[at][0].tokens) < 300:
            turn = torch.randint(2, VOCAB, (13,), generator=generator).tolist()
            for session in live[at]:
                session.append(turn)
        elif len(live[at][0].tokens) < 400:
            assert live[at][0].generate(6).ids == live[at][1].generate(6).ids
        audit(*[session.cache for session, _ in live])


# -------------------------------------------------------------- files, and the rest


def test_saved_and_loaded_it_goes_on_exactly(tmp_path: Path) -> None:
    lm = lm_of("llama")
    cache, logits = ran(SHARED, ASKED)
    kvatlas.save_cache(cache, tmp_path / "x")
    loaded = kvatlas.load_cache(tmp_path / "x", lm)
    audit(cache, loaded)
    plain = ran(PLAIN, ASKED)[0]
    assert payload(loaded) == payload(plain), "a file holds each sequence's own, and so does what is loaded"
    token = logits[-1].argmax(-1)
    assert torch.equal(lm.step(loaded, token), lm.step(cache, token))
    session = asked(lm, SHARED, DOC)
    session.save(tmp_path / "y")
    back = Session.load(tmp_path / "y", lm)
    assert back.generate(9).ids == session.generate(9).ids
    audit(cache, loaded, session.cache, back.cache)


def test_transformers_beams_share_what_they_have_in_common() -> None:
    model = tiny_model("llama")
    inputs = {"input_ids": torch.tensor([DOC, DOC]), "attention_mask": torch.ones(2, 80, dtype=torch.long)}
    how: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    caches = [kvatlas.cache(spec, model) for spec in (SHARED, PLAIN)]
    one, other = (model.generate(**inputs, **how, past_key_values=cache) for cache in caches)
    assert torch.equal(one, other)
    held, plain = (cache.kv.bytes().host_payload for cache in caches)
    assert held < 0.5 * plain
    audit(caches[0].kv)


def test_a_store_writes_to_no_slot_that_another_sees() -> None:
    cache, _ = ran(SHARED, [DOC] * 2, 0)
    store = archives(cache)[0]
    before = store.row_columns(1)["k"].clone()
    slots = torch.full((2, KV_HEADS, 2), -1)
    slots[0] = torch.tensor([3, 5])
    store.write("k", slots, torch.full((2, KV_HEADS, 2, HEAD_DIM), 7.0))
    assert torch.equal(store.row_columns(1)["k"], before)
    changed = store.row_columns(0)["k"]
    assert bool((changed[:, [3, 5]] == 7).all()) and torch.equal(changed[:, [0, 4, 6]], before[:, [0, 4, 6]])
    assert torch.equal(store.row_columns(0)["v"], store.row_columns(1)["v"]), "the other column went along"
    store.load(0, store.row_columns(1))
    assert torch.equal(store.row_columns(0)["k"], before)
    audit(cache)


def test_slots_that_are_freed_anywhere_are_filled_again_or_closed() -> None:
    """What the interface allows and no rule does yet: any slot of an archive is dropped, one that is shared too."""
    caches = [ran(spec, [DOC] * 2, 0)[0] for spec in (SHARED, PLAIN)]
    stores: list[Any] = [cache.layers[0].archive for cache in caches]
    token = {name: torch.full((2, KV_HEADS, HEAD_DIM), 5.0) for name in ("k", "v")}
    for store in stores:
        store.drop(torch.tensor([[3, 7], [-1, -1]]))
        store.append(token)
        store.drop(torch.tensor([[11, 2], [4, 4]]))
        store.compact()
    for row in range(2):
        one, other = (store.row_columns(row) for store in stores)
        assert all(torch.equal(one[name], other[name]) for name in ("k", "v"))
    audit(caches[0])


def test_the_parameter() -> None:
    assert parse("recall:0.3,share=false").name == parse("recall:0.3").name == "recall:0.3"
    assert "shared prefixes once" in parse(SHARED).place.words()
    with pytest.raises(UserError, match="share must be true or false, not 'yes'"):
        parse("recall:0.3,share=yes")
    with pytest.raises(UserError, match="both answer 'place'"):
        parse("recall:0.3,share=true+host")
