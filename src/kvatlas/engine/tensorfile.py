"""Tensors in a safetensors file with a header of ours: written piece by piece, whole or not at all; read one by one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvatlas.errors import UserError

FORMAT = 1
"""Raised when an older kvatlas could not read what is written."""

ALIGN = 8
_START = b'{"__metadata__":{"kvatlas":'
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that are read together: names with dtypes and shapes, and how to get them."""

    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    read: Callable[[], Mapping[str, Tensor]]


def part_of(tensors: Mapping[str, Tensor]) -> Part:
    """Tensors that are at hand."""
    return Part({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, lambda: tensors)


def write_tensors(path: str | Path, parts: Sequence[Part], about: Mapping[str, Any]) -> None:
    """Write a file; at no time more than one part's copy is in memory. What was at ``path`` stays until it is whole.

    Raises:
        UserError: when it cannot be written there.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        try:
            with beside.open("xb") as file:
                _write(file, parts, about)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error})") from error


def _write(file: IO[bytes], parts: Sequence[Part], about: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"kvatlas": json.dumps({"format": FORMAT, **about})}}
    end = 0
    for part in parts:
        for name, (dtype, shape) in part.specs.items():
            size = dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
            if gap := -end % ALIGN:  # every byte must belong to a tensor, and every tensor begin at a multiple of 8
                header[f"pad.{end}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
                end += gap
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    file.write(len(text).to_bytes(8, "little") + text)
    for part in parts:
        values = part.read()
        for name, (dtype, shape) in part.specs.items():
            tensor = values[name]
            assert tensor.dtype == dtype and tuple(tensor.shape) == shape, f"{name} is not what the header says"
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(raw.data)
            file.write(bytes(-raw.nbytes % ALIGN))


class TensorFile:
    """An open file: ``about`` is its header, ``get`` reads one tensor."""

    def __init__(self, path: Path, about: dict[str, Any], file: Any) -> None:
        self.path, self.about, self._file = path, about, file
        self._names = set(file.keys())

    def names(self, start: str) -> list[str]:
        """Names that begin with ``start``, sorted."""
        return sorted(name for name in self._names if name.startswith(start))

    def get(self, name: str) -> Tensor:
        """A tensor on the CPU, a view of the file: to be copied before the file is closed."""
        if name not in self._names:
            raise UserError(
                f"{self.path} lacks '{name}': it was saved by a kvatlas {self.about.get('version', '?')} whose "
                "strategies keep other things; make it anew"
            )
        try:
            return self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.path} is damaged at '{name}' ({error})") from error


@contextmanager
def open_tensors(path: str | Path) -> Iterator[TensorFile]:
    """Open a file that ``write_tensors`` wrote.

    Raises:
        UserError: no such file, not one of ours, of a newer version, or damaged.
    """
    path = Path(path)
    about = _about(path)
    try:
        opened = safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error})") from error
    with opened as file:
        yield TensorFile(path, about, file)


def _about(path: Path) -> dict[str, Any]:
    """The header, checked before anything else is read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if file.read(len(_START)) != _START:
                raise UserError(f"{path} is not a file that kvatlas saved")
            size = os.fstat(file.fileno()).st_size
            if size < 8 + length:
                raise UserError(f"{path} is damaged: it is cut short inside its header")
            file.seek(8)
            header = json.loads(file.read(length))
        data = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        about = json.loads(header["__metadata__"]["kvatlas"])
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged: its header cannot be read") from error
    if about.get("format", 0) > FORMAT:
        raise UserError(
            f"{path} is of format {about['format']}, and this kvatlas reads formats up to {FORMAT}: "
            "it was saved by a newer one; upgrade kvatlas"
        )
    if size != 8 + length + data:
        raise UserError(f"{path} is damaged: it has {size} bytes of {8 + length + data}")
    return about
