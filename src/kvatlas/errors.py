"""The one error that users are meant to see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message says what was wrong and what is allowed. The CLI prints it and exits with 2."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint such as ``did you mean 'h2o'?``, or the allowed words when nothing is near."""
    names = sorted(allowed)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"choose from: {', '.join(names)}"
