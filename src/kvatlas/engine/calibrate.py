"""What a reader needs to know once a model: queries and keys of a calibration text, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvatlas.engine.cache import KVCache
from kvatlas.strategy.answers import Read, Strategy
from kvatlas.strategy.spec import parse

if TYPE_CHECKING:
    from kvatlas.engine.lm import LM

TOKENS = 2048
"""Length of the calibration text (the papers' number)."""


class Recorder(KVCache):
    """A full cache that shows each layer's queries and keys to ``read.calibrate``."""

    def __init__(self, read: Read, strategy: Strategy, *args: Any) -> None:
        super().__init__(strategy, *args)
        self.read, self.found = read, [dict[str, Tensor]() for _ in self.layers]

    def prefill(self, layer: int, row: int, q: Tensor, k: Tensor, v: Tensor, final: bool = True) -> Tensor:
        self.found[layer] = self.read.calibrate(self.layers[layer].facts, q, k)
        return super().prefill(layer, row, q, k, v, final)


def calibrate(lm: LM, read: Read) -> list[Mapping[str, Tensor]]:
    """Constants of every layer, from 2,048 tokens of the model's calibration text (random ids without a tokenizer)."""
    recorder = Recorder(read, parse("full"), lm.shape, lm.port)
    lm.prefill(recorder, [calibration_ids(lm)], reserve=1)
    return list(recorder.found)


def calibration_ids(lm: LM) -> list[int]:
    """The token ids that calibrate."""
    limit = min(TOKENS, lm.facts.max_positions or TOKENS)
    if lm.tokenizer is not None and lm.calibration:
        return lm.tokenizer(lm.calibration)["input_ids"][:limit]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, lm.facts.vocab, (min(limit, 512),), generator=generator).tolist()
