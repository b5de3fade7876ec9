"""The bridge: a user's own ``model.generate`` under any strategy, and the model as before when ours is not asked."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from specs import ALL, ARCHS, NO_ROPE, lm_of, padded, prompts, served, theirs, tokens
from tiny import VOCAB, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

import kvatlas
from kvatlas.engine.lm import LM
from kvatlas.errors import UserError
from kvatlas.model.bridge import NAME, AtlasCache, bridge_of

RAGGED = (30, 17, 23)
SOME = ("full", "paged", "streaming:0.3", "h2o:0.3", "infinigen:0.3,pool=0.5")
CELLS = [(a, s) for a in ARCHS for s in (served(a, ALL) if a == "llama" else served(a, SOME))]


def own_model(arch: str = "llama", **config: Any) -> Any:
    """A model that no other test has put hooks on."""
    return tiny_model(arch, seed=5, **config)


def hooks(model: Any) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def settle(model: Any) -> None:
    """Let caches that nobody holds go, and the model notice it."""
    gc.collect()
    model(input_ids=torch.tensor([[3, 4]]))


# ------------------------------------------------------------------ same as the engine


@pytest.mark.parametrize(("arch", "spec"), CELLS)
def test_generate_gives_the_engines_tokens(arch: str, spec: str) -> None:
    """A left-padded batch, and one sequence."""
    lm, ids = lm_of(arch, lean=False), prompts(*RAGGED)
    constants = lm.constants(lm.new_cache(spec).strategy)
    for part in (ids, ids[1:2]):
        kv = lm.new_cache(spec)
        cache = AtlasCache(kv, lm.facts.layers)
        bridge_of(lm.model).watch(cache)
        assert theirs(lm.model, part, 8, cache=cache) == tokens(lm, part, spec, 8)
        assert kv.seen.tolist() == [len(i) + 7 for i in part]
    assert constants is lm.constants(kv.strategy), "calibrated once"


@pytest.mark.parametrize("arch", ARCHS)
def test_the_public_cache_is_exact(arch: str) -> None:
    model, ids = own_model(arch), prompts(*RAGGED)
    want = theirs(model, ids)
    assert theirs(model, ids, cache=kvatlas.cache("full", model)) == want
    assert theirs(model, ids, cache=kvatlas.cache("paged", model, reserve=1)) == want
    assert theirs(model, ids, cache=kvatlas.cache("infinigen:1.0,alpha=inf", model)) == want
    assert theirs(model, ids, cache=kvatlas.cache("h2o:0.3", model)) != want


@pytest.mark.parametrize("spec", ["full", "h2o:0.3", "infinigen:0.2"])
def test_right_padding(spec: str) -> None:
    """A sequence's logits are those it has alone; steps after it stand at their true positions."""
    lm, ids = lm_of("llama", lean=False), prompts(*RAGGED)
    batch = padded(ids, side="right")
    cache = kvatlas.cache(spec, lm.model)
    logits = lm.model(**batch, cache=cache).logits
    last = torch.stack([logits[b, len(i) - 1] for b, i in enumerate(ids)])
    kv = lm.new_cache(spec)
    torch.testing.assert_close(last, lm.prefill(kv, ids, reserve=9), atol=1e-4, rtol=1e-4)
    if spec.startswith("infinigen"):
        return  # calibrated on other tokens
    token = last.argmax(-1)
    for _ in range(4):
        step = lm.model(input_ids=token[:, None], position_ids=kv.seen[:, None], cache=cache).logits[:, -1]
        torch.testing.assert_close(step, lm.step(kv, token), atol=1e-4, rtol=1e-4)
        token = step.argmax(-1)


