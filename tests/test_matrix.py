"""Every preset on every architecture: it runs, is exact where it says so, acts where it does not, and frees memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sizes import OF_THEIR_OWN, closed_form, element, parts_of, payload_bytes
from specs import (
    ALL,
    ARCHS,
    ENCODED,
    EVICTING,
    LOSSLESS,
    LOSSY,
    READING,
    TOGETHER,
    lm_of,
    prompts,
    served,
    theirs,
    tokens,
)
from tiny import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, WINDOW

from kvatlas.engine.cache import KVCache
from kvatlas.engine.lm import LM
from kvatlas.strategy.spec import parse

RAGGED = (40, 23, 31)
NEW = 10
CELLS = [(arch, spec) for arch in ARCHS for spec in served(arch, ALL)]
LOSSLESS_CELLS = [(arch, spec) for arch in ARCHS for spec in served(arch, LOSSLESS) if spec != "full"]


def ran(lm: LM, spec: str, ids: list[list[int]], steps: int = NEW) -> tuple[KVCache, torch.Tensor]:
    """A cache after a prefill and some greedy steps, and the last logits."""
    cache = lm.new_cache(spec)
    logits = lm.prefill(cache, ids, reserve=steps + 1)
    for _ in range(steps):
        logits = lm.step(cache, logits.argmax(-1))
    return cache, logits


# --------------------------------------------------------------------- exactness


@pytest.mark.parametrize("arch", ARCHS)
def test_full_gives_transformers_tokens(arch: str) -> None:
    """Alone and left-padded, beyond the models' own windows."""
    lm, ids = lm_of(arch), prompts(*RAGGED, 5)
    want = [theirs(lm.model, [one])[0] for one in ids]
    assert theirs(lm.model, ids) == want, "transformers agrees with itself"
    assert tokens(lm, ids, "full") == want
    assert [tokens(lm, [one], "full")[0] for one in ids] == want


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_the_lean_decode_changes_no_token(arch: str) -> None:
    ids = prompts(*RAGGED)
    for spec in ("full", "h2o:0.3", "infinigen:0.2"):
        assert tokens(lm_of(arch), ids, spec) == tokens(lm_of(arch, lean=False), ids, spec)


@pytest.mark.parametrize(("arch", "spec"), LOSSLESS_CELLS)
def test_lossless_presets_give_the_tokens_of_full(arch: str, spec: str) -> None:
    assert parse(spec).lossless() or spec.endswith("1000") or "pool=1000" in spec
    lm, ids = lm_of(arch), prompts(*RAGGED)
    assert tokens(lm, ids, spec) == tokens(lm, ids, "full")


