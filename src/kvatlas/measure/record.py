"""Result records as files: what they hold (`kvatlas.measure.schema`), how they are named, written and read.

`write_record` is atomic. `read_records` never loses a study to one bad file: what it cannot read it says in `warnings`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from kvatlas.measure.figure import Figure, Part, wilson
from kvatlas.measure.files import Kind, read_folder, write_whole
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


def write_record(path: str | os.PathLike[str], record: Part) -> None:
    """Write atomically: a reader sees the old file or the whole new one, also after a crash."""
    write_whole(path, record.model_dump_json(indent=1) + "\n", "the record ")


KIND = Kind("record", Record, FORMAT, "schema_version", SCHEMA_VERSION)


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
    return Found(*read_folder(folder, KIND))
