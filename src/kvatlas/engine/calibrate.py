"""What a strategy needs to know once a model: queries, keys and values of a calibration text, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvatlas.engine.cache import KVCache
from kvatlas.engine.kept import kept
from kvatlas.errors import UserError
from kvatlas.model.facts import check_prompt
from kvatlas.model.gradients import kv_gradients
from kvatlas.strategy.answers import Encode, Read
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy
from kvatlas.strategy.view import LayerFacts

if TYPE_CHECKING:
    from kvatlas.engine.lm import LM

TOKENS = 2048
"""Length of the calibration text (the papers' number)."""
GRADIENT_TOKENS = 512
"""How many of them the loss's gradients are taken of."""

See = Callable[[LayerFacts, Tensor, Tensor, Tensor], dict[str, Tensor]]
"""``see(facts, q [Hq, N, D], k [H, N, D], v [H, N, D])`` -> a layer's constants."""


class Recorder(KVCache):
    """A full cache that shows each layer's queries, keys and values to ``see``."""

    def __init__(self, see: See, *args: Any) -> None:
        super().__init__(parse("full"), *args)
        self.see, self.found = see, [dict[str, Tensor]() for _ in self.layers]

    def prefill(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool = True) -> Tensor:
        self.found[layer] = self.see(self.layers[layer].facts, q, k, v)
        return super().prefill(layer, row, q, k, v, final)


def calibrated(strategy: Strategy) -> list[Read | Encode]:
    """The answers that need to know something of the model first."""
    answers: tuple[Read | Encode, ...] = (strategy.read, strategy.encode)
    return [answer for answer in answers if answer.calibrates]


def calibrate(lm: LM, answer: Read | Encode) -> list[dict[str, Tensor]]:
    """Constants of every layer, from a text (random ids where there is no tokenizer).

    An encoder also gets the loss's gradients over the first 512 tokens, each layer's from one backward through
    transformers' own forward.
    """
    if isinstance(answer, Encode):
        return _run(lm, _encoder_sees(lm, answer), calibration_ids(lm))
    ids = text_ids(lm, answer.calibration_text())
    found = kept(lm, answer, lambda: _run(lm, lambda facts, q, k, v: answer.calibrate(facts, q, k), ids))
    return answer.finish_calibration(found)


def merged(parts: Sequence[Sequence[Mapping[str, Tensor]]]) -> list[Mapping[str, Tensor]]:
    """Constants of several answers, layer by layer."""
    out: list[Mapping[str, Tensor]] = []
    for layers in zip(*parts):
        names = [name for layer in layers for name in layer]
        assert len(names) == len(set(names)), f"two answers calibrate the same name: {sorted(names)}"
        out.append({name: tensor for layer in layers for name, tensor in layer.items()})
    return out


def _run(lm: LM, see: See, ids: list[int]) -> list[dict[str, Tensor]]:
    recorder = Recorder(see, lm.shape, lm.port)
    lm.prefill(recorder, [ids], reserve=1)
    return recorder.found


def _encoder_sees(lm: LM, encode: Encode) -> See:
    from kvatlas.engine.lm import cache_name

    gradients = kv_gradients(lm.model, calibration_ids(lm)[:GRADIENT_TOKENS], cache_name())

    def see(facts: LayerFacts, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        if facts.windowed:  # such a layer stores raw values
            return {}
        return encode.bind(facts, lm.port, {}, {}).calibrate(facts, q, k, v, *gradients[facts.layer])

    return see


def text_ids(lm: LM, text: str | None) -> list[int]:
    """The token ids of an answer's own text, whole; those that calibrate the model where it has none.

    Raises:
        UserError: a text that is empty, or longer than the model's positions, or one without a tokenizer.
    """
    if text is None:
        return calibration_ids(lm)
    if lm.tokenizer is None:
        raise UserError("a strategy with a text of its own (context=) needs a tokenizer beside the model: tokenizer=")
    ids = lm.encode_prompts(text)[0]
    check_prompt(lm.facts, len(ids), 0)
    return ids


def calibration_ids(lm: LM) -> list[int]:
    """The token ids that calibrate."""
    limit = min(TOKENS, lm.facts.max_positions or TOKENS)
    if lm.tokenizer is not None and lm.calibration:
        return lm.tokenizer(lm.calibration)["input_ids"][:limit]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, lm.facts.vocab, (min(limit, 512),), generator=generator).tolist()
