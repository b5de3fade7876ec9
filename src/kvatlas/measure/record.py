"""Result records as files: what they hold (`kvatlas.measure.schema`), how they are named, written and read.

`write_record` is atomic. `read_records` never loses a study to one bad file: what it cannot read it says in `warnings`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from kvatlas.errors import UserError
from kvatlas.measure.figure import Figure, wilson
from kvatlas.measure.schema import (
    FORMAT,
    REFERENCE,
    SCHEMA_VERSION,
    Environment,
    Memory,
    Model,
    PerGB,
    Quality,
    Realised,
    Record,
    Setting,
    StepSplit,
    Strategy,
    Tier,
    Timing,
    Transfers,
    Workload,
    key,
)

__all__ = [
    "REFERENCE",
    "SCHEMA_VERSION",
    "Environment",
    "Figure",
    "Found",
    "Memory",
    "Model",
    "PerGB",
    "Quality",
    "Realised",
    "Record",
    "Setting",
    "StepSplit",
    "Strategy",
    "Tier",
    "Timing",
    "Transfers",
    "Workload",
    "key",
    "read_records",
    "wilson",
    "write_record",
]


def write_record(path: str | os.PathLike[str], record: Record) -> None:
    """Write atomically: a reader sees the old file or the whole new one, also after a crash."""
    path = Path(path)
    text = record.model_dump_json(indent=1) + "\n"
    temporary = None
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
            raise UserError(f"cannot write the record {path}: {error.strerror or error}") from error
        raise


class Found(NamedTuple):
    """What `read_records` found: records in the order of their file names, and one line for each unreadable record."""

    records: list[Record]
    warnings: list[str]


def read_records(folder: str | os.PathLike[str]) -> Found:
    """All records of a folder.

    Foreign files are ignored: other names than ``*.json``, and JSON that does not call itself a record. A file that has
    a record's name but is no JSON, or a record of another schema version, is left out and named in `warnings`
    (measuring again writes over it). Raises `UserError` when the folder cannot be listed.
    """
    folder = Path(folder)
    try:
        paths = sorted(
            entry for entry in folder.iterdir() if entry.suffix == ".json" and not entry.name.startswith(".")
        )
    except OSError as error:
        raise UserError(f"cannot read records from {folder}: {error.strerror or error}") from error
    found = Found([], [])
    for path in paths:
        record = _read(path)
        if isinstance(record, Record):
            found.records.append(record)
        elif record is not None:
            found.warnings.append(f"{path}: {record}; it is left out (delete it, or measure again to write over it)")
    return found


def _read(path: Path) -> Record | str | None:
    """The record, or why it cannot be read, or None for a foreign file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"cannot be read ({error.strerror})" if path.is_file() else None
    except ValueError:
        return "is not valid JSON" if re.search(r"-[0-9a-f]{12}\.json$", path.name) else None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return None
    if data.get("schema_version") != SCHEMA_VERSION:
        return f"has schema version {data.get('schema_version')!r}, this kvatlas reads {SCHEMA_VERSION}"
    try:
        return Record.model_validate(data)
    except ValidationError as error:
        first: Mapping[str, Any] = error.errors()[0]
        where: Sequence[Any] = first["loc"]
        return f"is not a valid record ({'.'.join(map(str, where)) or 'record'}: {first['msg']})"
