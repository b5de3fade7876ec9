"""Quest: page bounds and how they follow the cache, the choice of pages, and what it reads in the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from specs import lm_of, prompts, tokens
from torch import Tensor

from kvatlas.attention import native
from kvatlas.attention.bounds import bound_scores
from kvatlas.engine.replay import replay
from kvatlas.errors import UserError
from kvatlas.strategy.read import pages
from kvatlas.strategy.read.quest import Quest
from kvatlas.strategy.spec import parse
from kvatlas.strategy.view import LayerFacts, View

HEADS, GROUP, DIM = 2, 3, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_bounds(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Page by page: ``[H, n, D]`` -> ``[H, pages, D]`` twice."""
    parts = keys.split(page, 1)
    return torch.stack([p.amin(1) for p in parts], 1), torch.stack([p.amax(1) for p in parts], 1)


# ------------------------------------------------------------------------ bounds


@pytest.mark.parametrize(("n", "page"), [(32, 16), (37, 16), (5, 16), (9, 1), (16, 16), (12, 4)])
def test_bounds_of_keys(n: int, page: int) -> None:
    keys = random(HEADS, n + 5, DIM)
    low, high = pages.bounds_of(keys, page, n)
    want = plain_bounds(keys[:, :n], page)
    assert torch.equal(low, want[0]) and torch.equal(high, want[1])
    assert low.shape[1] == pages.pages_for(n, page)


def test_no_keys_have_no_bounds() -> None:
    low, high = pages.bounds_of(random(1, HEADS, 4, DIM), 16, 0)
    assert low.shape == high.shape == (1, HEADS, 0, DIM)


@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize("last", [False, True])
def test_bounds_follow_what_is_appended(page: int, last: bool) -> None:
    """Key by key gives the bounds of all keys at once, also where rows are of different lengths."""
    batch, start, more = 2, (5, 5) if last else (5, 7), 9
    keys = random(batch, HEADS, 20, DIM)
    shape = (batch, HEADS, pages.pages_for(20, page), DIM)
    low, high = torch.full(shape, 99.0), torch.full(shape, -99.0)  # what is left of others does not matter
    for row, n in enumerate(start):
        made = pages.bounds_of(keys[row], page, n)
        low[row, :, : made[0].shape[1]], high[row, :, : made[1].shape[1]] = made
    for step in range(more):
        slot = torch.tensor(start).unsqueeze(1).expand(batch, HEADS) + step
        key = torch.stack([keys[row, :, n + step] for row, n in enumerate(start)])
        pages.note_key(low, high, key, slot, slot + 1, page)
    for row, n in enumerate(start):
        want = plain_bounds(keys[row, :, : n + more], page)
        held = want[0].shape[1]
        assert torch.equal(low[row, :, :held], want[0]) and torch.equal(high[row, :, :held], want[1])


def test_an_overwritten_slot_widens_its_page() -> None:
    """Bounds hold for what is there now and for what was; other pages and absent keys leave no trace."""
    keys, key = random(1, HEADS, 12, DIM), random(1, HEADS, DIM, seed=1)
    low, high = pages.bounds_of(keys, 4)
    before, after = (low.clone(), high.clone()), keys.clone()
    slot = torch.tensor([[4, -1]])  # the first slot of a page, whose other slots are filled
    pages.note_key(low, high, key, slot, torch.full((1, HEADS), 12), 4)
    after[0, 0, 4] = key[0, 0]
    assert torch.equal(low[0, 0, 1], torch.minimum(before[0][0, 0, 1], key[0, 0]))
    assert torch.equal(high[0, 0, 1], torch.maximum(before[1][0, 0, 1], key[0, 0]))
    assert (low[0, 0, 1] <= after[0, 0, 4:8].amin(0)).all() and (high[0, 0, 1] >= after[0, 0, 4:8].amax(0)).all()
    assert torch.equal(low[:, 1], before[0][:, 1]) and torch.equal(high[:, 1], before[1][:, 1])
    assert torch.equal(low[:, 0, [0, 2]], before[0][:, 0, [0, 2]])


