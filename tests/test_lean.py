"""The lean decode and the projector against transformers' own forward, which they must equal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny import ARCHS, WINDOW, tiny_model, tiny_prompts
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvatlas.errors import UserError
from kvatlas.model.facts import attentions_of, facts_of
from kvatlas.model.lean import LeanDecoder
from kvatlas.model.project import Projector

LEAN = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def causal(layer, q, k, v, x):
    """Attention over the given tokens only, nothing cached."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class Growing:
    """The simplest cache: all keys and values of each layer."""

    def __init__(self):
        self.kv = {}

    def __call__(self, layer, q, k, v, x):
        if layer in self.kv:
            k, v = (torch.cat((old, new), dim=2) for old, new in zip(self.kv[layer], (k, v)))
        self.kv[layer] = (k, v)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", LEAN)
def test_lean_equals_transformers(arch, dtype):
    model = tiny_model(arch, dtype)
    ids, _ = tiny_prompts((20, 20))
    positions = torch.arange(20).expand(2, -1)
    expected = model(ids).logits[:, -1]
    got = LeanDecoder(model)(ids, positions, causal)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05 * expected.abs().max()
    assert (got - expected).abs().max() <= tolerance


@pytest.mark.parametrize("arch", LEAN)
def test_lean_decodes_the_same_tokens(arch):
    model = tiny_model(arch)
    ids, _ = tiny_prompts((20, 20))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[:, 20:]
    lean, cache, got = LeanDecoder(model), Growing(), []
    logits = lean(ids, torch.arange(20).expand(2, -1), cache)
    for step in range(12):
        got.append(logits.argmax(-1))
        logits = lean(got[-1][:, None], torch.full((2, 1), 20 + step), cache)
    assert torch.equal(torch.stack(got, dim=1), expected)


def test_lean_follows_scaled_rope_at_far_positions():
    model = tiny_model("llama", rope_parameters=LLAMA3)
    ids, _ = tiny_prompts((8,))
    positions = torch.arange(300, 308)[None]
    expected = model(ids, position_ids=positions).logits[:, -1]
    assert torch.allclose(LeanDecoder(model)(ids, positions, causal), expected, atol=1e-4)


def test_plain_and_native_products_agree(monkeypatch):
    model = tiny_model("llama")
    ids, _ = tiny_prompts((4, 4))
    positions = torch.arange(4).expand(2, -1)
    first = LeanDecoder(model)(ids, positions, causal)
    monkeypatch.setattr("kvatlas.attention.native.available", lambda: False)
    assert torch.allclose(LeanDecoder(model)(ids, positions, causal), first, atol=1e-4)


def test_merging_takes_no_memory_and_changes_nothing():
    model = tiny_model("qwen2")
    ids, _ = tiny_prompts((20,))
    before = model(ids).logits
    lean = LeanDecoder(model)
    attention = model.model.layers[0].self_attn
    merged = lean.layers[0].qkv
    assert attention.q_proj.weight.data_ptr() == merged.data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == merged.untyped_storage().data_ptr()
    assert torch.equal(model(ids).logits, before)
    again = LeanDecoder(model)
    assert again.layers[0].qkv.data_ptr() == merged.data_ptr()
    assert again.layers[0].qkv.shape == merged.shape


def test_lean_notices_a_converted_model():
    model = tiny_model("llama")
    lean = LeanDecoder(model)
    model.to(torch.bfloat16)
    ids, _ = tiny_prompts((20,))
    got = lean(ids, torch.arange(20)[None], causal)
    assert got.dtype == torch.bfloat16
    assert (got - model(ids).logits[:, -1]).abs().max() <= 0.05 * got.abs().max()


def test_lean_hands_on_the_attention_input():
    model = tiny_model("qwen3")
    projector = Projector(model)
    ids, _ = tiny_prompts((20, 20))
    positions = torch.arange(20).expand(2, -1)

    def check(layer, q, k, v, x):
        assert torch.allclose(projector.project_query(layer, x, positions), q, atol=1e-5)
        return causal(layer, q, k, v, x)

    LeanDecoder(model)(ids, positions, check)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in LEAN])
