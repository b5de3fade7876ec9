"""A folder of quality cells: one file each, named by what was asked, written atomically.

They may lie beside the records of ``kvatlas compare``: each reader passes over the other's files by their ``format``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from kvatlas.errors import UserError
from kvatlas.measure.record import write_record
from kvatlas.measure.schema import Model
from kvatlas.quality.cell import FORMAT, VERSION, QualityRecord, TaskPart, cell_key


class Cells(NamedTuple):
    """Records in the order of their file names, and a line for each file that cannot be read."""

    records: list[QualityRecord]
    warnings: list[str]


def cell_name(strategy: str, task: TaskPart, model: Model, dtype: str) -> str:
    """The file name of a cell, known before it is run, so that a second run finds what is done.

    ``strategy`` is the normalised spec. Another model, other weights, another dtype, limit, seed or parameter of the
    task: another file. Threads and machine are not in it.
    """
    asked = {
        "model": model.name, "weights": model.weights, "stored": model.stored, "dtype": dtype,
        "parameters": task.parameters, "limit": task.limit, "seed": task.seed,
    }  # fmt: skip
    return cell_key(strategy, task.name, asked)


def name_of(record: QualityRecord) -> str:
    """The file name under which a record belongs."""
    return cell_name(record.strategy.normalised, record.task, record.model, record.dtype)


def write_cell(folder: str | os.PathLike[str], record: QualityRecord) -> Path:
    """Write a record into a folder, which is made if need be: a reader sees the old file or the whole new one.

    Raises UserError where it cannot be written.
    """
    path = Path(folder) / name_of(record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the record {path}: {error.strerror or error}") from error
    write_record(path, cast(Any, record))
    return path


def read_cells(folder: str | os.PathLike[str]) -> Cells:
    """All quality records of a folder.

    Foreign files are ignored: hidden ones, other names than ``*.json``, JSON of another format. A file that has a
    record's name but is no JSON, a record of another version or one that lacks something is left out and named in
    ``warnings``. Raises UserError where the folder cannot be listed.
    """
    try:
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix == ".json" and path.name[0] != ".")
    except OSError as error:
        raise UserError(f"cannot read records from {folder}: {error.strerror or error}") from error
    found = Cells([], [])
    for path in paths:
        record = _read(path)
        if isinstance(record, QualityRecord):
            found.records.append(record)
        elif record is not None:
            found.warnings.append(f"{path}: {record}; it is left out (delete it, or measure again to write over it)")
    return found


def _read(path: Path) -> QualityRecord | str | None:
    """The record, or why it cannot be read, or None for a foreign file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"cannot be read ({error.strerror})" if path.is_file() else None
    except ValueError:
        return "is not valid JSON" if re.search(r"-[0-9a-f]{12}\.json$", path.name) else None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return None
    if data.get("version") != VERSION:
        return f"has version {data.get('version')!r}, this kvatlas reads {VERSION}"
    try:
        return QualityRecord.model_validate(data)
    except ValidationError as error:
        first: Mapping[str, Any] = error.errors()[0]
        return f"is not a valid quality record ({'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']})"