def test_scores_are_upper_bounds() -> None:
    keys, q = random(1, HEADS, 64, DIM), random(1, HEADS, GROUP, DIM, seed=1)
    low, high = pages.bounds_of(keys, 16)
    best = (q @ keys.transpose(-1, -2)).unflatten(-1, (4, 16)).amax(-1)  # [1, H, G, pages]
    total = torch.full((1, HEADS), 4)
    assert (bound_scores(q, low, high, total, "max") >= best.amax(2) - 1e-5).all()
    assert (bound_scores(q, low, high, total, "mean") >= best.mean(2) - 1e-5).all()


# --------------------------------------------------------------------- selection


@pytest.mark.parametrize("width", [23, 30])
def test_pages_become_slots(width: int) -> None:
    """Ragged rows; the last page is partly filled; nothing past a row's length is named."""
    lengths = torch.tensor([[23, 23], [9, 9], [0, 0]])
    chosen = torch.tensor([[[0, 3, 5], [1, 2, 4]], [[1, 2, 0], [0, 1, 1]], [[0, 0, 0], [0, 0, 0]]])
    count = torch.tensor([[3, 3], [2, 1], [0, 0]])
    made = pages.slots_of_pages(chosen, count, lengths, 4, width)
    assert made.index.is_contiguous() and made.index.max() < width
    for row in range(3):
        for head in range(2):
            want = [
                slot
                for p in chosen[row, head, : count[row, head]].tolist()
                for slot in range(4 * p, 4 * p + 4)
                if slot < lengths[row, head]
            ]
            assert made.index[row, head, : made.count[row, head]].tolist() == want


