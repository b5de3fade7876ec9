"""Files that are whole or not there, and folders of JSON records: what compare and the quality battery share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from kvatlas.errors import UserError

T = TypeVar("T", bound=BaseModel)


def write_whole(path: str | os.PathLike[str], text: str, what: str = "") -> None:
    """Write atomically: a reader sees the old file or the whole new one, also after a crash.

    Raises UserError where it cannot be written; ``what`` it is then called (``the report ``).
    """
    path, temporary = Path(path), None
    try:
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {what}{path}: {error.strerror or error}") from error
        raise


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of record: how its files call themselves (``format``, and a version in the field ``field``)."""

    name: str
    model: type[T]
    format: str
    field: str
    version: int


def read_folder(folder: str | os.PathLike[str], kind: Kind[T]) -> tuple[list[T], list[str]]:
    """All records of a kind in a folder, in the order of their names, and a line for each that cannot be read.

    Foreign files are ignored: hidden ones, other names than ``*.json``, JSON of another format. Raises UserError where
    the folder cannot be listed.
    """
    try:
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix == ".json" and path.name[0] != ".")
    except OSError as error:
        raise UserError(f"cannot read records from {folder}: {error.strerror or error}") from error
    records: list[T] = []
    warnings: list[str] = []
    for path in paths:
        record = _read(path, kind)
        if isinstance(record, str):
            warnings.append(f"{path}: {record}; it is left out (delete it, or measure again to write over it)")
        elif record is not None:
            records.append(record)
    return records, warnings


def _read(path: Path, kind: Kind[T]) -> T | str | None:
    """The record, or why it cannot be read, or None for a foreign file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"cannot be read ({error.strerror})" if path.is_file() else None
    except ValueError:
        return "is not valid JSON" if re.search(r"-[0-9a-f]{12}\.json$", path.name) else None
    if not isinstance(data, dict) or data.get("format") != kind.format:
        return None
    if data.get(kind.field) != kind.version:
        return f"has {kind.field.replace('_', ' ')} {data.get(kind.field)!r}, this kvatlas reads {kind.version}"
    try:
        return kind.model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        return f"is not a valid {kind.name} ({'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']})"
