"""InfLLM: the parts and how they scale, representatives, one decision for all heads, keys turned once, later turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from specs import lm_of, prompts, tokens
from torch import Tensor

from kvatlas.engine.replay import replay
from kvatlas.errors import UserError
from kvatlas.strategy.answers import Encode
from kvatlas.strategy.read.infllm import RepresentedBlocks
from kvatlas.strategy.spec import parse
from kvatlas.strategy.view import LayerFacts

HEADS, GROUP, DIM = 2, 2, 8
SMALL = RepresentedBlocks(init=3, local=9, block=4, topk=2, repr=2)
SMALL_SPEC = "init=3,local=9,block=4,topk=2,repr=2"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Turn ``[.., T, D]`` by ``positions [T]``."""
    half = x.shape[-1] // 2
    angles = positions.unsqueeze(-1) * 100.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Plain:
    """The method for one sequence, spelled out. ``q, k`` are not rotated yet; the prompt is the first ``prompt``."""

    def __init__(self, rule: RepresentedBlocks, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> None:
        self.rule, self.q, self.k, self.v, self.prompt = rule, q, k, v, prompt
        total = k.shape[1]
        self.at = torch.arange(total)
        self.turned_k = rope(k, self.at)
        self.first = self.sizes(prompt)[0]
        self.left = self.boundary(prompt)

    def sizes(self, length: int) -> tuple[int, int, int, int]:
        """first tokens, near, blocks, distance."""
        rule, most = self.rule, self.rule.most
        budget = most if rule.budget == 1.0 else int(rule.budget * length) if rule.budget < 1 else int(rule.budget)
        total = min(max(1, budget), most)
        first = getattr(self, "first", rule.init * total // most)
        blocks = max(0, min(int(rule.topk * total / most + 0.5), (total - first - 1) // rule.block))
        near = max(1, total - first - blocks * rule.block)
        return first, near, blocks, min(near, rule.local) - 1

    def boundary(self, length: int) -> int:
        first, near, _, _ = self.sizes(length)
        past = length - max(1, near - self.rule.block + 1) - first
        return max(getattr(self, "left", 0), first + past // self.rule.block * self.rule.block if past >= 0 else 0)

    def mass(self) -> Tensor:
        """``[Hq, prompt]``: what the prompt's queries gave each key from within the local window."""
        n, keys = self.prompt, self.turned_k.repeat_interleave(GROUP, 0)
        scores = rope(self.q, self.at)[:, :n] @ keys[:, :n].transpose(1, 2) * DIM**-0.5
        gap = torch.arange(n)[:, None] - torch.arange(n)
        p = scores.masked_fill(gap < 0, float("-inf")).softmax(-1)
        return p.masked_fill(gap >= self.rule.local, 0.0).sum(1)

    def block_key(self, j: int) -> Tensor:
        """``[Hq, D]``, not rotated."""
        start = self.first + j * self.rule.block
        stop = start + self.rule.block
        keys = self.k[:, start:stop].repeat_interleave(GROUP, 0)
        if stop > self.prompt:
            return keys.mean(1)
        best = self.mass()[:, start:stop].topk(self.rule.repr, -1).indices
        return keys.gather(1, best.unsqueeze(-1).expand(-1, -1, DIM)).mean(1)

    def step(self, now: int) -> tuple[list[int], Tensor]:
        """Positions read, and the output ``[Hq, D]``."""
        rule, length = self.rule, now + 1
        self.left = self.boundary(length)
        first, near, blocks, distance = self.sizes(length)
        if not self.left:
            far, close = [], list(range(max(0, length - near - first), length))
        else:
            held = (self.left - first) // rule.block
            query = rope(self.q[:, now : now + 1], torch.tensor([distance]))[:, 0]
            scores = torch.tensor([float((query * self.block_key(j)).sum()) for j in range(held)])
            best = scores.topk(min(blocks, held)).indices.tolist()
            far = list(range(first)) + [first + j * rule.block + i for j in sorted(best) for i in range(rule.block)]
            close = list(range(max(self.left, length - near), length))
        out = []
        for head in range(HEADS * GROUP):
            kv = head // GROUP
            here = rope(self.q[head, now : now + 1], torch.tensor([now]))
            there = rope(self.q[head, now : now + 1], torch.tensor([distance]))
            scores = torch.cat([there @ self.k[kv, far].T, here @ self.turned_k[kv, close].T], -1) * DIM**-0.5
            out.append(scores.softmax(-1) @ self.v[kv, far + close])
        return sorted(far + close), torch.cat(out)


@pytest.mark.parametrize("prefill", ["flash", "eager", "chunked:7"])
@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        (SMALL, SMALL_SPEC),
        (RepresentedBlocks(0.5, 3, 9, 4, 2, 2), f"0.5,{SMALL_SPEC}"),
        (RepresentedBlocks(0.2, 3, 9, 4, 2, 2), f"0.2,{SMALL_SPEC}"),
        (RepresentedBlocks(17, 3, 9, 4, 2, 2), f"17,{SMALL_SPEC}"),
        (RepresentedBlocks(init=0, local=5, block=3, topk=3, repr=3), "init=0,local=5,block=3,topk=3,repr=3"),
        (RepresentedBlocks(init=4, local=6, block=4, topk=0, repr=1), "init=4,local=6,block=4,topk=0,repr=1"),
        (RepresentedBlocks(init=2, local=50, block=4, topk=2), "init=2,local=50,block=4,topk=2"),
    ],
)
def test_replay_is_the_method_spelled_out(rule: RepresentedBlocks, spec: str, prefill: str) -> None:
    total, prompt = 66, 37
    q, k, v = random(HEADS * GROUP, total, DIM), random(HEADS, total, DIM, seed=1), random(HEADS, total, DIM, seed=2)
    at = torch.arange(total)
    result = replay(f"infllm:{spec},prefill={prefill}", rope(q, at), rope(k, at), v, prompt, rope=rope)
    plain = Plain(rule, q, k, v, prompt)
    for step, read in enumerate(result.read):
        want, out = plain.step(prompt + step)
        assert [r.tolist() for r in read] == [want] * HEADS, f"step {step}"
        torch.testing.assert_close(result.output[step], out, atol=2e-5, rtol=1e-4)
        assert len(want) <= rule.limit(prompt + step + 1)


def test_everything_local_is_full() -> None:
    q, k, v = random(HEADS * GROUP, 40, DIM), random(HEADS, 40, DIM, seed=1), random(HEADS, 40, DIM, seed=2)
    ours = replay("infllm", q, k, v, 30, rope=rope)
    torch.testing.assert_close(ours.output, replay("full", q, k, v, 30).output, atol=1e-6, rtol=0)


@pytest.mark.parametrize("budget", [0.05, 0.2, 0.5, 100, 1000, 7000, 1.0])
@pytest.mark.parametrize("first_length", [10, 2048])
def test_parts_meet_the_budget(budget: float, first_length: int) -> None:
    """Never more is read than allowed, most of it is used, and what has left stays away."""
    rule = RepresentedBlocks(budget)
    lengths = torch.arange(first_length, 40_000, 37)
    first = torch.full_like(lengths, rule.first_tokens(first_length))
    parts = rule.parts(lengths, first)
    left = rule.boundary(lengths, first, parts.window)
    assert (left.diff() >= 0).all() and (left < lengths).all()
    far = torch.where(left > 0, first + parts.blocks.minimum((left - first) // rule.block) * rule.block, 0)
    near = torch.where(left > 0, (lengths - left).minimum(parts.near), lengths.minimum(parts.near + first))
    limit = torch.tensor([rule.limit(n) for n in lengths.tolist()])
    assert (far + near <= limit).all() and (near >= 1).all()
    long = lengths > 2 * rule.most
    assert ((far + near)[long] >= limit[long] - 2 * rule.block).all()
    assert (parts.distance < rule.local).all() and (parts.blocks <= rule.topk).all()


def test_without_a_budget_the_parts_are_the_papers() -> None:
    rule = RepresentedBlocks()
    parts = rule.parts(torch.tensor([100_000]), torch.tensor([128]))
    assert [int(x) for x in parts] == [4096 + 127, 4096, 16, 4095]
    assert rule.first_tokens(100_000) == 128 and rule.first_tokens(5) == 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [1, 64, 127, 1000])
def test_state_bytes_are_the_tensors(slots: int, dtype: torch.dtype) -> None:
    facts = LayerFacts(0, 4, HEADS * GROUP, HEADS, DIM, dtype, torch.device("cpu"), 1.0)
    for rule in (SMALL, RepresentedBlocks(0.3)):
        held = sum(t.untyped_storage().nbytes() for t in rule.begin(facts, slots).values())
        assert rule.state_bytes(facts, slots) == held


# ------------------------------------------------------------------ in the engine


@pytest.mark.parametrize("place", ["", "+host", "+paged:block=4"])
@pytest.mark.parametrize("budget", ["", "0.4,"])
@pytest.mark.parametrize("arch", ["llama", "gpt_oss"])
def test_no_logit_depends_on_company_or_place(arch: str, budget: str, place: str) -> None:
    spec = f"infllm:{budget}{SMALL_SPEC}{place}"
    lm, ids = lm_of(arch), prompts(40, 7, 23, 31)
    together = tokens(lm, ids, spec, 14)
    assert together == [tokens(lm, [one], spec, 14)[0] for one in ids]
    assert together == tokens(lm, ids, f"infllm:{budget}{SMALL_SPEC}", 14)
    assert together != tokens(lm, ids, "full", 14)


def check_held(cache: Any, full: Any, left: list[int]) -> None:
    """What has left the window is held as if at position 0, the rest at its own position; values as they were."""
    layer, plain = cache.layers[0], full.layers[0]  # the first layer's keys do not depend on what was read before
    assert layer.state["marks"][:, 1].tolist() == left
    keys, want = layer.store.keys(), plain.store.keys()
    position = torch.arange(keys.shape[2]).expand(keys.shape[:3])
    turned = layer.to_origin(want, torch.where(position < torch.tensor(left).view(-1, 1, 1), position, 0))
    for row in range(len(left)):
        n = int(layer.store.lengths[row, 0])
        torch.testing.assert_close(keys[row, :, :n], turned[row, :, :n], atol=1e-4, rtol=1e-4)


def left_of(length: int) -> int:
    """Tokens that have left the window of ``SMALL``."""
    return SMALL.init + (length - SMALL.init - SMALL.local) // SMALL.block * SMALL.block


@pytest.mark.parametrize("place", ["", "+host", "+paged:block=4"])
def test_keys_are_turned_back_once(place: str) -> None:
    """In decode, in a later turn, in a fork and its parent."""
    lm, ids = lm_of("llama"), prompts(40, 23)
    caches = [lm.new_cache(spec) for spec in (f"infllm:{SMALL_SPEC}{place}", "full")]
    for cache in caches:
        lm.prefill(cache, ids, reserve=40)
        for token in range(9):
            lm.step(cache, torch.tensor([token + 5, token + 7]))
    check_held(*caches, [left_of(49), left_of(32)])
    for cache in caches:
        lm.extend(cache, 1, prompts(15)[0])
        lm.step(cache, torch.tensor([4, 5]))
    check_held(*caches, [left_of(50), left_of(48)])
    for cache in caches:
        cache.select_rows([1, 0, 1])
        for token in range(6):
            lm.step(cache, torch.tensor([token + 3, token + 9, token + 20]))
    check_held(*caches, [left_of(54), left_of(56), left_of(54)])


def test_rows_of_which_fewer_leave_at_once() -> None:
    """One row's first three tokens leave in the step in which another's block of four does."""
    lm = lm_of("llama")
    caches = [lm.new_cache(spec) for spec in (f"infllm:{SMALL_SPEC}", "full")]
    for cache in caches:
        lm.prefill(cache, prompts(7, 23), reserve=9)
        for token in range(5):
            lm.step(cache, torch.tensor([token + 5, token + 7]))
    check_held(*caches, [left_of(12), left_of(28)])


@pytest.mark.parametrize("budget", ["", "0.4,"])
def test_a_later_turn_by_chunks_is_the_turn_in_one_go(budget: str) -> None:
    def talk(mode: str) -> Tensor:
        lm = lm_of("llama")
        cache = lm.new_cache(f"infllm:{budget}{SMALL_SPEC},prefill={mode}")
        lm.prefill(cache, prompts(40, 23), reserve=40)
        for token in range(5):
            lm.step(cache, torch.tensor([token + 5, token + 7]))
        logits = [lm.extend(cache, 1, prompts(26)[0])]
        for token in range(5):
            logits.append(lm.step(cache, torch.tensor([token + 11, token + 17])))
        return torch.cat(logits)

    torch.testing.assert_close(talk("chunked:7"), talk("flash"), atol=1e-3, rtol=1e-3)


def test_a_prompt_inside_the_window_may_outgrow_it() -> None:
    """The number of first tokens is fixed by the prompt; what generation adds is divided into blocks as it comes."""
    lm = lm_of("llama")
    cache = lm.new_cache(f"infllm:{SMALL_SPEC}")
    logits = lm.prefill(cache, prompts(2, 5), reserve=3)  # the store grows
    for _ in range(40):
        logits = lm.step(cache, logits.argmax(-1))
    for layer in cache.layers:
        assert layer.state["marks"][:, :2].tolist() == [[3, left_of(42)], [3, left_of(45)]]
        assert layer.selection is not None
        assert (layer.selection.count == 3 + 2 * 4).all()
        near = [42 - left_of(42), 45 - left_of(45)]
        assert layer.selection.beside is not None and layer.selection.beside.count[:, 0].tolist() == near


@pytest.mark.parametrize("init", [0, 3])
def test_turns_beyond_what_was_reserved(init: int) -> None:
    """The block keys grow with the store."""
    lm, logits = lm_of("llama"), []
    for reserve in (1, 200):
        cache = lm.new_cache(f"infllm:init={init},local=9,block=4,topk=2,repr=2")
        lm.prefill(cache, prompts(40, 23), reserve=reserve)
        lm.step(cache, torch.tensor([4, 5]))
        lm.extend(cache, 1, prompts(99)[0])
        logits.append([lm.step(cache, torch.tensor([token, 5])) for token in range(4)][-1])
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


def test_heads_decide_together() -> None:
    lm = lm_of("llama")
    cache = lm.new_cache(f"infllm:{SMALL_SPEC}")
    lm.step(cache, lm.prefill(cache, prompts(40), reserve=3).argmax(-1))
    for layer in cache.layers:
        for part in layer.selection.parts():
            assert (part.index == part.index[:, :1]).all() and (part.count == part.count[:, :1]).all()


# -------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("infllm:block=0", "block must be at least 1"),
        ("infllm:repr=200", "repr=200 representatives do not fit"),
        ("infllm:repr=0", "repr"),
        ("infllm:local=0", "local"),
        ("infllm:init=-1", "init"),
        ("infllm:topk=-1", "topk"),
        ("infllm:100,local=200", "local=200 is above the budget of 100 tokens"),
        ("infllm:1,init=2", "init=2 is above the budget of 1 tokens"),
        ("h2o:0.5+infllm", "follow one another"),
        ("infllm+quest", "both answer 'read'"),
    ],
)
def test_bad_parameters(spec: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(spec)


def test_encoders_do_not_go_with_turned_keys() -> None:
    class Coded(Encode):
        """Not raw, as every subclass."""

    strategy = replace(parse("infllm"), encode=Coded())
    with pytest.raises(UserError, match="coded twice"):
        strategy.read.check(strategy)


def test_learned_positions_cannot_be_turned() -> None:
    lm = lm_of("opt")
    with pytest.raises(UserError, match="positions"):
        lm.prefill(lm.new_cache("infllm"), prompts(40), reserve=4)


def test_keep_rules_that_evict_nothing_are_welcome() -> None:
    lm, ids = lm_of("llama"), prompts(40, 23)
    assert tokens(lm, ids, f"h2o:1.0+infllm:{SMALL_SPEC}") == tokens(lm, ids, f"infllm:{SMALL_SPEC}")
