"""Tiny random models of each architecture: four layers, whose attention is not uniform. They know no language."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, POSITIONS, WINDOW = 4, 64, 4, 2, 16, 256, 512, 16
SLIDING = ["sliding_attention", "full_attention"] * 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 96,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
_BY_ARCH: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "qwen2": ("qwen2", {key: value for key, value in _GROUPED.items() if key != "head_dim"}),
    "qwen3": ("qwen3", _GROUPED),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": None}),
    "gemma3": (
        "gemma3_text",
        {**_GROUPED, "sliding_window": WINDOW, "layer_types": SLIDING, "query_pre_attn_scalar": HEAD_DIM},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_GROUPED,
            "sliding_window": WINDOW,
            "layer_types": SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _YARN,
        },
    ),
    "opt": ("opt", {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}),
}
ARCHS = tuple(_BY_ARCH)


def tiny_model(arch: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random model of one of `ARCHS` in evaluation mode; keyword arguments override its config. No tokenizer."""
    kind, values = _BY_ARCH[arch]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**values, **config}))
        _spread(model)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_prompts(lengths: tuple[int, ...] = (40, 23), seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and mask, both [len(lengths), max(lengths)], padded on the left with 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    return ids * mask, mask


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    """Wider weights than a fresh model's, so that heads prefer some tokens and layers differ; random sinks, biases."""
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.add_(torch.rand_like(weight))
        elif "norm" in name and name.endswith("weight"):
            weight.add_(torch.randn_like(weight) * 0.1)
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.normal_(std=0.2)
        elif name.endswith("sinks"):
            weight.normal_(std=1.0)
        elif name.endswith("bias"):
            weight.normal_(std=0.1)
        else:
            weight.normal_(std=0.15)