def test_a_batch_without_a_mask() -> None:
    model, ids = own_model(), torch.tensor(prompts(20, seed=1) + prompts(20, seed=2))
    want = model(input_ids=ids).logits
    got = model(input_ids=ids, cache=kvatlas.cache("full", model)).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_inputs_by_embedding() -> None:
    model, ids = own_model(), torch.tensor(prompts(20))
    embedded = model.get_input_embeddings()(ids)
    got = model(inputs_embeds=embedded, cache=kvatlas.cache("h2o:0.3", model)).logits
    torch.testing.assert_close(got, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------- positions


@pytest.mark.parametrize("spec", ["h2o:0.3", "streaming:6"])
def test_positions_stay_true_after_eviction(spec: str) -> None:
    """The cache counts what went in, not what stayed; the model is given those positions."""
    model, ids = own_model(), prompts(30)
    cache, given = kvatlas.cache(spec, model), []
    hook = model.model.register_forward_pre_hook(
        lambda m, args, kwargs: given.append(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    theirs(model, ids, new=8, cache=cache)
    hook.remove()
    assert given == [list(range(30)), *([n] for n in range(30, 37))]
    assert cache.get_seq_length() == 37 and cache.get_mask_sizes(1, 0) == (38, 0)
    kv = cache.kv
    assert kv.seen.tolist() == [37]
    assert all(layer.kept_positions()[0].shape[1] < 12 for layer in kv.layers)
    assert max(layer.kept_positions()[0].max() for layer in kv.layers) == 36


# ----------------------------------------------------------------------- richer generation


@pytest.mark.parametrize("spec", ["full", "paged", "host", "h2o:0.3", "infinigen:0.3", "streaming:0.3"])
def test_beam_search(spec: str) -> None:
    """Beams are reordered rows; ``full``'s are transformers' own."""
    model, ids = own_model(), prompts(20, 13)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    got = theirs(model, ids, cache=kvatlas.cache(spec, model), **beams)
    assert len(got) == 4
    want = theirs(model, ids, **beams)
    assert (got == want) == (spec in ("full", "paged", "host"))
    assert got == theirs(model, ids, cache=kvatlas.cache(spec, model), **beams)


def test_several_samples_of_a_prompt() -> None:
    model, ids = own_model(), prompts(20, 13)
    sampled = {"do_sample": True, "num_return_sequences": 3, "top_k": 20}
    torch.manual_seed(1)
    want = theirs(model, ids, **sampled)
    torch.manual_seed(1)
    assert theirs(model, ids, cache=kvatlas.cache("paged", model), **sampled) == want
    assert len({tuple(row) for row in want}) > 2


@pytest.mark.parametrize("spec", ["full", "paged"])
def test_rows_repeated_and_selected_by_transformers_names(spec: str) -> None:
    model, ids = own_model(), prompts(20, 13)
    ours, own = kvatlas.cache(spec, model), DynamicCache(config=model.config)
    for cache in (ours, own):
        model(**padded(ids), cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        cache.reorder_cache(torch.tensor([2, 1, 0]))
    step = {
        "input_ids": torch.tensor([[5], [6], [7]]),
        "position_ids": torch.tensor([[20], [20], [13]]),
        "attention_mask": torch.cat([padded([*ids[:1], *ids])["attention_mask"], torch.ones(3, 1, dtype=int)], 1),
    }
    torch.testing.assert_close(model(**step, cache=ours).logits, model(**step, cache=own).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("turn", [1, 7])
@pytest.mark.parametrize("lengths", [(20,), (20, 13)])
def test_a_second_turn_continues_the_cache(turn: int, lengths: tuple[int, ...]) -> None:
    """As transformers wants it: the whole text again, with the cache that has seen most of it."""
    model, ids = own_model(), prompts(*lengths)
    answers = {}
    for name, cache in (
        ("own", DynamicCache(config=model.config)),
        ("full", kvatlas.cache("full", model)),
        ("paged", kvatlas.cache("paged", model)),
        ("h2o", kvatlas.cache("h2o:0.4", model)),
    ):
        first = padded(ids)
        more = torch.tensor(prompts(*[turn] * len(ids), seed=9))
        out = model.generate(**first, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, cache=cache)
        text = torch.cat([out, more], 1)
        mask = torch.cat([first["attention_mask"], torch.ones(len(ids), 6 + turn, dtype=int)], 1)
        again = model.generate(
            input_ids=text,
            attention_mask=mask,
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            cache=cache,
        )
        answers[name] = again[:, text.shape[1] :].tolist()
        assert cache.get_seq_length() == text.shape[1] + 5
    assert answers["full"] == answers["own"] == answers["paged"]
    assert answers["h2o"] != answers["own"]


# ------------------------------------------------------------------------- as before


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss"])
def test_the_model_without_our_cache_is_as_before(arch: str, kind: str) -> None:
    """Logits bit by bit, generation with its own caches, config; also while one of our caches lives, and after."""
    if arch == "gpt_oss" and kind == "sdpa":
        pytest.skip("GPT-OSS has no sdpa attention")
    model, ids = own_model(arch), prompts(20, 13)
    model.set_attn_implementation(kind)

    def everything() -> tuple[Any, ...]:
        assert model.config._attn_implementation == kind
        logits = model(**padded(ids)).logits
        static = StaticCache(config=model.config, max_cache_len=64)
        return (
            logits,
            theirs(model, ids),
            theirs(model, ids, cache=static),
            theirs(model, ids, use_cache=False, cache=None),
        )

    before = everything()
    ours = theirs(model, ids, cache=(cache := kvatlas.cache("full", model)))
    during = everything()
    assert ours == before[1]
    del cache
    settle(model)
    for now in (during, everything()):
        assert torch.equal(now[0], before[0])
        assert now[1:] == before[1:]


def test_hooks_are_there_only_while_a_cache_lives() -> None:
    model = own_model()
    assert hooks(model) == 0
    one, two = kvatlas.cache("full", model), kvatlas.cache("h2o:0.3", model)
    count = hooks(model)
    assert count > 0
    theirs(model, prompts(9), cache=one)
    del one
    settle(model)
    assert hooks(model) == count, "one cache still lives"
    theirs(model, prompts(9), cache=two)
    del two
    settle(model)
    assert hooks(model) == 0 and model.config._attn_implementation != NAME


def test_a_caches_memory_goes_with_it() -> None:
    """Nothing keeps a cache alive, not even a cycle that waits for the collector."""
    import weakref

    model = own_model()
    cache = kvatlas.cache("h2o:0.3", model)
    theirs(model, prompts(9), cache=cache)
    gone = weakref.ref(cache.kv)
    gc.collect()
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_the_attention_chosen_later_is_kept() -> None:
    """The user changes the model's attention while our cache lives: that is what it has afterwards."""
    model, ids = own_model(), prompts(20)
    cache = kvatlas.cache("full", model)
    theirs(model, ids, cache=cache)
    model.set_attn_implementation("eager")
    theirs(model, ids, cache=kvatlas.cache("full", model))
    assert model.config._attn_implementation == "eager"
    assert model(input_ids=torch.tensor(ids), output_attentions=True).attentions[0] is not None


@pytest.mark.parametrize("others", ["dynamic", "ours"])
def test_two_threads_on_one_model(others: str) -> None:
    """Each gets what it would get alone, however their forwards interleave."""
    model, ids = own_model(), prompts(20, 13)
    want = {"ours": tokens(LM(model, lean=False), ids, "h2o:0.3", 12), "dynamic": theirs(model, ids, 12)}
    alive = kvatlas.cache("full", model)
    failed: list[str] = []

    def run(kind: str) -> None:
        for _ in range(6):
            cache = kvatlas.cache("h2o:0.3", model) if kind == "ours" else DynamicCache(config=model.config)
            with torch.no_grad():
                got = theirs(model, ids, 12, cache=cache)
            if got != want[kind]:
                failed.append(f"{kind}: {got}")

    threads = [threading.Thread(target=run, args=(kind,)) for kind in ("ours", others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert model.config._attn_implementation != NAME
    del alive


@pytest.mark.parametrize("where", ["mlp", "attention"])
def test_an_exception_within_the_forward_leaves_the_model_as_it_was(where: str) -> None:
    model, ids = own_model(), prompts(20)
    want = theirs(model, ids)
    cache = kvatlas.cache("full", model)
    layer = model.model.layers[2]
    module = layer.mlp if where == "mlp" else layer.self_attn.o_proj

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        theirs(model, ids, cache=cache)
    handle.remove()
    assert model.config._attn_implementation != NAME
    assert theirs(model, ids) == want
    assert theirs(model, ids, cache=kvatlas.cache("full", model)) == want


# ------------------------------------------------------------------------- masks


def test_masks_are_honoured_while_a_cache_lives() -> None:
    """The registered mask function: without it causality and padding are lost silently."""
    model, ids = own_model(), prompts(20, 9)
    want = model(**padded(ids)).logits
    ours = model(**padded(ids), cache=kvatlas.cache("full", model)).logits
    real = padded(ids)["attention_mask"].bool()
    torch.testing.assert_close(ours[real], want[real], atol=1e-4, rtol=1e-4)
    other = padded(ids)
    other["input_ids"] = torch.where(real, other["input_ids"], 77)  # what stands in the padding must not matter
    again = model(**other, cache=kvatlas.cache("full", model)).logits
    assert torch.equal(again[real], ours[real])
    longer = [ids[0] + [5, 6], ids[1]]
    prefix = model(**padded(longer), cache=kvatlas.cache("full", model)).logits
    torch.testing.assert_close(prefix[0, :20], ours[0], atol=1e-4, rtol=1e-4)  # no row sees what comes later


BAD_MASKS = {
    "a hole": (torch.tensor([[1, 1, 0, 1, 1]]), "holes"),
    "nothing": (torch.tensor([[0, 0, 0, 0, 0]]), "no token"),
    "four dimensions": (torch.zeros(1, 1, 5, 5), "2-D attention_mask"),
    "ready-made": ({"full_attention": torch.zeros(1, 1, 5, 5)}, "2-D attention_mask"),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_masks_that_cannot_be_served(name: str) -> None:
    mask, message = BAD_MASKS[name]
    model = own_model()
    with pytest.raises(UserError, match=message):
        model(input_ids=torch.tensor([[3, 4, 5, 6, 7]]), attention_mask=mask, cache=kvatlas.cache("full", model))
    assert model.config._attn_implementation != NAME
    model(input_ids=torch.tensor([[3, 4, 5, 6, 7]]))


# ------------------------------------------------------------- what cannot be served


def random_model(kind: str, **config: Any) -> Any:
    torch.manual_seed(3)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "max_position_embeddings": 128,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**common, **config}))
    for weight in model.parameters():
        weight.data.normal_(std=0.2)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt_neox", {"intermediate_size": 64}),
        ("gpt_neox", {"intermediate_size": 64, "use_parallel_residual": False, "rotary_pct": 1.0}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
        ("falcon", {"multi_query": True, "alibi": False}),
        ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
        ("phi3", {"intermediate_size": 64}),
        ("olmo2", {"intermediate_size": 64}),
        ("cohere", {"intermediate_size": 64}),
        ("starcoder2", {"intermediate_size": 64, "sliding_window": None}),
    ],
)
@pytest.mark.parametrize("spec", ["full", "h2o:0.3"])
def test_other_decoders_are_exact_or_refused(kind: str, config: dict[str, Any], spec: str) -> None:
    """Whatever else transformers has: its own tokens, or one clear line."""
    model = random_model(kind, **config)
    ids = prompts(20, 13)
    want = theirs(model, ids)
    try:
        got = theirs(model, ids, cache=kvatlas.cache(spec, model))
    except UserError as error:
        assert "\n" not in str(error) and type(model).__name__ in str(error)
        assert theirs(model, ids) == want
        return
    if spec == "full":
        assert got == want
    assert got == tokens(LM(model), ids, spec)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("gemma2", {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}, "caps its attention logits"),
        ("mamba", {"intermediate_size": 64, "state_size": 8}, "without attention|no attention"),
    ],
)
def test_architectures_that_are_refused(kind: str, config: dict[str, Any], message: str) -> None:
    model = random_model(kind, **config)
    with pytest.raises(UserError, match=message):
        kvatlas.cache("full", model)
    with pytest.raises(UserError, match=message):
        LM(model)


def test_an_encoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4))
    with pytest.raises(UserError, match="has an encoder"):
        kvatlas.cache("full", model)


