"""Queries, keys and values outside the model's own forward: projected from a layer's input, or rotated elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from kvatlas.errors import UserError
from kvatlas.model.facts import SCALED_BEFORE, attentions_of, decoder_of, facts_of
from kvatlas.model.product import linear

if TYPE_CHECKING:
    from torch import Tensor

MOVING_ROPE = ("dynamic", "longrope")  # frequencies depend on the sequence's length: no rotation by a difference

Which = Literal["q", "k", "v"]


class Projector:
    """A model's projections (weight, bias, norm, RoPE), for any decoder of transformers with ``q_proj`` and the like.

    RoPE is applied by the architecture's own ``apply_rotary_pos_emb``, so its convention (halves, interleaved, partial)
    is the model's own. Raises UserError where the model's queries or keys cannot be projected from outside.
    """

    def __init__(self, model: Any) -> None:
        self.attentions: list[Any] = attentions_of(model)
        self.facts = facts_of(model)
        self.decoder: Any = decoder_of(model)
        self.rotary: Any = getattr(self.decoder, "rotary_emb", None)
        config = model.config.get_text_config(decoder=True)
        self._by_type = _takes_layer_type(self.rotary)
        self._types = getattr(config, "layer_types", None) or [None] * len(self.attentions)
        self._last: tuple[Any, Tensor, Tensor, Tensor] | None = None
        self._scale = self.facts.architecture in SCALED_BEFORE

    def project_query(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Queries as attention sees them: x [B, T, hidden] after the layer's norm, positions [B, T] -> [B, H, T, D]."""
        attention = self.attentions[layer]
        flat = self._flat(attention, x, "q")
        if self._scale:
            flat = flat * attention.scaling
        q = self._rotated(layer, _by_head(attention, flat, self.facts.heads, "q"), x, positions)
        last = getattr(attention, "query_layernorm", None)  # HunYuan norms after RoPE
        return q if last is None else last(q)

    def recompute(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they reach attention, [B, H, T, D]: x and positions as in ``project_query``."""
        attention, heads = self.attentions[layer], self.facts.kv_heads
        k = self._rotated(layer, _by_head(attention, self._flat(attention, x, "k"), heads, "k"), x, positions)
        last = getattr(attention, "key_layernorm", None)
        v = _by_head(attention, self._flat(attention, x, "v"), heads, "v").transpose(1, 2)
        return k if last is None else last(k), v

    def _rotated(self, layer: int, x: Tensor, like: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, H, D] -> [B, H, T, D], with RoPE where the layer has it."""
        x, attention = x.transpose(1, 2), self.attentions[layer]
        return _apply(attention, x, *self._cos_sin(layer, like, positions)) if self._rotates(attention) else x

    def rotate(self, layer: int, q: Tensor, from_positions: Tensor, to_positions: Tensor) -> Tensor:
        """Move `q` [B, H, T, D], which carries RoPE of `from_positions`, to `to_positions`.

        Both are [T], [B, T] or [B, H, T]. A pure rotation: lengths do not change, whatever the RoPE's own scaling.
        Works for keys too. Raises UserError for models whose positions are no rotation.
        """
        self._check_rotation()
        attention = self.attentions[layer]
        if not self._rotates(attention):
            return q
        delta = to_positions - from_positions
        if delta.dim() == 3:  # per head: treat each (sequence, head) as a sequence of one head
            batch, heads = q.shape[:2]
            delta = delta.expand(batch, heads, -1).flatten(0, 1)
            return self._turn(layer, q.flatten(0, 1).unsqueeze(1), delta).view_as(q)
        return self._turn(layer, q, delta.expand(q.shape[0], -1))

    def _turn(self, layer: int, q: Tensor, delta: Tensor) -> Tensor:
        """Rotate q [B, H, T, D] by delta [B, T] positions, in float32."""
        wide = q.float()
        cos, sin = self._cos_sin(layer, wide, delta)
        scaling = self._scaling(layer)
        return _apply(self.attentions[layer], wide, cos / scaling, sin / scaling).to(q.dtype)

    def _flat(self, attention: Any, x: Tensor, which: Which) -> Tensor:
        """A projection [B, T, H*D], normed where the architecture norms all heads at once (OLMo 2)."""
        project, rows = getattr(attention, f"{which}_proj", None), x.reshape(-1, x.shape[-1])
        if project is None:
            fused = getattr(attention, "qkv_proj", None)
            if fused is None:
                raise UserError(
                    f"{type(attention).__name__} has no {which}_proj; strategies that speculate on queries or compute "
                    "keys again need one (Llama, Qwen, Mistral, Gemma, GPT-OSS, OPT and the like have it)"
                )
            part = self._part(which)
            flat = linear(rows, fused.weight[part], None if fused.bias is None else fused.bias[part])
        elif type(project).__name__ == "Linear":
            flat = linear(rows, project.weight, project.bias)
        else:  # an adapter or a quantised matrix knows better
            flat = project(rows)
        flat = flat.view(*x.shape[:2], -1)
        norm = _norm_of(attention, which)
        whole = norm is not None and norm.weight.shape[-1] != self.facts.head_dim
        return norm(flat) if whole else flat

    def _part(self, which: Which) -> slice:
        """The rows of a fused matrix that give queries, keys or values."""
        queries, keys = (n * self.facts.head_dim for n in (self.facts.heads, self.facts.kv_heads))
        start = {"q": 0, "k": queries, "v": queries + keys}[which]
        return slice(start, start + (queries if which == "q" else keys))

    def _rotates(self, attention: Any) -> bool:
        """Whether this layer's queries carry RoPE: some architectures leave it out in some layers."""
        if self.rotary is None:
            return False
        if self.facts.architecture == "cohere2":
            return attention.sliding_window is not None
        if self.facts.architecture == "exaone4":
            return attention.sliding_window is None or attention.is_sliding
        return bool(getattr(attention, "use_rope", True))

    def _cos_sin(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at ``positions`` in x's dtype; all layers of a step ask for the same, so the last is kept."""
        key, last = (self._types[layer], x.dtype, positions.shape), self._last
        if last is None or last[0] != key or not bool((last[1] == positions).all()):
            kind = (self._types[layer],) if self._by_type else ()
            self._last = last = (key, positions.clone(), *self.rotary(x, positions, *kind))
        return last[2], last[3]

    def _scaling(self, layer: int) -> float:
        """What the model multiplies cos and sin by (YaRN), which a rotation must not."""
        own = getattr(self.rotary, f"{self._types[layer]}_attention_scaling", None)
        return float(own if own is not None else getattr(self.rotary, "attention_scaling", 1.0))

    def _check_rotation(self) -> None:
        facts = self.facts
        if hasattr(self.attentions[0], "query_layernorm"):
            raise UserError(f"{facts.architecture} norms its queries after RoPE, so they cannot be moved by a rotation")
        if facts.positions != "rope":
            raise UserError(
                f"{facts.architecture} has {facts.positions} positions, which cannot be rotated; "
                "strategies that move keys or queries to another position need RoPE"
            )
        kinds = getattr(self.rotary, "rope_type", None)
        moving = [kind for kind in MOVING_ROPE if kind in str(kinds)]
        if moving:
            raise UserError(
                f"{facts.architecture}'s RoPE is {moving[0]}: its frequencies change with the length, "
                "so a query cannot be moved to another position; choose a strategy that keeps true positions"
            )


def _norm_of(attention: Any, which: Which) -> Any:
    """The norm on queries, keys or values, or None."""
    norm = getattr(attention, f"{which}_norm", None)
    norm = norm if norm is not None else getattr(attention, f"{which}_layernorm", None)
    return norm if getattr(norm, "weight", None) is not None else None


def _by_head(attention: Any, flat: Tensor, heads: int, which: Which) -> Tensor:
    """[B, T, H*D] -> [B, T, H, D], normed where the architecture norms each head."""
    x, norm = flat.unflatten(-1, (heads, -1)), _norm_of(attention, which)
    return norm(x) if norm is not None and norm.weight.shape[-1] == x.shape[-1] else x


def _takes_layer_type(rotary: Any) -> bool:
    import inspect

    return (
        rotary is not None
        and "layer_type" in inspect.signature(type(rotary).forward).parameters
        and bool(isinstance(getattr(rotary, "rope_type", None), dict))
    )


def _apply(attention: Any, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on q [B, H, T, D] by the function that the architecture's own module defines."""
    import torch

    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotate is None:
        raise UserError(f"{type(attention).__name__} rotates its queries in a way that is not known here")
    part = getattr(attention, "rotary_ndims", None)
    if part is None or part >= q.shape[-1]:
        return rotate(q, q[:, :1], cos, sin)[0]
    turned = rotate(q[..., :part], q[:, :1, :, :part], cos, sin)[0]
    return torch.cat((turned, q[..., part:]), dim=-1)