@pytest.mark.parametrize("gqa", ["mean", "max", "sum"])
@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_chooses_what_the_parts_choose(
    gqa: str, newest: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds, scores, choice and slots: the native kernel and PyTorch, ragged rows, rows that had no new key."""
    if not native.available():
        pytest.skip("no compiler here")
    rule = Quest(budget=0.3, page=4, gqa=gqa, newest=newest)  # type: ignore[arg-type]
    made = []
    for serves in (True, False):
        view, _ = view_of(rule, random(3, HEADS, 1100, DIM).to(dtype), (1100, 1097, 9))
        slot = view.lengths - 1
        slot[0, 0], slot[1, 1] = -1, 17  # nowhere; into a hole
        view = replace(view, newest=slot, key=random(3, HEADS, DIM, seed=3).to(dtype) * 3)
        monkeypatch.setattr(pages.fast, "serves", lambda q, k, it=serves: it)
        q, count = random(3, HEADS * GROUP, DIM, seed=2).to(dtype), torch.tensor([[80, 70], [60, 80], [9, 2]])
        found = pages.read_best(view, q, rule, count.minimum((view.lengths + 3) // 4), 80, newest)
        past = torch.arange(found.index.shape[-1]) >= found.count.unsqueeze(-1)
        made.append((found.index.masked_fill(past, -1), found.count, view.state["low"], view.state["high"]))
        assert found.scanned == 2 * made[-1][2][:, :, :275].nbytes
    for one, other in zip(*made):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fast", [True, False])
def test_best_pages_are_ascending(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(pages, "native_serves", lambda x: False)
        monkeypatch.setattr(pages, "best_slots", lambda rank, count, width: rank.topk(width, -1).indices)
    rank, count = random(2, HEADS, 30), torch.tensor([[5, 5], [2, 2]])
    index = pages.best_pages(rank, count, 5)
    for row in range(2):
        n = int(count[row, 0])
        want = rank[row].topk(n, -1).indices.sort(-1).values
        assert torch.equal(index[row, :, :n], want)


def view_of(rule: Quest, keys: Tensor, lengths: tuple[int, ...]) -> tuple[View, LayerFacts]:
    """A batch in decode, its newest token just stored: ``keys [B, H, n, D]``."""
    batch, heads, n, dim = keys.shape
    facts = LayerFacts(2, 4, heads * GROUP, heads, dim, keys.dtype, keys.device, dim**-0.5)
    state = {name: t.expand(batch, *t.shape).clone() for name, t in rule.begin(facts, n).items()}
    held = torch.tensor(lengths).unsqueeze(1).expand(batch, heads).contiguous()
    for row, length in enumerate(lengths if state else ()):
        before = View(
            facts, None, held, length - 1, held[:, 0], {}, state={k: t[row : row + 1] for k, t in state.items()}
        )
        before.keys = lambda row=row, length=length: keys[row : row + 1, :, : length - 1]
        rule.settle(before)
    newest = held - 1
    key = keys.gather(2, newest.view(batch, heads, 1, 1).expand(-1, -1, 1, dim)).squeeze(2)
    return View(
        facts, None, held, max(lengths), newest[:, 0], {}, newest=newest, key=key, state=state,
        ragged=len(set(lengths)) > 1,
    ), facts  # fmt: skip


def expected(rule: Quest, keys: Tensor, q: Tensor, length: int, head: int) -> list[int]:
    """The slots that a row's KV head reads, spelled out: ``keys [n, D]``, ``q [G, D]``."""
    low, high = (b[0] for b in plain_bounds(keys[None, :length], rule.page))
    scores = torch.maximum(q[:, None] * low, q[:, None] * high).sum(-1)  # [G, pages]
    rank = {"mean": scores.mean(0), "max": scores.amax(0), "sum": scores.sum(0)}[rule.gqa]
    if rule.newest:
        rank[-1] = torch.inf
    tokens_ = int(rule.budget * length) if rule.budget < 1 else int(rule.budget)
    n = min(len(rank), max(3, tokens_ // rule.page))
    best = rank.topk(n).indices.sort().values.tolist()
    return [slot for p in best for slot in range(p * rule.page, min(length, (p + 1) * rule.page))]


@pytest.mark.parametrize("lengths", [(60, 60), (61, 61), (60, 33, 5)])
@pytest.mark.parametrize(
    "rule",
    [
        Quest(0.3, page=4),
        Quest(20, page=4, gqa="max"),
        Quest(0.2, page=3, gqa="sum", newest=False),
        Quest(0.5, page=1),
        Quest(8, page=8),
    ],
)
def test_the_best_pages_are_read(rule: Quest, lengths: tuple[int, ...]) -> None:
    batch, n = len(lengths), max(lengths)
    keys, q = random(batch, HEADS, n, DIM), random(batch, HEADS * GROUP, DIM, seed=1)
    view, _ = view_of(rule, keys, lengths)
    made = rule.select(view, q, None)
    assert made is not None and made.index.shape[-1] <= rule.limit(n)
    for row, length in enumerate(lengths):
        for head in range(HEADS):
            want = expected(rule, keys[row, head], q[row, head * GROUP : (head + 1) * GROUP], length, head)
            assert made.index[row, head, : made.count[row, head]].tolist() == want
            assert len(want) <= rule.limit(length)


def test_a_short_sequence_is_read_whole() -> None:
    """Three pages are all there is; the bounds follow all the same."""
    rule, keys = Quest(0.1, page=4), random(1, HEADS, 12, DIM)
    view, _ = view_of(rule, keys, (12,))
    assert rule.select(view, random(1, HEADS * GROUP, DIM), None) is None
    want = plain_bounds(keys[0], 4)
    assert torch.equal(view.state["low"][0], want[0]) and torch.equal(view.state["high"][0], want[1])


def test_lossless_keeps_no_bounds() -> None:
    rule = Quest(1.0)
    view, facts = view_of(rule, random(1, HEADS, 100, DIM), (100,))
    assert rule.lossless() and rule.begin(facts, 100) == {} and rule.state_bytes(facts, 100) == 0
    assert rule.select(view, random(1, HEADS * GROUP, DIM), None) is None


@pytest.mark.parametrize(("slots", "page"), [(64, 16), (65, 16), (3, 16), (50, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes_are_the_tensors(slots: int, page: int, dtype: torch.dtype) -> None:
    facts = LayerFacts(2, 4, HEADS * GROUP, HEADS, DIM, dtype, torch.device("cpu"), 1.0)
    rule = Quest(0.5, page=page)
    held = sum(t.untyped_storage().nbytes() for t in rule.begin(facts, slots).values())
    assert rule.state_bytes(facts, slots) == held


# ------------------------------------------------------------------ in the engine


@pytest.mark.parametrize("prefill", ["flash", "chunked:7"])
def test_replay_reads_what_is_expected_at_every_step(prefill: str) -> None:
    q, k, v = random(HEADS * GROUP, 70, DIM), random(HEADS, 70, DIM, seed=1), random(HEADS, 70, DIM, seed=2)
    rule = Quest(0.3, page=4)
    result = replay(f"quest:0.3,page=4,prefill={prefill}", q, k, v, 40)
    for step, read in enumerate(result.read):
        for head in range(HEADS):
            at = expected(rule, k[head], q[head * GROUP : (head + 1) * GROUP, 40 + step], 41 + step, head)
            assert read[head].tolist() == at
            group = q[head * GROUP : (head + 1) * GROUP, 40 + step]
            out = torch.softmax(group @ k[head, at].T * DIM**-0.5, -1) @ v[head, at]
            torch.testing.assert_close(
                result.output[step, head * GROUP : (head + 1) * GROUP], out, atol=1e-5, rtol=1e-5
            )


def check_bounds(cache: Any, page: int) -> None:
    """Every kept key lies within the bounds of its page."""
    for layer in cache.layers[2:]:
        keys, lengths = layer.store.keys(), layer.store.lengths
        slots = torch.arange(keys.shape[2])
        filled = (slots < lengths.unsqueeze(-1)).unsqueeze(-1)
        assert ((layer.state["low"][:, :, slots // page] <= keys) | ~filled).all()
        assert ((layer.state["high"][:, :, slots // page] >= keys) | ~filled).all()


@pytest.mark.parametrize("spec", ["h2o:0.5+quest:0.5,page=2", "h2o:0.5+quest:0.5,page=3+host"])
def test_bounds_hold_where_slots_are_overwritten(spec: str) -> None:
    """Under an evicting keep rule, also when sequences are forked and their holes closed, and after a later turn."""
    lm = lm_of("llama")
    cache = lm.new_cache(spec)
    logits = lm.prefill(cache, prompts(40, 23), reserve=50)
    for step in range(40):
        logits = lm.step(cache, logits.argmax(-1))
        check_bounds(cache, 2 if "page=2" in spec else 3)
        if step % 7 == 6:
            cache.select_rows([1, 0])
            logits = logits[[1, 0]]
    lm.extend(cache, 0, prompts(9)[0])
    check_bounds(cache, 2 if "page=2" in spec else 3)


COMPOSED = ["quest:0.2,page=2+host", "h2o:0.5+quest:0.5,page=2", "quest:0.3,page=2+paged:block=4"]


@pytest.mark.parametrize("spec", COMPOSED)
def test_compositions_run_and_do_not_depend_on_company(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(40, 23, 31)
    together = tokens(lm, ids, spec, 12)
    assert together == [tokens(lm, [one], spec, 12)[0] for one in ids]
    assert together != tokens(lm, ids, "full", 12), "something was left unread"


@pytest.mark.parametrize("spec", ["quest:0.3,page=2", "h2o:0.5+quest:0.5,page=2"])
def test_turns_beyond_what_was_reserved(spec: str) -> None:
    """The bounds grow with the store."""
    lm, logits = lm_of("llama"), []
    for reserve in (1, 200):
        cache = lm.new_cache(spec)
        lm.prefill(cache, prompts(40, 23), reserve=reserve)
        lm.step(cache, torch.tensor([4, 5]))
        lm.extend(cache, 1, prompts(99)[0])
        logits.append([lm.step(cache, torch.tensor([token, 5])) for token in range(4)][-1])
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


def test_where_pages_are_has_no_influence() -> None:
    lm, ids = lm_of("llama"), prompts(40, 23, 31)
    assert tokens(lm, ids, "quest:0.2,page=2+host") == tokens(lm, ids, "quest:0.2,page=2")


def test_layers_0_and_1_read_everything() -> None:
    lm = lm_of("llama")
    cache = lm.new_cache("quest:0.2,page=2")
    logits = lm.prefill(cache, prompts(40), reserve=3)
    lm.step(cache, logits.argmax(-1))
    assert [layer.selection is None for layer in cache.layers] == [True, True, False, False]
    assert [len(layer.state) for layer in cache.layers] == [0, 0, 2, 2]


# -------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("spec", "words"),
    [("quest:page=0", "page must be at least 1"), ("quest:0.3,page=-4", "page"), ("quest:0", "above 0"),
     ("quest:gqa=min", "gqa")],
)  # fmt: skip
def test_bad_parameters(spec: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(spec)
