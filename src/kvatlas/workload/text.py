"""Real text for prompts: Python's own manual by default, or the user's file; sliced by exact token counts."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvatlas.errors import UserError

CALIBRATION = 0.2  # the share of a text, at its end, that calibration may see and nothing that is scored does


@dataclass(frozen=True, slots=True)
class Text:
    """A text, what a record calls it, and its hash."""

    text: str
    name: str
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", hashlib.sha256(self.text.encode("utf-8")).hexdigest())

    def split(self, calibration: float = CALIBRATION) -> tuple[Text, Text]:
        """(calibration, scored): disjoint; the last share of the text, cut at a line, is for calibration.

        Raises UserError for a share outside 0..1 or a text too short to share.
        """
        if not 0 < calibration < 1:
            raise UserError(f"the calibration share must lie between 0 and 1, not {calibration}")
        cut = int(len(self.text) * (1 - calibration))
        line = self.text.rfind("\n", 0, cut) + 1
        cut = line or cut
        scored, kept = self.text[:cut], self.text[cut:]
        if not scored.strip() or not kept.strip():
            raise UserError(f"{self.name} has {len(self.text)} characters, too few to set a part aside for calibration")
        return Text(kept, f"{self.name}, calibration part"), Text(scored, f"{self.name}, scored part")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt and of how the text really goes on."""

    ids: tuple[int, ...]
    continuation: tuple[int, ...]
    start: int  # where in the text's tokens the prompt starts


def default_text() -> Text:
    """The English prose of Python's manual (``pydoc_data.topics``), each paragraph once, in a fixed order."""
    from pydoc_data.topics import topics

    paragraphs: dict[str, None] = {}
    for topic in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[topic]):
            if _is_prose(block):
                paragraphs[" ".join(block.split())] = None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Text("\n\n".join(paragraphs) + "\n", f"the Python {version} manual")


def file_text(path: str | Path) -> Text:
    """A UTF-8 text file. Raises UserError when it is missing, a folder, unreadable, empty or not UTF-8 text."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(f"{path} is a folder; give one UTF-8 text file")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no file {path}; give a UTF-8 text file, or none for the built-in text") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8 first") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if not text.strip():
        raise UserError(f"{path} is empty; give a text file with words in it")
    return Text(text, file.name)


def prompts(
    tokenizer: Any, text: Text, n: int, tokens: int, new_tokens: int = 0, offset: int = 0, overlap: bool = False
) -> list[Prompt]:
    """`n` prompts of exactly `tokens` tokens, each with the `new_tokens` that follow, from token `offset` on.

    They lie one after the other; with `overlap` they are spread evenly and may share text (for speed, not for scores).
    Where the tokenizer puts a start token before a text, each prompt begins with it (it counts as one of `tokens`).
    Raises UserError when the text is too short.
    """
    _check_sizes(n, tokens, new_tokens, offset)
    ids = _encode(tokenizer, text.text)
    head = _start_token(tokenizer)
    if head and tokens == 1:
        raise UserError("a prompt of 1 token would be the start token alone; use 2 tokens or more")
    each = tokens - len(head) + new_tokens
    if n > len(ids):
        raise UserError(
            f"{text.name} has {len(ids)} tokens, too few for {n} different prompts; use a longer text or fewer prompts"
        )
    wanted = offset + (each if overlap else n * each)
    if len(ids) < wanted:
        shape = f"{n} prompts of {tokens} + {new_tokens}" if not overlap else f"a prompt of {tokens} + {new_tokens}"
        after = f" from token {offset} on" if offset else ""
        raise UserError(
            f"{text.name} has {len(ids)} tokens, and {shape} tokens{after} need {wanted}; "
            "use fewer or shorter prompts, or a longer text"
        )
    step = each if not overlap else (len(ids) - offset - each) // max(1, n - 1)
    starts = [offset + i * min(step, each) for i in range(n)]
    cut = tokens - len(head)
    return [Prompt((*head, *ids[s : s + cut]), tuple(ids[s + cut : s + each]), s) for s in starts]


def random_prompts(vocab: int, n: int, tokens: int, new_tokens: int = 0, seed: int = 0) -> list[Prompt]:
    """Prompts of random ids, for models without a tokenizer (``load_format=dummy``): speed and memory only."""
    import random

    _check_sizes(n, tokens, new_tokens, 0)
    draw, low = random.Random(seed), min(3, vocab - 1)  # the first ids are usually special tokens
    made = []
    for _ in range(n):
        ids = tuple(draw.randrange(low, vocab) for _ in range(tokens + new_tokens))
        made.append(Prompt(ids[:tokens], ids[tokens:], 0))
    return made


def _is_prose(block: str) -> bool:
    """Whether a paragraph is sentences: not code, grammar, a table or a heading."""
    words = " ".join(block.split())
    if "::=" in words or ">>>" in words or not words.endswith((".", ":", ";", "!", "?")):
        return False
    letters = sum(char.isalpha() or char == " " for char in words)
    return len(words.split()) >= 8 and letters >= 0.85 * len(words)


def _check_sizes(n: int, tokens: int, new_tokens: int, offset: int) -> None:
    for what, value, least in (("prompts", n, 1), ("tokens", tokens, 1), ("new tokens", new_tokens, 0)):
        if value < least:
            raise UserError(f"the number of {what} must be {least} or more, not {value}")
    if offset < 0:
        raise UserError(f"the offset into the text must be 0 or more, not {offset}")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _start_token(tokenizer: Any) -> tuple[int, ...]:
    """The start token, where this tokenizer puts one before a text."""
    start = getattr(tokenizer, "bos_token_id", None)
    ids = tokenizer("a", verbose=False)["input_ids"]
    return (start,) if start is not None and len(ids) > 1 and ids[0] == start else ()
