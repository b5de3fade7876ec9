"""A folder of quality cells: one file each, named by what was asked, written atomically.

They may lie beside the records of ``kvatlas compare``: each reader passes over the other's files by their ``format``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kvatlas.errors import UserError
from kvatlas.measure.files import Kind, read_folder
from kvatlas.measure.record import write_record
from kvatlas.measure.schema import Model
from kvatlas.quality.cell import FORMAT, VERSION, QualityRecord, TaskPart, cell_key

KIND = Kind("quality record", QualityRecord, FORMAT, "version", VERSION)


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
    write_record(path, record)
    return path


def read_cells(folder: str | os.PathLike[str]) -> Cells:
    """All quality records of a folder.

    Foreign files are ignored: hidden ones, other names than ``*.json``, JSON of another format. A file that has a
    record's name but is no JSON, a record of another version or one that lacks something is left out and named in
    ``warnings``. Raises UserError where the folder cannot be listed.
    """
    return Cells(*read_folder(folder, KIND))
