"""The engine as a user drives it: stop tokens, sampling, later turns, forks of a conversation."""

from __future__ import annotations

import pytest
import torch
from specs import ARCHS, LOSSLESS, LOSSY, lm_of, prompts, served, tokens
from tiny import KV_HEADS, tiny_model

from kvatlas.engine.clock import Clock
from kvatlas.engine.lm import LM
from kvatlas.engine.sampling import Sampling

RAGGED = (30, 17, 23)


# ---------------------------------------------------------------------------- the loop


def test_a_generation_says_what_it_did() -> None:
    lm = lm_of("llama")
    made = lm.generate(prompts(*RAGGED), "full", max_new_tokens=6)
    assert [g.prompt_tokens for g in made] == list(RAGGED)
    assert [g.finish for g in made] == ["length"] * 3
    assert [len(g.ids) for g in made] == [6] * 3
    assert made[0].text == ""  # no tokenizer


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "infinigen:0.3", "paged"])
def test_stop_tokens_end_a_sequence_and_no_other(spec: str) -> None:
    """The stop token is left out; the others go on undisturbed; the loop ends when all have stopped."""
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    free = tokens(lm, ids, spec, 12)
    stop = next(t for t in free[1][2:] if t not in free[0])
    made = lm.generate(ids, spec, max_new_tokens=12, stop=[stop])
    for row, got in zip(free, made):
        cut = row.index(stop) if stop in row else 12
        assert got.ids == row[:cut] and got.finish == ("stop" if cut < 12 else "length")
    firsts = {row[0] for row in free}
    assert [g.ids for g in lm.generate(ids, spec, max_new_tokens=12, stop=firsts)] == [[], [], []]  # type: ignore[arg-type]
    steps = list(lm.stream(ids, spec, 12, Sampling(), firsts))
    assert steps == [[-1, -1, -1]]


def test_a_stop_token_as_the_very_last_one_is_a_stop() -> None:
    lm, ids = lm_of("llama"), prompts(23)
    free = tokens(lm, ids, "full", 8)[0]
    last = next(n for n in range(1, 8) if free[n] not in free[:n])
    made = lm.generate(ids, "full", max_new_tokens=last + 1, stop=[free[last]])[0]
    assert made.ids == free[:last] and made.finish == "stop"


def test_the_models_own_stop_tokens_are_the_default() -> None:
    model = tiny_model("llama", seed=5)
    lm = LM(model)
    free = tokens(lm, prompts(23), "full", 8)[0]
    model.generation_config.eos_token_id = [free[3], 9999]
    assert lm.stop_ids() == [free[3], 9999]
    assert lm.generate(prompts(23), "full", max_new_tokens=8)[0].ids == free[: free.index(free[3])]
    assert lm.generate(prompts(23), "full", max_new_tokens=8, stop=[])[0].ids == free


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "random:0.3"])
def test_sampling_is_reproducible_and_its_own_for_each_sequence(spec: str) -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)

    def sampled(ids: list[list[int]], seed: int = 3) -> list[list[int]]:
        return [g.ids for g in lm.generate(ids, spec, max_new_tokens=10, temperature=1.0, top_p=0.9, seed=seed)]

    once = sampled(ids)
    assert once == sampled(ids) != sampled(ids, seed=4)
    assert sampled(ids[:1]) == once[:1], "company does not matter"
    same = sampled([ids[0], ids[0]])
    assert same[0] == once[0] != same[1]
    assert once != tokens(lm, ids, spec)
    cold = [g.ids for g in lm.generate(ids, spec, max_new_tokens=10, temperature=1e-4, seed=3)]
    assert cold == tokens(lm, ids, spec), "cold sampling is greedy"


def test_streaming_gives_what_generate_gives() -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    steps = list(lm.stream(ids, "h2o:0.3", 7, Sampling(), set()))
    assert [list(row) for row in zip(*steps)] == tokens(lm, ids, "h2o:0.3", 7)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(arch: str, length: int) -> None:
    from specs import theirs

    lm, ids = lm_of(arch), prompts(length)
    want = theirs(lm.model, ids)
    assert tokens(lm, ids, "full") == want
    for spec in served(arch, LOSSY):
        assert len(tokens(lm, ids, spec, 5)[0]) == 5, spec


# --------------------------------------------------------------------------- later turns


def talk(lm: LM, spec: str, turns: list[list[int]], answer: int = 4) -> torch.Tensor:
    """Two sequences; a prompt, an answer, and for the second sequence later turns; the logits after the last turn."""
    cache = lm.new_cache(spec)
    token = lm.prefill(cache, [prompts(19, seed=8)[0], turns[0]], reserve=4).argmax(-1)
    logits = None
    for turn in turns[1:]:
        for _ in range(answer):
            token = lm.step(cache, token).argmax(-1)
        logits = lm.extend(cache, 1, turn)
        token = torch.stack([token[0], logits[0].argmax()])
    assert logits is not None
    return logits


def one_shot(lm: LM, turns: list[list[int]], answer: int = 4) -> torch.Tensor:
    """The same text, its answers included, read in one go by ``full``."""
    cache = lm.new_cache("full")
    text = list(turns[0])
    logits = lm.prefill(cache, [text], reserve=4)
    for turn in turns[1:]:
        for _ in range(answer):
            token = int(logits.argmax())
            text.append(token)
            logits = lm.prefill(lm.new_cache("full"), [text], reserve=1)
        text += turn
        logits = lm.prefill(lm.new_cache("full"), [text], reserve=1)
    return logits


