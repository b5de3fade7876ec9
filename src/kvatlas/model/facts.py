"""What the rest of the package needs to know of a model, read once from its config and modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvatlas.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

LEARNED = ("embed_positions", "wpe", "position_embeddings")  # names of position tables in transformers' decoders
ATTENTION = ("self_attn", "attn", "self_attention", "attention")  # names of a layer's attention module
ALIBI = ("bloom", "mpt")
SCALED_BEFORE = ("opt", "biogpt", "xglm")  # these multiply q by the scale themselves and give attention 1.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A decoder's shape. Per-layer fields have one entry a layer."""

    architecture: str  # transformers' model_type of the text part, such as "llama"
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # the layer's own sliding window: a query sees this many tokens, itself included
    sinks: bool  # a learned sink logit per head in the softmax (GPT-OSS)
    positions: str  # "rope", "learned", "alibi" or "none"
    max_positions: int | None  # trained positions; None: nothing says
    vocab: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    scales: tuple[float, ...]  # what attention multiplies q.k by; 1.0 where the model scales q itself (OPT)
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap) (Gemma 2)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


def decoder_of(model: Any) -> nn.Module:
    """The module that holds the decoder's layers, inside any wrapper (causal LM, multimodal)."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    while not _layers(decoder) and hasattr(decoder, "model"):
        decoder = decoder.model
    return decoder


def attentions_of(model: Any) -> list[nn.Module]:
    """Each layer's attention module, in order. Raises UserError for a layer without one."""
    layers = _layers(decoder_of(model)) or ()
    found: list[Any] = [
        next((part for name in ATTENTION if (part := getattr(layer, name, None))), None) for layer in layers
    ]
    if not found or None in found:
        raise UserError(
            f"{type(model).__name__} has layers without attention, or none that can be found; "
            "a KV-cache strategy needs a decoder with attention in every layer"
        )
    return found


def facts_of(model: Any) -> ModelFacts:
    """The facts of a transformers decoder. Raises UserError where a layer's attention is of no supported kind."""
    config = model.config.get_text_config(decoder=True)
    attentions = attentions_of(model)
    _check_uniform(config.model_type, attentions)
    weight = next(model.parameters())
    heads = config.num_attention_heads
    head_dim = getattr(attentions[0], "head_dim", None) or getattr(config, "head_dim", None)
    return ModelFacts(
        architecture=config.model_type,
        layers=len(attentions),
        heads=heads,
        kv_heads=_kv_heads(config),
        head_dim=head_dim or config.hidden_size // heads,
        windows=_windows(config, len(attentions)),
        sinks=any(getattr(attention, "sinks", None) is not None for attention in attentions),
        positions=_positions(config, decoder_of(model)),
        max_positions=getattr(config, "max_position_embeddings", None),
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        dtype=weight.dtype,
        device=weight.device,
        scales=tuple(_scale(config, attention, heads) for attention in attentions),
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def check_prompt(facts: ModelFacts, prompt_tokens: int, new_tokens: int, beyond_trained: bool = False) -> None:
    """Raise UserError when a prompt and its answer pass the model's trained positions.

    `beyond_trained` allows it, except for learned positions: their table simply ends.
    """
    if prompt_tokens < 1:
        raise UserError("the prompt is empty; it needs at least one token")
    total, limit = prompt_tokens + new_tokens, facts.max_positions
    if limit is None or total <= limit:
        return
    need = f"{prompt_tokens} prompt + {new_tokens} new tokens = {total}, and the model has {limit} positions"
    if facts.positions == "learned":
        raise UserError(f"{need}; its positions are a learned table, which cannot be passed: use a shorter prompt")
    if not beyond_trained:
        raise UserError(
            f"{need}; use a shorter prompt, or --beyond-trained to go on anyway (speed and memory only: "
            "answers beyond the trained positions say nothing about quality)"
        )


def _layers(decoder: Any) -> Any:
    """The decoder's list of layers, or None."""
    return next((getattr(decoder, name) for name in ("layers", "h", "blocks") if hasattr(decoder, name)), None)


def _check_uniform(architecture: str, attentions: list[nn.Module]) -> None:
    """Every layer must keep its own KV of one shape."""
    sizes: set[Any] = {getattr(attention, "head_dim", None) for attention in attentions}
    if len(sizes) > 1:
        raise UserError(f"{architecture} has layers with different head sizes {sorted(sizes)}, which is not supported")
    if any(getattr(attention, "is_kv_shared_layer", False) for attention in attentions):
        raise UserError(f"{architecture} has layers that share another layer's KV, which is not supported")


def _kv_heads(config: Any) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return (window,) * layers
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise UserError(
            f"{config.model_type} has layers of kind {', '.join(strange)}; "
            "only full_attention and sliding_attention keep a KV cache that a strategy can manage"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def _positions(config: Any, decoder: nn.Module) -> str:
    if config.model_type in ALIBI or getattr(config, "alibi", False):
        return "alibi"
    if getattr(decoder, "rotary_emb", None) is not None or getattr(config, "rope_parameters", None):
        return "rope"
    if any(getattr(decoder, name, None) is not None for name in LEARNED):
        return "learned"
    return "none"


def _scale(config: Any, attention: nn.Module, heads: int) -> float:
    if config.model_type in SCALED_BEFORE:
        return 1.0
    scale = getattr(attention, "scaling", None)
    head_dim = getattr(attention, "head_dim", None) or config.hidden_size // heads
    return float(scale) if isinstance(scale, int | float) else head_dim**-0.5
