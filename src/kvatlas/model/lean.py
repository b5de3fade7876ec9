"""Decode for plain Llama-shaped models: transformers' arithmetic with fewer, larger operations on the same weights.

q, k and v are one matrix, gate and up are one; the model's own parameters become views of them, so memory does not grow
and transformers' forward (prefill, and the test of this one) goes on working. Attention and the cache are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvatlas.attention.native import small
from kvatlas.errors import UserError
from kvatlas.model.product import few, linear
from kvatlas.model.project import Projector

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# attend(layer, q [B,Hq,T,D], k [B,Hkv,T,D], v [B,Hkv,T,D], x [B,T,hidden]) -> [B,T,Hq*D]
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]

# The attention's input [n, hidden], q and k after norm and rotation [n, Hq + Hkv, D], v [n, Hkv, D]; n = B * T
_Entered = tuple[Tensor, Tensor, Tensor]

CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_PLAIN = {
    "attention": {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
    "layer": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
}


@dataclass(slots=True)
class _Layer:
    """One layer's weights, merged."""

    norm: Tensor
    qkv: Tensor  # [(Hq + 2 Hkv) D, hidden]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [Hq + Hkv, D], Qwen3
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [2 inner, hidden]
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def fusible(self) -> bool:
        """Whether there is nothing between its attention and the next but what `small.between` does."""
        extra = (self.qkv_bias, self.qk_norm, self.out_bias, self.gate_up_bias, self.down_bias)
        widths = (self.out.shape[1], self.down.shape[1], self.down.shape[0])
        return all(part is None for part in extra) and not any(width % 8 for width in widths)