TURNS = [prompts(30)[0], prompts(11)[0], prompts(1)[0], prompts(24)[0]]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_later_turn_is_as_if_all_had_been_one_prompt(arch: str) -> None:
    """Sliding layers too: a turn longer than their window, and one of a single token."""
    lm = lm_of(arch)
    torch.testing.assert_close(talk(lm, "full", TURNS), one_shot(lm, TURNS), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("spec", [s for s in LOSSLESS if s != "full"])
@pytest.mark.parametrize("mode", ["", "prefill=chunked:7"])
def test_later_turns_of_lossless_strategies(spec: str, mode: str) -> None:
    lm = lm_of("llama")
    chosen = spec + ("," if ":" in spec.split("+")[-1] else ":") + mode if mode else spec
    torch.testing.assert_close(talk(lm, chosen, TURNS), talk(lm, "full", TURNS), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("arch", "spec"), [*(("llama", s) for s in LOSSY), *(("gpt_oss", s) for s in LOSSY[::4])])
def test_later_turns_of_the_others(arch: str, spec: str) -> None:
    """A turn attends to what is left and to itself, then the rule evicts down to the first prompt's budget."""
    lm = lm_of(arch)
    got = talk(lm, spec, TURNS)
    assert bool(torch.isfinite(got).all())
    assert not torch.allclose(got, talk(lm, "full", TURNS), atol=1e-2)
    cache = lm.new_cache(spec)
    token = lm.prefill(cache, prompts(30, 19), reserve=4).argmax(-1)
    for _ in range(3):
        token = lm.step(cache, token).argmax(-1)
    other = [layer.kept_positions()[1] for layer in cache.layers]
    lm.extend(cache, 0, prompts(24)[0])
    assert cache.seen.tolist() == [57, 22]
    for layer, before in zip(cache.layers, other):
        first, second = layer.kept_positions()
        assert torch.equal(second, before), "the other sequence is not touched"
        if not layer.facts.windowed:
            left = layer.keep.plan(30).get("capacity", 57)
            later = 27 if layer.keep.grows() else 0  # a rule that chooses once keeps what comes after
            assert first.shape == (KV_HEADS, min(57, left + later))
    lm.step(cache, token)


@pytest.mark.parametrize("spec", ["h2o:0.3", "streaming:0.3", "random:0.3", "infinigen:0.3,pool=0.5", "h2o:0.3+host"])
def test_a_later_turn_by_chunks_is_the_turn_in_one_go(spec: str) -> None:
    lm = lm_of("llama")
    got = talk(lm, spec + ("," if "+" not in spec else ":") + "prefill=chunked:7", TURNS)
    torch.testing.assert_close(got, talk(lm, spec, TURNS), atol=1e-3, rtol=1e-3)


def test_the_question_may_come_after_compression() -> None:
    """All but the last token is prefilled and compressed, then the last goes through the cache: budgets hold."""
    lm, ids = lm_of("llama"), prompts(40)
    cache = lm.new_cache("h2o:0.3")
    lm.prefill(cache, [ids[0][:-1]], reserve=4)
    late = lm.step(cache, torch.tensor([ids[0][-1]]))
    assert not torch.allclose(late, lm.prefill(lm.new_cache("h2o:0.3"), ids, reserve=4), atol=1e-2)
    assert cache.layers[0].kept_positions()[0].shape == (KV_HEADS, int(39 * 0.3))


# -------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "infinigen:0.3", "host", "oracle:0.3+paged"])
def test_a_steps_time_is_split_without_counting_twice(spec: str) -> None:
    import time

    lm = lm_of("llama")
    cache = lm.new_cache(spec, clock=Clock(True))
    token = lm.prefill(cache, prompts(*RAGGED), reserve=9).argmax(-1)
    assert set(cache.clock.seconds) == {"compress"}
    cache.clock.reset()
    began = time.perf_counter()
    for _ in range(3):
        token = lm.step(cache, token).argmax(-1)
    spent = time.perf_counter() - began
    assert set(cache.clock.seconds) == {"append", "select", "fetch", "attend", "drop"}
    assert all(seconds >= 0 for seconds in cache.clock.seconds.values())
    assert 0 < sum(cache.clock.seconds.values()) < spent


def test_measuring_and_diagnosing_change_no_token() -> None:
    lm, ids = lm_of("llama"), prompts(*RAGGED)
    for spec in ("full", "h2o:0.3", "infinigen:0.3", "oracle:0.2"):
        cache = lm.new_cache(spec, clock=Clock(True, diagnose=True))
        token = lm.prefill(cache, ids, reserve=9).argmax(-1)
        out = [token]
        for _ in range(9):
            out.append(lm.step(cache, out[-1]).argmax(-1))
        assert torch.stack(out, 1).tolist() == tokens(lm, ids, spec)
        weights = cache.layers[3].weights
        assert weights is not None
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reused_model_object_serves_many_strategies_at_once(dtype: torch.dtype) -> None:
    """Caches of several strategies step in turns on one model."""
    lm, ids = lm_of("llama", dtype), prompts(*RAGGED)
    specs = ["full", "h2o:0.3", "infinigen:0.3", "paged"]
    caches = [lm.new_cache(s) for s in specs]
    last = [lm.prefill(c, ids, reserve=9).argmax(-1) for c in caches]
    out = [[t] for t in last]
    for _ in range(9):
        last = [lm.step(c, t).argmax(-1) for c, t in zip(caches, last)]
        for row, token in zip(out, last):
            row.append(token)
    for spec, row in zip(specs, out):
        assert torch.stack(row, 1).tolist() == tokens(lm, ids, spec)