@pytest.mark.parametrize("spec", LOSSLESS)
def test_lossless_logits_are_within_rounding(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    torch.testing.assert_close(ran(lm, spec, ids)[1], ran(lm, "full", ids)[1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("arch", "spec"), CELLS)
def test_every_cell_runs(arch: str, spec: str, dtype: torch.dtype) -> None:
    """A batch of one and a ragged one; finite numbers, and in float32 no logit depends on company."""
    lm, ids = lm_of(arch, dtype), prompts(*RAGGED)
    together, logits = ran(lm, spec, ids, 3)
    _, alone = ran(lm, spec, ids[1:2], 3)
    assert logits.shape == (3, VOCAB) and bool(torch.isfinite(logits).all() and torch.isfinite(alone).all())
    assert together.seen.tolist() == [n + 3 for n in RAGGED]
    if dtype == torch.float32:
        torch.testing.assert_close(alone[0], logits[1], atol=1e-3, rtol=1e-3)


# ----------------------------------------------------------- the strategy acts


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss", "opt"])
@pytest.mark.parametrize("spec", EVICTING)
def test_something_was_really_evicted(arch: str, spec: str) -> None:
    """Kept positions are the resolved budget (+ 1 slot in the store), and the logits are not full's."""
    if spec not in served(arch, [spec]):
        pytest.skip("learned positions")
    lm, ids = lm_of(arch), prompts(*RAGGED)
    cache, logits = ran(lm, spec, ids)
    own = [layer for layer in cache.layers if not layer.facts.windowed]
    assert len(own) >= 2
    for layer in own:
        for row, kept in enumerate(layer.kept_positions()):
            budget = layer.keep.plan(len(ids[row]))["capacity"]
            if not layer.keep.grows():  # what generation adds is counted inside
                pass
            else:
                budget += NEW
            assert budget < len(ids[row]) + NEW
            assert kept.shape == (KV_HEADS if arch != "opt" else 4, budget)
            slots = max(layer.keep.plan(n)["capacity"] for n in RAGGED) + (NEW if layer.keep.grows() else 1)
            assert layer.store.filled <= slots
    assert cache.realised().kept < 0.7
    assert not torch.allclose(logits, ran(lm, "full", ids)[1], atol=1e-3)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss", "opt"])
@pytest.mark.parametrize("spec", READING)
def test_something_was_really_left_unread(arch: str, spec: str) -> None:
    lm, ids = lm_of(arch), prompts(*RAGGED)
    cache, logits = ran(lm, spec, ids)
    acting = [layer for layer in cache.layers if layer.read.selects]
    assert acting, "no layer reads by choice"
    for layer in acting:
        assert layer.selection is not None
        held = layer.store.lengths
        count = layer.selection.counts()
        assert (count <= (held * 0.3).long() + 6).all() and (count < held).all()
        assert layer.read_tokens() < 0.6 * float(held.sum()) / layer.facts.kv_heads
    assert cache.realised().kept == 1.0 and cache.realised().read < 0.95
    assert not torch.allclose(logits, ran(lm, "full", ids)[1], atol=1e-3)


KL = {"int8": 1e-3, "int4": 1.0, "kvquant": 1.0, "kvquant:bits=3": 2.0, "kvquant:bits=2": 5.0}
"""Nats on these tiny random models of 16-dimensional heads, where one bit is worth far more than in a trained one."""


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "opt", "gpt_oss"])
@pytest.mark.parametrize("spec", ENCODED)
def test_encoders_stay_near(arch: str, spec: str) -> None:
    """KL to full after a prefill and ten teacher-forced steps; something is lost, and the more bits the less."""
    lm, ids = lm_of(arch), prompts(*RAGGED)
    follow = torch.tensor(prompts(NEW, seed=5)[0])
    gaps = {}
    for name in (spec, "full"):
        cache = lm.new_cache(name)
        lm.prefill(cache, ids, reserve=NEW + 1)
        gaps[name] = torch.stack([lm.step(cache, token.expand(3)) for token in follow]).double().log_softmax(-1)
    kl = (gaps["full"].exp() * (gaps["full"] - gaps[spec])).sum(-1).mean()
    assert 0 < kl < KL[spec]


@pytest.mark.parametrize("spec", TOGETHER)
@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "opt", "gpt_oss"])
def test_combined_answers_run_whole_and_in_chunks(arch: str, spec: str) -> None:
    """A padded batch and a batch of one, a prompt at once and in chunks: the same strategy, its budget met."""
    if spec not in served(arch, [spec]):
        pytest.skip("learned positions")
    lm, ids = lm_of(arch), prompts(*RAGGED)
    whole, logits = ran(lm, spec, ids, 3)
    parts, _ = ran(lm, by(spec, "chunked:11"), ids, 3)
    _, alone = ran(lm, spec, ids[1:2], 3)
    torch.testing.assert_close(alone[0], logits[1], atol=1e-3, rtol=1e-3)
    acts = whole.strategy.keep.evicts or whole.strategy.read.selects
    for cache in (whole, parts):
        real = cache.realised()
        assert 0 < real.read <= 1 and (not acts or real.read < 0.95 or real.kept < 0.95)
        assert cache.bytes().total == cache.bytes_held(RAGGED, 4) or "disk" in spec


def test_heads_keep_different_tokens() -> None:
    """Selection and storage are per KV head."""
    cache, _ = ran(lm_of("llama"), "h2o:0.3", prompts(40))
    assert any(not torch.equal(*layer.kept_positions()[0]) for layer in cache.layers)


