"""How a conversation is written down: as plain lines, or in the model's chat format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvatlas.errors import UserError


class Turn(NamedTuple):
    """What the user said and what the assistant answered."""

    said: str
    answered: str


class Form(Protocol):
    """A way to write turns down. ``special``: whether the tokenizer adds its start token; ``gap``: before an answer."""

    special: bool
    gap: str

    def context(self, turns: Sequence[Turn]) -> str:
        """The turns."""

    def asked(self, turns: Sequence[Turn], ask: str) -> str:
        """The turns, a question, and what stands before its answer."""


class Plain:
    """Lines that begin with ``User:`` and ``Assistant:``, which base models continue as well."""

    special, gap = True, " "

    def context(self, turns: Sequence[Turn]) -> str:
        return "".join(f"User: {turn.said}\nAssistant: {turn.answered}\n" for turn in turns)

    def asked(self, turns: Sequence[Turn], ask: str) -> str:
        return f"{self.context(turns)}User: {ask}\nAssistant:"


class Chat:
    """The tokenizer's chat template. Raises UserError where there is none, or where it rewrites earlier turns."""

    special, gap = False, ""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("format=chat needs a chat template, and this tokenizer has none; use format=plain")
        self.tokenizer = tokenizer
        turns = [Turn("Hello.", "Hi."), Turn("Thanks.", "You are welcome.")]
        asked = self.asked(turns, "Why?")
        if not (self.context(turns).startswith(self.context(turns[:1])) and asked.startswith(self.context(turns))):
            raise UserError("this tokenizer's chat template rewrites earlier turns; use format=plain")

    def context(self, turns: Sequence[Turn]) -> str:
        return self._written(_messages(turns), False) if turns else ""

    def asked(self, turns: Sequence[Turn], ask: str) -> str:
        return self._written([*_messages(turns), {"role": "user", "content": ask}], True)

    def _written(self, messages: list[dict[str, str]], answer: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [
        message
        for turn in turns
        for message in ({"role": "user", "content": turn.said}, {"role": "assistant", "content": turn.answered})
    ]