def test_streaming_needs_rope() -> None:
    model = own_model(NO_ROPE[0])
    with pytest.raises(UserError, match=r"learned positions.*cannot be rotated"):
        theirs(model, prompts(20), cache=kvatlas.cache("streaming:0.3", model))
    theirs(model, prompts(20), cache=kvatlas.cache("streaming:0.3,positions=true", model))


# ------------------------------------------------------------------------ wrong use


def test_a_cache_of_another_model_is_refused() -> None:
    """Whether the other model has a bridge of its own or not, and also one with as many layers."""
    one, other = own_model(), own_model()
    ids = torch.tensor(prompts(9))
    with pytest.raises(UserError, match="made for"):
        other(input_ids=ids, cache=kvatlas.cache("full", one))
    alive = kvatlas.cache("full", other)
    with pytest.raises(UserError, match="made for"):
        other(input_ids=ids, cache=kvatlas.cache("full", one))
    assert other.config._attn_implementation != NAME
    torch.testing.assert_close(
        other(input_ids=ids, cache=alive).logits, other(input_ids=ids).logits, atol=1e-4, rtol=1e-4
    )


def test_a_cache_serves_one_batch() -> None:
    model = own_model()
    cache = kvatlas.cache("full", model)
    theirs(model, prompts(9, 7), cache=cache)
    with pytest.raises(UserError, match="holds 2 sequences, and the call has 3"):
        model(input_ids=torch.tensor([[1], [2], [3]]), cache=cache)
    with pytest.raises(UserError, match="cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(UserError, match="serves one batch"):
        cache.reset()


def test_unknown_strategies_are_told_at_once() -> None:
    with pytest.raises(UserError, match="did you mean 'h2o'"):
        kvatlas.cache("h2p:0.3", own_model())


def test_the_package_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = "import sys, kvatlas; print(*sorted(m for m in ('torch', 'transformers', 'numpy') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
    assert {"load", "cache", "replay"} <= set(dir(kvatlas))
    with pytest.raises(AttributeError, match="lood"):
        kvatlas.lood  # noqa: B018