@pytest.mark.parametrize("arch", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "infinigen:0.2", "paged", "host"])
def test_layers_with_their_own_window_hold_no_more_than_it(arch: str, spec: str) -> None:
    """The window's tokens and one slot, whatever the strategy: transformers' own memory there, too."""
    cache, _ = ran(lm_of(arch), spec, prompts(*RAGGED, 7))
    windowed = [layer for layer in cache.layers if layer.facts.windowed]
    assert len(windowed) == LAYERS // 2
    for layer in windowed:
        for row, kept in enumerate(layer.kept_positions()):
            seen = int(layer.seen[row])
            assert kept[0].tolist() == list(range(max(0, seen - WINDOW + 1), seen))
        assert layer.store.column("k").shape[2] <= WINDOW


# ------------------------------------------------------------------------- bytes


def reachable(cache: KVCache) -> int:
    """Bytes of the distinct storages that a cache keeps alive, found by walking its objects (model constants apart)."""
    seen: dict[int, Any] = {}  # kept alive, or a number would come again
    storages: dict[int, int] = {}

    def walk(x: Any) -> None:
        if id(x) in seen:
            return
        seen[id(x)] = x
        if isinstance(x, torch.Tensor):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            for value in x.values():
                walk(value)
        elif isinstance(x, (list, tuple, set)):
            for value in x:
                walk(value)
        elif type(x).__module__.startswith("kvatlas.strategy.place"):
            walk({k: v for k, v in vars(x).items() if k not in ("_rows", "_heads", "_device", "_selected")})

    for layer in cache.layers:
        walk([layer.store, layer.state, list(layer.intake.scratch.values()), layer.archive, layer.shared])
    return sum(storages.values())


@pytest.mark.parametrize("spec", [s for s in ALL if s != "paged:block=4,share=false"])
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("gemma3", torch.bfloat16), ("opt", torch.float32)],
)
def test_bytes_are_the_closed_form_and_the_storage(arch: str, spec: str, dtype: torch.dtype) -> None:
    """Every byte that is said to be held is some tensor's storage, and no other; staging is counted apart."""
    if spec not in served(arch, [spec]):
        pytest.skip("learned positions")
    cache, _ = ran(lm_of(arch, dtype), spec, prompts(*RAGGED), 4)
    held = cache.bytes()
    staging = cache.shared.device_bytes() if cache.shared is not None else 0
    assert held.total == cache.bytes_held(RAGGED, 5)
    own = set(OF_THEIR_OWN) & set(parts_of(spec))
    if not own:
        assert held.total - staging == closed_form(spec, arch, dtype, RAGGED, 5)
    if not own & {"virtual", "disk", "flexgen"}:  # mapped memory and files are no tensors: see their own tests
        assert held.total == reachable(cache)
    payload = 0
    for layer in cache.layers:
        dim = 16
        size = 2 * dim * element(dtype) if layer.facts.windowed else payload_bytes(spec, dim, dtype)
        payload += int(layer.held_tokens() * layer.facts.kv_heads) * size
        if layer.archive is not None:
            coded = sum(c.slot_bytes() for c in layer.archive.layout.columns if c.kind == "payload")
            payload += int(layer.archived_tokens() * layer.facts.kv_heads) * coded
    if "alisa" not in own:  # what is computed again holds no payload
        assert held.device_payload + held.host_payload + held.disk_payload == payload
    assert min(held.device_padding, held.host_padding, held.disk_padding) >= 0


@pytest.mark.parametrize("spec", ["infinigen:0.2,link=100", "infinigen:4,alpha=1.5,partial=0.5,gqa=sum,link=100"])
def test_infinigen_device_bytes_follow_their_formula(spec: str) -> None:
    """Partial keys, and two buffers of the most tokens that a layer may fetch (and the newest one)."""
    cache, _ = ran(lm_of("llama"), spec, prompts(*RAGGED), 6)
    strategy = parse(spec)
    slots = max(RAGGED) + 7
    fetched = 2 * len(RAGGED) * KV_HEADS * (strategy.read.limit(slots) + 1) * 2 * HEAD_DIM * 4
    everything = 2 * len(RAGGED) * KV_HEADS * slots * 2 * HEAD_DIM * 4  # layers 0 and 1 read all, a tile at a time
    assert cache.shared is not None
    assert cache.shared.device_bytes() == fetched + everything


