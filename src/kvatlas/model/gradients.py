"""How much a text's loss depends on each key and value: one backward through transformers' own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache


def kv_gradients(model: Any, ids: Sequence[int], cache_name: str) -> list[tuple[Tensor, Tensor] | tuple[None, None]]:
    """Gradients of the next-token loss with respect to the keys and values that attention sees.

    They are taken where a layer hands its keys and values to its cache, after norms and RoPE, so an architecture with
    fused projections has them too. No weight gets a gradient, and no cache of ours takes part.

    Args:
        model: a transformers decoder with a language-model head.
        ids: the text's tokens, 2 or more.
        cache_name: the argument by which the model takes a cache.

    Returns:
        for each layer ``grad_k, grad_v [H, T, D]`` in the model's dtype; None twice for a layer that the loss does not
        reach.
    """
    config = model.config.get_text_config(decoder=True)
    watched = _Watched(config=config)
    device = next(model.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    with torch.inference_mode(False), torch.enable_grad():
        logits = model(input_ids=tokens, use_cache=True, **{cache_name: watched}).logits
        loss = cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="sum")
        seen = [tensor for pair in watched.seen.values() for tensor in pair]
        found = torch.autograd.grad(loss, seen, allow_unused=True)
    by_layer = {layer: found[2 * i : 2 * i + 2] for i, layer in enumerate(watched.seen)}
    out: list[tuple[Tensor, Tensor] | tuple[None, None]] = []
    for layer in range(config.num_hidden_layers):
        k, v = by_layer.get(layer, (None, None))
        out.append((None, None) if k is None or v is None else (k[0], v[0]))
    return out


class _Watched(DynamicCache):
    """transformers' own cache, which remembers what it was given."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        for tensor in (key_states, value_states):
            if not tensor.requires_grad:  # with no gradient for weights the first layer's are leaves
                tensor.requires_grad_(True)
        self.seen[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
