"""``kvatlas generate``: text as it comes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvatlas.errors import UserError

BROKEN = "\ufffd"


@dataclass(frozen=True)
class Request:
    """What the command was given.

    ``chat`` None: use the tokenizer's chat template if it has one. ``strategy`` None: full, or a loaded cache's own.
    """

    prompt: str
    strategy: str | None
    model: str
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    chat: bool | None
    dtype: str
    device: str
    load_format: str
    beyond_trained: bool
    threads: int | None
    stats: bool
    save_cache: str | None
    load_cache: str | None


class Words:
    """Token ids to text, piece by piece: a character of several tokens comes out when its last one is there.

    Only the ids since the last complete piece are decoded, with the piece before them, since some tokenizers put or
    drop a space at the start of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._from = self._told = 0

    def _text(self, start: int, stop: int | None = None) -> str:
        return self.tokenizer.decode(self.ids[start:stop], skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self.ids.append(token)
        before, now = self._text(self._from, self._told), self._text(self._from)
        if now.endswith(BROKEN) or len(now) <= len(before):
            return ""
        self._from, self._told = self._told, len(self.ids)
        return now[len(before) :]

    def rest(self) -> str:
        """What is left at the end, complete or not."""
        before = self._text(self._from, self._told)
        return self._text(self._from)[len(before) :]


def run_generate(request: Request) -> None:
    """Stream the answer to stdout; with ``stats`` say on stderr what it took."""
    prompt = sys.stdin.read() if request.prompt == "-" else request.prompt
    if not prompt.strip():
        raise UserError("the prompt is empty; write some words")
    if request.max_new_tokens < (1 if request.save_cache is None else 0):
        raise UserError(f"--max-new-tokens must be 1 or more (0 with --save-cache), not {request.max_new_tokens}")
    if request.threads is not None and request.threads < 1:
        raise UserError(f"--threads must be 1 or more, not {request.threads}")
    _check_folder(request.save_cache)
    from kvatlas.engine.sampling import Sampling
    from kvatlas.strategy.spec import parse

    strategy, sampling = parse(request.strategy or "full"), Sampling(request.temperature, request.top_p, request.seed)
    lm = _load(request)
    if request.save_cache is None and request.load_cache is None:
        ids = encoded(lm.tokenizer, prompt, request.chat)
        new = lm.stream([ids], strategy, request.max_new_tokens, sampling, set(lm.stop_ids()), request.beyond_trained)
        _answer(request, lm, len(ids), (token for (token,) in new))
        return
    session = _session(request, lm, strategy)
    before = len(session.tokens)
    began = time.perf_counter()
    added = session.append(prompt, chat=in_template(lm.tokenizer, request.chat))
    if request.max_new_tokens:
        new = session.stream(request.max_new_tokens, sampling, set(lm.stop_ids()))
        _answer(request, lm, added, new, began, before, session.cache)
    if request.save_cache is not None:
        session.save(request.save_cache)


def _answer(
    request: Request,
    lm: Any,
    prompt: int,
    tokens: Iterator[int],
    began: float | None = None,
    before: int = 0,
    cache: Any = None,
) -> None:
    """Write the tokens as they come."""
    words, first = Words(lm.tokenizer), 0.0
    began = time.perf_counter() if began is None else began
    for token in tokens:
        first = first or time.perf_counter() - began
        if token >= 0:
            _write(words.add(token))
    _write(words.rest() + "\n")
    if request.stats:
        _tell(cache or lm.cache, prompt, before, len(words.ids), first, time.perf_counter() - began)


def _session(request: Request, lm: Any, strategy: Any) -> Any:
    """A new session, or the one in the file."""
    from kvatlas.engine.session import Session

    if request.load_cache is None:
        return lm.session(strategy, beyond_trained=request.beyond_trained)
    session = Session.load(request.load_cache, lm)
    if request.strategy is not None and session.strategy != strategy.name:
        raise UserError(
            f"{request.load_cache} was saved under '{session.strategy}' and cannot go on under '{strategy.name}'; "
            "leave --strategy out"
        )
    session.beyond_trained = session.beyond_trained or request.beyond_trained
    return session


def _check_folder(save_cache: str | None) -> None:
    """Before the work is done: a file can be written there."""
    if save_cache is None:
        return
    folder = os.path.dirname(save_cache) or "."
    if os.path.isdir(save_cache):
        raise UserError(f"--save-cache {save_cache} is a folder; give a file")
    if not os.path.isdir(folder):
        raise UserError(f"--save-cache {save_cache}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--save-cache {save_cache} cannot be written: its folder does not allow it")


def in_template(tokenizer: Any, chat: bool | None) -> bool:
    """Whether the prompt goes into the chat template."""
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise UserError("this model's tokenizer has no chat template; leave out --chat")
    return bool(template) and chat is not False


def encoded(tokenizer: Any, prompt: str, chat: bool | None) -> list[int]:
    """The prompt's token ids, inside the chat template or as it is."""
    if in_template(tokenizer, chat):
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt)["input_ids"])


def _load(request: Request) -> Any:
    """An engine that remembers its cache, for the statistics."""
    import torch

    from kvatlas.api import calibration_text
    from kvatlas.engine.lm import LM
    from kvatlas.measure.environment import speed_dtype
    from kvatlas.model.load import load_model

    class Remembering(LM):
        cache: Any = None

        def new_cache(self, *args: Any, **kwargs: Any) -> Any:
            self.cache = super().new_cache(*args, **kwargs)
            return self.cache

    if request.threads is not None:
        torch.set_num_threads(request.threads)
    dtype = speed_dtype(request.dtype, request.device)
    loaded = load_model(request.model, dtype, request.device, request.load_format, request.seed)
    if loaded.tokenizer is None:
        raise UserError(f"{request.model} has no tokenizer, so it cannot be given text; use a folder that has one")
    return Remembering(loaded.model, loaded.tokenizer, calibration_text())


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(cache: Any, prompt: int, before: int, new: int, first: float, whole: float) -> None:
    real, held = cache.realised(), cache.bytes()
    speed = f", then {(new - 1) / (whole - first):.1f} tokens/s" if new > 1 and whole > first else ""
    host = f" and {held.host / 1e6:.1f} MB on the host" if held.host else ""
    after = f" after {before} saved ones" if before else ""
    print(
        f"\n{cache.strategy.name}: {prompt} prompt tokens{after}, {new} new; first token after {first:.2f} s{speed}; "
        f"kept {real.kept:.0%}, read {real.read:.0%} of all tokens; KV {held.device / 1e6:.1f} MB on the device{host}",
        file=sys.stderr,
    )