def test_other_architectures_are_not_lean(arch):
    model = tiny_model(arch)
    assert not LeanDecoder.supports(model)
    with pytest.raises(UserError, match="not a plain Llama-shaped decoder"):
        LeanDecoder(model)


def test_surprises_are_not_lean():
    assert not LeanDecoder.supports(tiny_model("mistral", sliding_window=WINDOW))
    assert not LeanDecoder.supports(tiny_model("llama", hidden_act="gelu"))
    assert not LeanDecoder.supports(tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2))
    adapted = tiny_model("llama")
    adapted.model.layers[1].self_attn.v_proj = torch.nn.Sequential(adapted.model.layers[1].self_attn.v_proj)
    assert not LeanDecoder.supports(adapted)
    assert not LeanDecoder.supports(tiny_model("llama").train())


def spied(model, ids):
    """Per layer: attention's input after the norm and the query that attention really got."""
    inputs, queries = {}, {}

    def spy(module, q, k, v, mask, **kwargs):
        queries[module.layer_idx] = q
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)

    AttentionInterface.register("test_spy", spy)
    for number, attention in enumerate(attentions_of(model)):
        attention.register_forward_pre_hook(
            lambda module, args, kwargs, number=number: inputs.update(
                {number: args[0] if args else kwargs["hidden_states"]}
            ),
            with_kwargs=True,
        )
    model.set_attn_implementation("test_spy")
    model(ids)
    return inputs, queries


@pytest.mark.parametrize("arch", ARCHS)
def test_projected_queries_are_the_models_own(arch):
    model = tiny_model(arch)
    ids, _ = tiny_prompts((40, 40))
    inputs, queries = spied(model, ids)
    positions = torch.arange(40).expand(2, -1)
    projector = Projector(model)
    for layer in range(facts_of(model).layers):
        assert torch.allclose(projector.project_query(layer, inputs[layer], positions), queries[layer], atol=1e-5)


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "opt"])
def test_rotation_by_a_difference(arch):
    model = tiny_model(arch)
    ids, _ = tiny_prompts((40, 40))
    inputs, queries = spied(model, ids)
    here = torch.arange(40).expand(2, -1)
    there = here * 2 + 5
    projector = Projector(model)
    for layer, q in queries.items():
        moved = projector.rotate(layer, q, here, there)
        assert torch.allclose(moved, projector.project_query(layer, inputs[layer], there), atol=2e-4)
        assert torch.allclose(moved.norm(dim=-1), q.norm(dim=-1), rtol=1e-5)
        assert torch.allclose(projector.rotate(layer, moved, there, here), q, atol=1e-4)


def test_rotation_per_head():
    model = tiny_model("llama")
    projector = Projector(model)
    q = torch.randn(2, 4, 6, 16)
    here = torch.zeros(2, 4, 6, dtype=torch.long)
    there = torch.arange(48).view(2, 4, 6)
    moved = projector.rotate(0, q, here, there)
    one = projector.rotate(0, q[1:, 2:3], here[1:, 2], there[1:, 2])
    assert torch.allclose(moved[1:, 2:3], one, atol=1e-6)


def test_learned_positions_cannot_be_rotated():
    projector = Projector(tiny_model("opt"))
    with pytest.raises(UserError, match="learned positions, which cannot be rotated"):
        projector.rotate(0, torch.randn(1, 4, 2, 16), torch.arange(2), torch.arange(2) + 1)


def test_length_dependent_rope_cannot_be_rotated():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    projector = Projector(tiny_model("llama", rope_parameters=rope))
    with pytest.raises(UserError, match="RoPE is dynamic"):
        projector.rotate(0, torch.randn(1, 4, 2, 16), torch.arange(2), torch.arange(2) + 1)


def test_models_without_q_proj_are_named():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32)).eval()
    with pytest.raises(UserError, match="no q_proj"):
        Projector(model).project_query(0, torch.randn(1, 2, 32), torch.arange(2)[None])
