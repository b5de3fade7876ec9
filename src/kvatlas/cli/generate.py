"""``kvatlas generate``: text as it comes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from kvatlas.errors import UserError

BROKEN = "\ufffd"


@dataclass(frozen=True)
class Request:
    """What the command was given. ``chat`` None: use the tokenizer's chat template if it has one."""

    prompt: str
    strategy: str
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
    if request.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens must be 1 or more, not {request.max_new_tokens}")
    if request.threads is not None and request.threads < 1:
        raise UserError(f"--threads must be 1 or more, not {request.threads}")
    from kvatlas.engine.sampling import Sampling
    from kvatlas.strategy.spec import parse

    strategy, sampling = parse(request.strategy), Sampling(request.temperature, request.top_p, request.seed)
    lm = _load(request)
    ids = encoded(lm.tokenizer, prompt, request.chat)
    words, began, first = Words(lm.tokenizer), time.perf_counter(), 0.0
    for (token,) in lm.stream(
        [ids], strategy, request.max_new_tokens, sampling, set(lm.stop_ids()), request.beyond_trained
    ):
        first = first or time.perf_counter() - began
        if token >= 0:
            _write(words.add(token))
    _write(words.rest() + "\n")
    if request.stats:
        _tell(lm, strategy.name, len(ids), len(words.ids), first, time.perf_counter() - began)


def encoded(tokenizer: Any, prompt: str, chat: bool | None) -> list[int]:
    """The prompt's token ids, inside the chat template or as it is."""
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise UserError("this model's tokenizer has no chat template; leave out --chat")
    if template and chat is not False:
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


def _tell(lm: Any, name: str, prompt: int, new: int, first: float, whole: float) -> None:
    cache = lm.cache
    real, held = cache.realised(), cache.bytes()
    speed = f", then {(new - 1) / (whole - first):.1f} tokens/s" if new > 1 and whole > first else ""
    host = f" and {held.host / 1e6:.1f} MB on the host" if held.host else ""
    print(
        f"\n{name}: {prompt} prompt tokens, {new} new; first token after {first:.2f} s{speed}; "
        f"kept {real.kept:.0%}, read {real.read:.0%} of all tokens; KV {held.device / 1e6:.1f} MB on the device{host}",
        file=sys.stderr,
    )
