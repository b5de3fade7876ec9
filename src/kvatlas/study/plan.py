"""What a comparison was asked to do, checked before anything is run as far as that needs no model."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvatlas
from kvatlas.errors import UserError
from kvatlas.measure.environment import speed_dtype
from kvatlas.model.load import BUILT_IN, DTYPES, LOAD_FORMATS, _files_id
from kvatlas.model.weights import package_version
from kvatlas.strategy.spec import parse
from kvatlas.strategy.strategy import Strategy
from kvatlas.workload.text import Text, default_text, file_text

DEFAULTS = "full,paged,streaming:0.3,h2o:0.3,infinigen:0.3,oracle:0.1,random:0.3"
NO_TEXT = "random token ids"
"""What a record calls the text of a model without a tokenizer."""
Asked = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class Plan:
    """One comparison: strategies on one model, workload and setting. ``new_tokens`` decode steps are timed.

    ``strategies`` goes from what was written to what it means. ``dtype`` is of the timed runs, ``quality_dtype`` of the
    quality run. ``timeout`` is seconds for each process.
    """

    model: str
    strategies: dict[str, Strategy]
    out: Path
    prompt_tokens: int = 2048
    new_tokens: int = 64
    batch: int = 4
    dtype: str = "float32"
    quality_dtype: str = "float32"
    text_file: str | None = None
    repeats: int = 3
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    load_format: str = "auto"
    beyond_trained: bool = False
    quality: bool = True
    timeout: float = 1800.0
    retry: bool = False
    weights: str = ""
    text_sha256: str = ""

    def asked(self) -> Asked:
        """All that must lead to a new measurement when it changes, but the strategy."""
        return {
            "kvatlas": kvatlas.__version__,
            "model": self.model,
            "weights": self.weights,
            "load_format": self.load_format,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "text": self.text_sha256,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "batch": self.batch,
            "seed": self.seed,
        }

    def job(self) -> dict[str, Any]:
        """What a task needs of the plan, as plain JSON."""
        names = ("model", "prompt_tokens", "new_tokens", "batch", "dtype", "quality_dtype", "text_file", "seed",
                 "device", "threads", "load_format", "beyond_trained", "quality")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def order(self, wanted: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """(strategy, repeat) in the order they run: every repeat is a round of all strategies, shuffled by the seed."""
        draw, rounds = random.Random(self.seed), sorted({repeat for _, repeat in wanted})
        out: list[tuple[str, int]] = []
        for repeat in rounds:
            some = [cell for cell in wanted if cell[1] == repeat]
            draw.shuffle(some)
            out += some
        return out


def make_plan(*, model: str, strategies: str, out: str | None, threads: int | None, dtype: str, **options: Any) -> Plan:
    """A plan from what the user wrote.

    Raises:
        UserError: an unknown strategy, a number out of range, a text or folder that cannot be used.
    """
    check_numbers(options, threads)
    one_of("--dtype", dtype, DTYPES)
    one_of("--load-format", options.get("load_format", "auto"), LOAD_FORMATS)
    chosen = _strategies(strategies)
    given = text(options.get("text_file"))
    device = options.get("device", "cpu")
    check_device(device)
    return Plan(
        model=model,
        strategies=chosen,
        out=out_folder(out, model, options),
        dtype=speed_dtype(dtype, device),
        quality_dtype="float32" if dtype == "auto" else dtype,
        threads=threads or default_threads(),
        weights=_weights(model, options.get("load_format", "auto")),
        text_sha256=given.sha256,
        **options,
    )


def text(file: str | None) -> Text:
    """The user's text or the default one."""
    return file_text(file) if file else default_text()


def out_folder(out: str | None, model: str, options: dict[str, Any]) -> Path:
    """Where records go. Raises UserError when it is a file or cannot be written; leaves no trace."""
    name = Path(model.rstrip("/\\")).name or "model"
    shape = f"{options.get('batch', 4)}x{options.get('prompt_tokens', 2048)}"
    folder = Path(out).expanduser() if out else Path("runs") / f"{name}-{shape}"
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {folder} is a file, or lies below one; give a folder") from None
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written ({error.strerror or error}); give another folder") from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
    return folder


def _strategies(texts: str) -> dict[str, Strategy]:
    """What was written -> the strategy."""
    specs = split_specs(texts)
    if not specs:
        raise UserError(f"no strategies given; write for example --strategies {DEFAULTS}")
    chosen = {spec: parse(spec) for spec in dict.fromkeys(specs)}
    names = [strategy.name for strategy in chosen.values()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"'{twice}' is among the strategies twice; name it once")
    return chosen


def split_specs(texts: str) -> list[str]:
    """Commas separate specs, and parameters: ``key=value`` is the spec before's."""
    specs: list[str] = []
    for item in (part.strip() for part in texts.split(",")):
        name, equals, _ = item.partition("=")
        if equals and ":" not in name and specs:
            specs[-1] += ("," if ":" in specs[-1] else ":") + item
        elif item:
            specs.append(item)
    return specs


def check_numbers(options: dict[str, Any], threads: int | None) -> None:
    for name in ("prompt_tokens", "new_tokens", "batch", "repeats"):
        if options.get(name, 1) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, not {options[name]}")
    if options.get("timeout", 1.0) <= 0:
        raise UserError(f"--timeout must be above 0 seconds, not {options['timeout']:g}")
    if threads is not None and not 1 <= threads <= 4096:
        raise UserError(f"--threads must be 1 or more, not {threads}")


def one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{what} must be {' or '.join(allowed)}, not '{value}'")


def check_device(device: str) -> None:
    from kvatlas.model.load import _device

    _device(device)


def default_threads() -> int:
    import torch

    return int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads())


def _weights(model: str, load_format: str) -> str:
    """Which weights, known without loading them: a folder's files, a package's version, else the name says it."""
    folder = Path(model).expanduser()
    if load_format != "dummy" and model == BUILT_IN and not folder.is_dir():
        return package_version()
    files = sorted(folder.glob("*.safetensors")) if load_format != "dummy" and folder.is_dir() else []
    return _files_id(files) if files else ""
