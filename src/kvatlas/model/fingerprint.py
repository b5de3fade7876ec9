"""Which model a cache belongs to: its shape, and a digest of what keys and values follow from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from kvatlas.errors import UserError

if TYPE_CHECKING:
    from kvatlas.model.facts import ModelFacts

SAMPLES = 32
"""Numbers taken of each weight, evenly spaced."""

SHAPE = ("architecture", "layers", "heads", "kv_heads", "head_dim", "dtype")
"""What is compared one by one, so that an error can say what differs."""


def identity_of(decoder: Any, facts: ModelFacts) -> dict[str, Any]:
    """The model's shape and a fingerprint of its decoder, as plain values for a file's header.

    The fingerprint covers the positions' parameters and a few numbers of every weight that keys and values depend on
    (not the output head): another checkpoint or fine-tune of the same shape has another one.
    """
    told = {name: getattr(facts, name) for name in SHAPE} | {"dtype": str(facts.dtype).removeprefix("torch.")}
    return {**told, "fingerprint": _fingerprint(decoder, facts)}


def check_identity(saved: dict[str, Any], here: dict[str, Any], what: str) -> None:
    """Raise UserError, naming ``what``, when it was made with another model than the one at hand."""
    for name in SHAPE:
        if saved.get(name) != here[name]:
            word = {"architecture": "model", "dtype": "dtype"}.get(name, f"model with {name}")
            hint = f"; load the model with dtype={saved.get(name)}" if name == "dtype" else ""
            raise UserError(f"{what} was made with {word} {saved.get(name)}, and this one is {here[name]}{hint}")
    if saved.get("fingerprint") != here["fingerprint"]:
        raise UserError(f"{what} was made with a model of the same shape but other weights or positions")


@torch.no_grad()
def _fingerprint(decoder: Any, facts: ModelFacts) -> str:
    shape = {k: v for k, v in asdict(facts).items() if k not in ("device", "max_positions")}
    positions = getattr(decoder.config, "rope_parameters", None)
    digest = hashlib.blake2b(json.dumps([shape, positions], default=str, sort_keys=True).encode(), digest_size=16)
    taken = []
    for name, weight in sorted(decoder.named_parameters()):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        if weight.numel():
            at = torch.linspace(0, weight.numel() - 1, min(SAMPLES, weight.numel()), dtype=torch.float64).long()
            taken.append(weight.reshape(-1)[at.to(weight.device)].float())
    digest.update(torch.cat(taken).cpu().numpy().tobytes())
    return digest.hexdigest()