# ----------------------------------------------------------------- prefill modes


def by(spec: str, mode: str) -> str:
    """The same strategy in another prefill mode."""
    return f"{spec}{',' if ':' in spec.split('+')[-1] else ':'}prefill={mode}"


@pytest.mark.parametrize("mode", ["eager", "chunked:7"])
@pytest.mark.parametrize(
    ("arch", "spec"), [*(("llama", s) for s in ("full", *LOSSY)), *(("gpt_oss", s) for s in ("full", *LOSSY[::4]))]
)
def test_prefill_modes_are_exact(arch: str, spec: str, mode: str) -> None:
    """A prompt by chunks, or with its matrix, leaves the same logits behind as in one go."""
    whole, after = ran(lm_of(arch), spec, prompts(*RAGGED), 4)
    parts, same = ran(lm_of(arch), by(spec, mode), prompts(*RAGGED), 4)
    torch.testing.assert_close(same, after, atol=2e-3, rtol=2e-3)
    for one, other in zip(whole.layers, parts.layers):
        assert all(torch.equal(a, b) for a, b in zip(one.kept_positions(), other.kept_positions()))


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "streaming:0.3"])
def test_isolated_chunks_are_not_exact(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(40)
    cache = lm.new_cache(by(spec, "chunked-isolated:7"))
    logits = lm.prefill(cache, ids, reserve=4)
    assert not torch.allclose(logits, lm.prefill(lm.new_cache(spec), ids, reserve=4), atol=1e-2)
    assert int(cache.seen[0]) == 40, "all chunks count"


def test_isolated_chunks_score_only_themselves() -> None:
    """The mass of each chunk's keys sums to its own queries."""
    cache = lm_of("llama").new_cache("h2o:1000,prefill=chunked-isolated:10")
    lm_of("llama").prefill(cache, prompts(40), reserve=4)
    score = cache.layers[0].store.column("score")[0, :, :40]
    torch.testing.assert_close(score.view(KV_HEADS, 4, 10).sum(-1), torch.full((KV_HEADS, 4), 10.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("spec", ["h2o:12", "streaming:12", "random:12", "infinigen:0.5,pool=12"])
def test_evicting_between_chunks_bounds_memory(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time more than the capacity and one chunk are attended to or held."""
    from kvatlas.engine import intake as module

    lm, most, held = lm_of("llama"), [], []
    cache = lm.new_cache(f"{spec},prefill=chunked:8,evict=chunk")
    plain = module.attend_prefill

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Any, **more: Any) -> Any:
        most.append(k.shape[1] + sum(tile.width for tile in more["past"]))
        held.append(max(layer.bytes().total for layer in cache.layers))
        return plain(q, k, v, how, **more)

    monkeypatch.setattr(module, "attend_prefill", watched)
    lm.prefill(cache, prompts(90), reserve=4)
    assert len(most) == LAYERS * 12 and max(most) == 12 + 8
    assert len(set(held)) == (2 if spec.startswith("infinigen") else 1), "the store never grew, and there was no other"
    assert all(kept.shape[1] == 12 for layer in cache.layers for kept in layer.kept_positions())


@pytest.mark.parametrize("spec", ["h2o:0.3", "random:0.3"])
def test_evicting_between_chunks_differs_from_at_the_end(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(90)
    late = lm.prefill(lm.new_cache(f"{spec},prefill=chunked:8"), ids, reserve=4)
    early = lm.prefill(lm.new_cache(f"{spec},prefill=chunked:8,evict=chunk"), ids, reserve=4)
    assert not torch.allclose(late, early, atol=1e-2)
