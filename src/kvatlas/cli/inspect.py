"""``kvatlas inspect``: what a strategy reads, layer by layer, against what full attention would look at."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.errors import UserError

if TYPE_CHECKING:
    from kvatlas.workload.text import Text

TOKENS = 1024
"""Of the built-in text."""


@dataclass(frozen=True)
class Request:
    """What the command was given. ``prompt_file`` and ``prompt_tokens`` None: the built-in text; all of the file."""

    strategy: str
    prompt_file: str | None
    prompt_tokens: int | None
    steps: int
    greedy: bool
    model: str
    out: str | None
    dtype: str
    device: str
    load_format: str
    threads: int | None
    json: bool


def run_inspect(request: Request) -> None:
    """Look, write what was asked for, show the table or the JSON."""
    from kvatlas.cli.progress import watcher
    from kvatlas.strategy.spec import parse
    from kvatlas.study.plan import out_folder
    from kvatlas.workload.text import default_text, file_text

    strategy = parse(request.strategy)
    _check(request)
    folder = out_folder(request.out, request.model, {}) if request.out else None
    text = file_text(request.prompt_file) if request.prompt_file else default_text().split()[1]
    with watcher() as shown:
        tell = _teller(shown)
        tell(f"loading {request.model}", 0.0)
        lm = _load(request)
        ids = _ids(lm, text, request)
        from kvatlas.quality.inspect import inspect

        found = inspect(lm, strategy, ids, request.steps, greedy=request.greedy, progress=tell)
        dtype = str(lm.facts.dtype).removeprefix("torch.")
        about = {"model": request.model, "text": text.name, "text_sha256": text.sha256, "dtype": dtype}
        written: list[Path] = []
        if folder is not None:
            from kvatlas.report.inspection_page import write_inspection

            tell("drawing", 1.0)
            written = write_inspection(found, folder, **about)
    _show(found, about, request.json)
    for path in written:
        print(path, file=sys.stderr if request.json else sys.stdout)


def _check(request: Request) -> None:
    """Raise UserError for a number out of range."""
    for option, value in (("--steps", request.steps), ("--prompt-tokens", request.prompt_tokens),
                          ("--threads", request.threads)):  # fmt: skip
        if value is not None and value < 1:
            raise UserError(f"{option} must be 1 or more, not {value}")


def _load(request: Request) -> Any:
    import torch

    from kvatlas.api import load

    if request.threads is not None:
        torch.set_num_threads(request.threads)
    lm = load(request.model, request.dtype, request.device, request.load_format)
    if lm.tokenizer is None:
        raise UserError(f"{request.model} has no tokenizer, so it cannot be given text; use a folder that has one")
    return lm


def _ids(lm: Any, text: Text, request: Request) -> Sequence[int]:
    """The prompt and, unless the steps are greedy, the tokens that are fed after it."""
    from kvatlas.workload.text import prompts

    if request.prompt_file and request.prompt_tokens is None:
        ids: list[int] = lm.encode_prompts(text.text)[0]
        return ids
    fed = 0 if request.greedy else request.steps
    most, tokens = lm.facts.max_positions, request.prompt_tokens or TOKENS
    if request.prompt_tokens is None and most is not None:
        tokens = max(1, min(tokens, most - request.steps))
    found = prompts(lm.tokenizer, text, 1, tokens, fed, overlap=True)[0]
    return [*found.ids, *found.continuation]


def _teller(shown: Any) -> Callable[[str, float], None]:
    """Shows what is being done: all of it on a terminal, a line for each part (prompt, steps, drawing) in a log."""
    from kvatlas.cli.progress import Lines

    told = set()

    def tell(what: str, share: float) -> None:
        shown.wait(f"{what} · {share:.0%}" if 0 < share < 1 else what)
        kind = what.split(",")[0].split(" ")[0]
        if isinstance(shown, Lines) and kind != "loading" and kind not in told:
            told.add(kind)
            shown.say(what)

    return tell


def _show(found: Any, about: dict[str, Any], as_json: bool) -> None:
    if as_json:
        from kvatlas.report.inspection import as_json as numbers

        print(json.dumps(numbers(found, **about), indent=1, allow_nan=False))
        return
    from kvatlas.report import inspection_table as table

    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(table.block(found))
    else:
        print(table.text(found), end="")
