"""Passages of a real text, cut to a number of tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import cache as once
from typing import Any

from kvatlas.errors import UserError
from kvatlas.quality.primed import encode
from kvatlas.workload.text import Text


def words(*texts: str) -> frozenset[str]:
    """The words of texts, whatever their case."""
    return frozenset(word for text in texts for word in re.findall(r"\w+", text.casefold()))


class Passages:
    """Parts of a text, in whole paragraphs, cut to a number of tokens."""

    def __init__(self, tokenizer: Any, text: Text) -> None:
        self.tokenizer, self.name, self.sha256 = tokenizer, text.name, text.sha256
        self.paragraphs, self.words = _paragraphs(text.text)
        if not self.paragraphs:
            raise UserError(f"{text.name} has no words to make a passage of")

    def draw(self, tokens: int, draw: random.Random, forbidden: Iterable[str] = ()) -> str:
        """A passage of at most ``tokens`` tokens (a few fewer: it ends with a word), from a drawn place on.

        It goes on at the text's beginning where the text ends. No word of it is ``forbidden``.
        """
        avoided, start, found, length = frozenset(forbidden), draw.randrange(len(self.paragraphs)), [""], 0
        for i in range(len(self.paragraphs) * 64):
            place = (start + i) % len(self.paragraphs)
            if not self.words[place] & avoided:
                found.append(self.paragraphs[place])
                length += len(encode(self.tokenizer, found[-1])) + 1
            if length > tokens + 16:
                break
        return cut(self.tokenizer, " ".join(found[1:]), tokens)


@once
def _paragraphs(text: str) -> tuple[list[str], list[frozenset[str]]]:
    found = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    found = [block for block in found if block]
    return found, [words(block) for block in found]


def cut(tokenizer: Any, text: str, tokens: int) -> str:
    """The first ``tokens`` tokens of a text, less the word that they end in."""
    ids = encode(tokenizer, text)
    if len(ids) <= tokens:
        return text
    head = tokenizer.decode(ids[:tokens], skip_special_tokens=True)
    return head.rsplit(" ", 1)[0].strip() or head.strip()
