"""Real text to hide something in: Python's manual, Moby Dick, or the user's own file."""

from __future__ import annotations

from pathlib import Path

from kvatlas.errors import UserError
from kvatlas.workload.text import Text, default_text, file_text

MANUAL, NOVEL = "manual", "moby-dick"
FILE = "gutenberg_moby_dick/2701-0.txt"
FIRST, AFTER = "Call me Ishmael.", "End of Project Gutenberg"


def hay(text: str | Path, data_dir: str | Path | None) -> Text:
    """``manual`` (its scored part), ``moby-dick`` (from ``data_dir``, without what stands around it), or a file.

    Raises UserError for a text that is not there.
    """
    if text == MANUAL:
        return default_text().split()[1]
    if text != NOVEL:
        return file_text(text)
    if data_dir is None:
        raise UserError("text=moby-dick is read from a data folder; say where it is (data_dir, --data-dir)")
    path = Path(data_dir).expanduser() / FILE
    if not path.is_file():
        raise UserError(f"no file {path} for text=moby-dick; use another data folder, or text=manual")
    whole = file_text(path).text
    start, end = whole.find(FIRST), whole.find(AFTER)
    return Text(whole[max(start, 0) : end if end > 0 else None], NOVEL)
