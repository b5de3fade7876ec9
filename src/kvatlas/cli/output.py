"""What commands that measure for long have in common: the file that they are asked for, and being stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from kvatlas.errors import UserError


def check_file(option: str, path: str) -> None:
    """Raise UserError where no such file can be written."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(f"{option} {path} is a folder; give a file")
    if not file.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {file.parent}")


def write_json(path: str, records: Sequence[BaseModel]) -> None:
    """All records in one file."""
    import json

    from kvatlas.measure.files import write_whole

    text = json.dumps([record.model_dump(mode="json") for record in records], indent=1)
    write_whole(Path(path).expanduser(), text + "\n")


def stopped(out: Path) -> int:
    """Say what a command that was stopped has left in its folder. Returns its exit code."""
    kept = out.is_dir() and any(out.iterdir())
    where = f"what was finished is kept in {out}, and the same command goes on from there"
    print(f"\nstopped; {where if kept else 'nothing was finished yet'}", file=sys.stderr)
    return 130
