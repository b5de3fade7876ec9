"""A conversation with one cache: turns are appended to it, answers are generated from it, and it can be forked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvatlas.engine import saved
from kvatlas.engine.cache import KVCache
from kvatlas.engine.sampling import Sampling
from kvatlas.engine.tensorfile import open_tensors
from kvatlas.errors import UserError
from kvatlas.model.facts import check_prompt
from kvatlas.strategy.place.store import Bytes

if TYPE_CHECKING:
    from kvatlas.engine.lm import LM, Generation

RESERVE = 256
"""Tokens to make room for at first; a longer session makes the cache grow."""


class Session:
    """One sequence in a cache of its own, and the logits after its last token (``LM.session`` makes one).

    ``append`` and ``generate`` put all tokens into the cache, so either may follow the other. A keep rule evicts at the
    end of every appended turn, down to the budget of the first one.

    Args:
        lm: the model.
        cache: an empty cache of it.
        system: a system message for the chat template, part of the first turn that is appended with ``chat``.
        beyond_trained: let the session pass the model's trained positions (speed and memory only).
    """

    def __init__(self, lm: LM, cache: KVCache, system: str | None = None, beyond_trained: bool = False) -> None:
        self.lm, self.cache, self.system, self.beyond_trained = lm, cache, system, beyond_trained
        self._tokens: list[int] = []
        self._logits: Tensor | None = None
        self._answering = False  # the chat template's last word was that the model answers now
        self._whole = True

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, appended and generated (kept by the strategy or not)."""
        return list(self._tokens)

    @property
    def strategy(self) -> str:
        """The strategy's spec."""
        return self.cache.strategy.name

    def bytes(self) -> Bytes:
        """Bytes that its cache holds.

        Forks on the same blocks count all of them, each; what lies in a shared archive counts for the oldest holder.
        """
        return self.cache.bytes()

    # ------------------------------------------------------------------------ turns

    def append(self, turn: str | Sequence[int], *, chat: bool = False) -> int:
        """Add a turn, and return how many tokens it has.

        Args:
            turn: text, or token ids.
            chat: put the text into the model's chat template as the user's words, with what opens the answer;
                otherwise it is appended as it is.

        Raises:
            UserError: an empty turn, one that passes the model's positions, ``chat`` without a template.
        """
        self._check_whole()
        ids = self._chat_ids(turn) if chat else self._plain_ids(turn)
        check_prompt(self.lm.facts, len(self._tokens) + len(ids), 0, self.beyond_trained)
        if self._tokens and self.cache.strategy.prefill.kind == "chunked-isolated":
            raise UserError("prefill=chunked-isolated makes turns blind to each other; use prefill=chunked:N instead")
        self._whole = False
        if self.cache.started:
            self._logits = self.lm.extend(self.cache, 0, ids)
        else:
            self._logits = self.lm.prefill(self.cache, [ids], RESERVE)
        self._whole, self._answering = True, chat
        self._tokens += ids
        return len(ids)

    def generate(
        self,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
    ) -> Generation:
        """Go on from the last token; the new ones stay in the cache, a stop token does not.

        Args:
            temperature: 0 is greedy; above, sampled with ``top_p`` and ``seed``.
            stop: token ids that end the answer; None: the model's own.

        Raises:
            UserError: nothing was appended yet, or the answer would pass the model's positions.
        """
        from kvatlas.engine.lm import Generation

        before = len(self._tokens)
        stops = set(self.lm.stop_ids() if stop is None else stop)
        ids = list(self.stream(max_new_tokens, Sampling(temperature, top_p, seed), stops))
        return Generation(self.lm.decode(ids), ids, before, "length" if len(ids) == max_new_tokens else "stop")

    def stream(self, max_new_tokens: int, sampling: Sampling, stops: set[int]) -> Iterator[int]:
        """New tokens one by one, each in the cache when it comes."""
        self._check_whole()
        if self._logits is None:
            raise UserError("the session is empty; append a turn before an answer is generated")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        check_prompt(self.lm.facts, len(self._tokens), max_new_tokens, self.beyond_trained)
        draws = sampling.draws(1, max_new_tokens, self.lm.facts.device)
        for i in range(max_new_tokens):
            chosen = sampling.choose(self._logits, None if draws is None else draws[:, i])
            token = int(chosen)
            if token in stops:
                return
            self._whole = False
            self._logits = self.lm.step(self.cache, chosen)
            self._whole = True
            self._tokens.append(token)
            yield token

    def _check_whole(self) -> None:
        if not self._whole:
            raise UserError("the session was interrupted in the middle of a turn; go on from a fork or a saved one")

    def _plain_ids(self, turn: str | Sequence[int]) -> list[int]:
        if isinstance(turn, str) and self._tokens and self.lm.tokenizer is not None:  # a text begins only once
            turn = self.lm.tokenizer(turn, add_special_tokens=False)["input_ids"]
        return self.lm._ids(turn, "the turn")

    # ------------------------------------------------------------------------- chat

    def _chat_ids(self, turn: str | Sequence[int]) -> list[int]:
        tokenizer = self.lm.tokenizer
        if not isinstance(turn, str) or not turn.strip():
            raise UserError("a turn in the chat template is text, and not empty")
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("this model's tokenizer has no chat template; append plain text instead")
        text = self._next_turn(turn) if self._answering else self._first_turn(turn)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _first_turn(self, turn: str) -> str:
        return self._rendered([_said("user", turn)], answer=True)

    def _next_turn(self, turn: str) -> str:
        """What comes between an answer and the next one: all of the template's text after an answer's last word."""
        said = [_said("user", "question"), _said("assistant", "answer")]
        whole = self._rendered([*said, _said("user", turn)], answer=True)
        start = self._rendered(said[:1], answer=True) + "answer"
        if not whole.startswith(start):
            raise UserError("this model's chat template changes earlier turns, so a cache of them cannot go on with it")
        return whole[len(start) :]

    def _rendered(self, messages: list[dict[str, str]], answer: bool) -> str:
        system = [] if self.system is None else [_said("system", self.system)]
        return self.lm.tokenizer.apply_chat_template(system + messages, tokenize=False, add_generation_prompt=answer)

    # ----------------------------------------------------------- forks and files

    def fork(self) -> Session:
        """A session of its own that goes on from here; neither ever sees what the other does.

        Its cache is a copy, on the same place. Where that holds blocks of a pool (paged), no block is copied before one
        of the two writes to it; nor is what a shared archive holds.
        """
        self._check_whole()
        if not self.cache.started:
            return Session(self.lm, self.lm.new_cache(self.cache.strategy), self.system, self.beyond_trained)
        other = Session(self.lm, saved.copy(self.cache), self.system, self.beyond_trained)
        other._tokens, other._logits, other._answering = list(self._tokens), self._logits, self._answering
        return other

    def save(self, path: str | Path) -> None:
        """Write the session to a file, whole or not at all; what was there before stays until it is written.

        Raises:
            UserError: an empty session, or a file that cannot be written.
        """
        self._check_whole()
        if self._logits is None:
            raise UserError("the session is empty; append a turn before it is saved")
        about = {"system": self.system, "beyond_trained": self.beyond_trained, "answering": self._answering}
        tensors = {"session.tokens": torch.tensor(self._tokens), "session.logits": self._logits}
        saved.save(self.cache, path, {"session": about}, tensors)

    @classmethod
    def load(cls, path: str | Path, lm: LM) -> Session:
        """A saved session, under the strategy and on the place that it had.

        Raises:
            UserError: no such file, not a session, another model, a newer format, or a damaged file.
        """
        with open_tensors(path) as file:
            if "session" not in file.about:
                raise UserError(f"{path} holds a cache and no session; load it with kvatlas.load_cache")
            about: dict[str, Any] = file.about["session"]
            session = cls(lm, saved.load(file, lm), about["system"], about["beyond_trained"])
            session._tokens = file.get("session.tokens").tolist()
            session._logits = file.get("session.logits").to(lm.facts.device, copy=True)
            session._answering = about["answering"]
        return session


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
