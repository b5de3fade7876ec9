"""Local files of the reasoning tasks, read into the shape of the hub's records.

Where a file says less than the hub's, the prompts differ so far: HellaSwag's second clause is not capitalised when its
context comes already joined (``ctx``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvatlas.errors import UserError

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a task's records are: patterns of file names, the keys that each needs, and their way to the hub's."""

    files: tuple[str, ...]
    keys: Mapping[str, type | tuple[type, ...]]
    shape: Callable[[Row], dict[str, Any]]


def cleaned(text: str) -> str:
    """HellaSwag's text without WikiHow's marks, as lm-eval cleans it."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(row: Row) -> dict[str, Any]:
    return {
        "query": cleaned(row["ctx"]),
        "choices": [cleaned(ending) for ending in row["endings"]],
        "label": _within(row, "label", len(row["endings"])),
    }


def _piqa(row: Row) -> dict[str, Any]:
    return {**_only(row, "goal", "sol1", "sol2"), "label": _within(row, "label", 2)}


def _boolq(row: Row) -> dict[str, Any]:
    return {**_only(row, "question", "passage"), "label": _within(row, "label", 2)}


def _copa(row: Row) -> dict[str, Any]:
    if row["question"] not in ("cause", "effect"):
        raise UserError(f"'question' must be cause or effect, not {row['question']!r}")
    return {**_only(row, "premise", "choice1", "choice2", "question"), "label": _within(row, "label", 2)}


def _rte(row: Row) -> dict[str, Any]:
    labels = ("entailment", "not_entailment")
    if row["label"] not in labels:
        raise UserError(f"'label' must be {' or '.join(labels)}, not {row['label']!r}")
    return {"sentence1": row["premise"], "sentence2": row["hypothesis"], "label": labels.index(row["label"])}


def _chosen(row: Row, text: str = "question") -> dict[str, Any]:
    """One of several answers to a query, which may begin with the words that lm-eval puts there itself."""
    letters = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    return {
        text: row["query"].removeprefix("Question: "),
        "choices": {"text": list(row["choices"]), "label": letters},
        "answerKey": letters[_within(row, "gold", len(letters))],
    }


def _winogrande(row: Row) -> dict[str, Any]:
    if len(row["context_options"]) != 2:
        raise UserError("'context_options' must be two texts")
    first, second = (option.split(" ") for option in row["context_options"])
    same = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
    before = " ".join(first[:same]) + " " if same else ""
    return {
        "sentence": f"{before}_ {row['continuation']}",
        "option1": " ".join(first[same:]),
        "option2": " ".join(second[same:]),
        "answer": str(1 + _within(row, "gold", 2)),
    }


def _only(row: Row, *keys: str) -> dict[str, Any]:
    return {key: row[key] for key in keys}


def _within(row: Row, key: str, n: int) -> int:
    if not 0 <= int(row[key]) < n:
        raise UserError(f"'{key}' must be 0 to {n - 1}, not {row[key]}")
    return int(row[key])


_QUERY: dict[str, type | tuple[type, ...]] = {"query": str, "choices": list, "gold": int}
SOURCES: dict[str, Source] = {
    "hellaswag": Source(("hellaswag*.jsonl",), {"ctx": str, "endings": list, "label": int}, _hellaswag),
    "piqa": Source(
        ("piqa*.jsonl", "piqa/valid*.jsonl", "valid.jsonl"), {"goal": str, "sol1": str, "sol2": str, "label": int},
        _piqa,
    ),
    "boolq": Source(("boolq*.jsonl",), {"passage": str, "question": str, "label": (bool, int)}, _boolq),
    "openbookqa": Source(
        ("openbook_qa*.jsonl", "openbookqa*.jsonl"), _QUERY, partial(_chosen, text="question_stem")
    ),
    "winogrande": Source(
        ("winogrande*.jsonl",), {"context_options": list, "continuation": str, "gold": int}, _winogrande
    ),
    "arc_easy": Source(("arc_easy*.jsonl",), _QUERY, _chosen),
    "arc_challenge": Source(("arc_challenge*.jsonl",), _QUERY, _chosen),
    "copa": Source(
        ("copa*.jsonl",), {"premise": str, "choice1": str, "choice2": str, "question": str, "label": int}, _copa
    ),
    "rte": Source(("rte*.jsonl",), {"premise": str, "hypothesis": str, "label": str}, _rte),
}  # fmt: skip
NAMES = tuple(SOURCES)


def file_of(name: str, folder: str | Path) -> Path:
    """A task's file in a folder, or one folder down. Raises UserError where there is none."""
    base = Path(folder)
    if not base.is_dir():
        raise UserError(f"no folder {base} to read the task '{name}' from")
    for pattern in SOURCES[name].files:
        found = sorted(base.glob(pattern)) or sorted(base.glob(f"*/{pattern}"))
        if found:
            return found[0]
    raise UserError(f"no file for the task '{name}' in {base} or one folder down: {' or '.join(SOURCES[name].files)}")


def digest(path: Path) -> str:
    """The first 12 digits of the SHA-256 of a file, and of its labels' where they lie apart."""
    parts = [part for part in (path, _labels_beside(path)) if part.is_file()]
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()[:12]


def read_records(name: str, path: Path) -> list[dict[str, Any]]:
    """A file's records in the hub's shape. Raises UserError that names the file, the line and the key."""
    source, labels = SOURCES[name], _labels_beside(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    answers = labels.read_text(encoding="utf-8").split() if labels.is_file() else None
    if answers is not None and len(answers) != len(lines):
        raise UserError(f"{labels} has {len(answers)} labels for the {len(lines)} records of {path.name}")
    records = []
    for number, line in enumerate(lines):
        try:
            row = _row(line)
            if answers is not None and "label" not in row:
                row["label"] = int(answers[number]) if answers[number].isdigit() else answers[number]
            _check(row, source.keys)
            records.append(source.shape(row))
        except UserError as error:
            raise UserError(f"{path}, line {number + 1}: {error}") from None
    if not records:
        raise UserError(f"{path} has no records")
    return records


def _labels_beside(path: Path) -> Path:
    """PIQA's labels have a file of their own."""
    return path.with_name(f"{path.stem}-labels.lst")


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"a record must be an object, not {type(row).__name__}")
    return row


def _check(row: Row, keys: Mapping[str, type | tuple[type, ...]]) -> None:
    for key, kind in keys.items():
        if key not in row:
            raise UserError(f"no key '{key}' (a record needs {', '.join(keys)})")
        value = row[key]
        texts = kind is not list or (isinstance(value, list) and value and all(isinstance(v, str) for v in value))
        if not isinstance(value, kind) or not texts:
            wanted = "a list of texts" if kind is list else "text" if kind is str else "a number"
            raise UserError(f"'{key}' must be {wanted}, not {json.dumps(value)[:40]}")
        if isinstance(value, str) and not value.strip():
            raise UserError(f"'{key}' is empty")