class LeanDecoder:
    """A decode forward for the models that `supports` names. Raises UserError for any other."""

    def __init__(self, model: PreTrainedModel) -> None:
        if not self.supports(model):
            raise UserError(
                f"{type(model).__name__} is not a plain Llama-shaped decoder; use transformers' own forward"
            )
        config = model.config
        self.model = model
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = model.model.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self.rotary = model.model.rotary_emb
        self.projector = Projector(model)
        self._merge()

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether this model's arithmetic is exactly the one below: class, parts, activation, no sliding window."""
        if type(model).__name__ not in CLASSES or not type(model).__module__.startswith("transformers."):
            return False
        config, layers = model.config, model.model.layers
        windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
        if type(model).__name__ == "MistralForCausalLM":
            windows.append(config.sliding_window)
        return (
            config.hidden_act == "silu"
            and not any(windows)
            and not model.training
            and len(layers) == config.num_hidden_layers
            and all(_is_plain(layer) for layer in layers)
            and len({(p.dtype, p.device) for p in model.parameters()}) == 1
        )

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [B, V] of the last position for ids and positions [B, T]. `attend` stores k and v and attends.

        x, the attention's input, is handed on for strategies that speculate with it; it must not be changed.
        """
        self._keep_merged()
        batch, length = ids.shape
        x = F.embedding(ids, self.model.model.embed_tokens.weight).view(batch * length, -1)
        cos, sin = self._cos_sin(x, positions)
        leave = self._fused if few(x) and self._fusible and small.fuses() else self._leave
        entered = self._enter(self.layers[0], x, cos, sin)
        for number, layer in enumerate(self.layers):
            q, k, v, h = self._by_sequence(entered, batch, length)
            seen = attend(number, q, k, v, h).reshape(batch * length, -1)
            following = self.layers[number + 1] if number + 1 < len(self.layers) else None
            entered = leave(layer, following, seen, x, cos, sin)
        last = x.view(batch, length, -1)[:, -1]
        return linear(_rms_norm(last, self.model.model.norm.weight, self.eps), self.model.lm_head.weight, None)

    __call__ = forward

    def project_query(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """As `Projector.project_query`: x [B, T, hidden] after the norm, positions [B, T] -> [B, Hq, T, D]."""
        return self.projector.project_query(layer, x, positions)

    def _cos_sin(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B*T, 1, D] by the model's own rotary module; sin's first half is negated, for `_rope`."""
        cos, sin = self.rotary(x, positions)
        half = self.head_dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos.view(-1, 1, self.head_dim), sin.view(-1, 1, self.head_dim)

    def _enter(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> _Entered:
        """The attention's input, from the residual x [B*T, hidden]."""
        h = _rms_norm(x, layer.norm, self.eps)
        qk, v = self._heads(linear(h, layer.qkv, layer.qkv_bias))
        if layer.qk_norm is not None:
            qk = _rms_norm(qk, layer.qk_norm, self.eps)
        return h, _rope(qk, cos, sin), v

    def _leave(
        self, layer: _Layer, following: _Layer | None, seen: Tensor, x: Tensor, cos: Tensor, sin: Tensor
    ) -> _Entered:
        """From the attention's output ``seen`` to the next attention's input, if any; x is followed in place."""
        x.add_(linear(seen, layer.out, layer.out_bias))
        h = _silu_mul(linear(_rms_norm(x, layer.mlp_norm, self.eps), layer.gate_up, layer.gate_up_bias))
        x.add_(linear(h, layer.down, layer.down_bias))
        return (h, h, h) if following is None else self._enter(following, x, cos, sin)

    def _fused(
        self, layer: _Layer, following: _Layer | None, seen: Tensor, x: Tensor, cos: Tensor, sin: Tensor
    ) -> _Entered:
        """`_leave` in one native call."""
        ahead = (None, None) if following is None else (following.norm, following.qkv)
        weights = small.Weights(layer.out, layer.mlp_norm, layer.gate_up, layer.down, *ahead)
        h, qkv = small.between(weights, seen, x, cos, sin, self.heads + self.kv_heads, self.eps)
        return (h, h, h) if following is None else (h, *self._heads(qkv))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [n, Hq + Hkv, D], and v [n, Hkv, D], of qkv [n, (Hq + 2 Hkv) D] (views)."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        return heads[:, : self.heads + self.kv_heads], heads[:, self.heads + self.kv_heads :]

    def _by_sequence(self, entered: _Entered, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v, each [B, heads, T, D], and the attention's input [B, T, hidden] (views)."""
        h, qk, v = entered
        qk, v = (part.unflatten(0, (batch, length)).transpose(1, 2) for part in (qk, v))
        return qk[:, : self.heads], qk[:, self.heads :], v, h.view(batch, length, -1)

    @torch.no_grad()
    def _merge(self) -> None:
        self.layers = [self._merged(layer) for layer in self.model.model.layers]
        self._fusible = all(layer.fusible() for layer in self.layers)

    def _merged(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        two = (mlp.gate_proj, mlp.up_proj)
        return _Layer(
            norm=layer.input_layernorm.weight,
            qkv=_joined([part.weight for part in three]),
            qkv_bias=_joined([part.bias for part in three]),
            qk_norm=self._qk_norm(attention),
            out=attention.o_proj.weight,
            out_bias=attention.o_proj.bias,
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=_joined([part.weight for part in two]),
            gate_up_bias=_joined([part.bias for part in two]),
            down=mlp.down_proj.weight,
            down_bias=mlp.down_proj.bias,
        )

    def _qk_norm(self, attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        q, k = attention.q_norm.weight, attention.k_norm.weight
        return torch.cat((q.expand(self.heads, -1), k.expand(self.kv_heads, -1)))

    def _keep_merged(self) -> None:
        """Merge again when the model was moved or converted since (`.to`), which gives its parameters new storage."""
        weight = self.model.model.layers[0].self_attn.q_proj.weight
        if weight.data_ptr() != self.layers[0].qkv.data_ptr() or weight.dtype != self.layers[0].qkv.dtype:
            self._merge()


def _is_plain(layer: Any) -> bool:
    """Whether a layer has just the known parts, and its matrices are plain (no adapters, nothing quantised)."""
    attention, mlp = layer.self_attn, layer.mlp
    known = (("attention", attention), ("mlp", mlp), ("layer", layer))
    if not all({name for name, _ in module.named_children()} <= _PLAIN[kind] for kind, module in known):
        return False
    three = (attention.q_proj, attention.k_proj, attention.v_proj)
    two = (mlp.gate_proj, mlp.up_proj)
    matrices = (*three, *two, attention.o_proj, mlp.down_proj)
    return all(type(part) is nn.Linear for part in matrices) and all(
        len({part.bias is None for part in group}) == 1 for group in (three, two)
    )


def _joined(parts: list[Any]) -> Any:
    """One tensor with the parameters `parts` below each other; the parameters become views of it. None for no bias."""
    if parts[0] is None:
        return None
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    shape = (rows, *first.shape[1:])
    if _adjacent(parts):
        return first.data.as_strided(shape, first.stride())
    whole = torch.empty(shape, dtype=first.dtype, device=first.device)
    start = 0
    for part in parts:
        view = whole[start : start + part.shape[0]]
        view.copy_(part)
        part.data = view
        start += part.shape[0]
    return whole


def _adjacent(parts: list[Tensor]) -> bool:
    """Whether the parameters already lie below each other in one storage (an earlier LeanDecoder merged them)."""
    storage = parts[0].untyped_storage().data_ptr()
    end = parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != end or not part.is_contiguous():
            return False
        end += part.numel()
    return True


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: in float32, rounded, then times weight (transformers' order)."""
    if weight.dim() == 1 and few(x):
        return small.rms_norm(x.contiguous(), weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def _rope(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate qk [n, heads, D]; sin's first half is negated, so that one swap of halves does for ``rotate_half``.

    It may be done in place.
    """
    if few(qk) and qk.stride(1) == qk.shape[2]:
        return small.rope_(qk, cos, sin)
    return (qk * cos).add_(qk.roll(qk.shape[-1] // 2, -1).mul_(sin))


def _silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [n, 2 inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
