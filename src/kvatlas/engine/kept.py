"""What calibration on a text of the user's found, in a file beside that text, for later runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvatlas.engine.tensorfile import open_tensors, part_of, write_tensors
from kvatlas.errors import UserError
from kvatlas.model.fingerprint import identity_of
from kvatlas.strategy.answers import Read

if TYPE_CHECKING:
    from kvatlas.engine.lm import LM

Found = list[dict[str, Tensor]]


def kept(lm: LM, read: Read, find: Callable[[], Found]) -> Found:
    """What ``find`` gives, a mapping for each layer: from the file of an earlier run, or found now and written there.

    A file of another model, text or parameters, or a damaged one, is written anew. Its name has part of the model's
    fingerprint, so that several models have a file each: ``notes.txt.1a2b3c4d.safetensors``.

    Raises:
        UserError: when the file cannot be written.
    """
    where = read.calibration_file()
    if where is None:
        return find()
    beside, decides = where
    model = identity_of(lm.port.decoder, lm.facts)
    text = hashlib.sha256((read.calibration_text() or "").encode()).hexdigest()
    about = {"kind": "calibration", "model": model, "text": text, **decides}
    path = Path(f"{beside}.{model['fingerprint'][:8]}.safetensors")
    found = _read(path, about, lm.shape.layers, lm.shape.device)
    if found is None:
        if not os.access(path.parent, os.W_OK):  # before the work is done
            raise UserError(f"{path} cannot be written: its folder does not allow it")
        found = find()
        tensors = {f"{i}.{name}": tensor for i, layer in enumerate(found) for name, tensor in layer.items()}
        write_tensors(path, [part_of(tensors)], about)
    return found


def _read(path: Path, about: dict[str, Any], layers: int, device: torch.device) -> Found | None:
    """What is in the file, if it is what is wanted."""
    if not path.is_file():
        return None
    try:
        with open_tensors(path) as file:
            if any(file.about.get(key) != value for key, value in about.items()):
                return None
            starts = [f"{i}." for i in range(layers)]
            return [{n.removeprefix(s): file.get(n).clone().to(device) for n in file.names(s)} for s in starts]
    except UserError:
        return None
