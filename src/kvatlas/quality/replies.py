"""Replies of finished batches, kept until their task is done, so that a battery that is killed does not ask again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvatlas.errors import UserError
from kvatlas.measure.files import write_whole
from kvatlas.quality.question import Footprint, Question, Reply
from kvatlas.strategy.spec import parse

VERSION = 1


class Replies:
    """A folder with one file for each strategy and batch.

    Args:
        folder: made when the first reply is kept.
        about: what else the replies depend on, such as the weights and the dtype.
    """

    def __init__(self, folder: Path, about: Sequence[str]) -> None:
        self.folder, self.about = folder, list(about)

    def get(self, spec: str, batch: Sequence[Question]) -> list[Reply] | None:
        """The replies, or None where they are not there (or cannot be read)."""
        try:
            found = json.loads(self._path(spec, batch).read_text(encoding="utf-8"))
            return [_reply(one) for one in found] if len(found) == len(batch) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, spec: str, batch: Sequence[Question], replies: Sequence[Reply]) -> None:
        """Keep them. Raises UserError where the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self.folder}: {error.strerror or error}") from error
        write_whole(self._path(spec, batch), json.dumps([asdict(reply) for reply in replies]))

    def clear(self) -> None:
        """The task is done: nothing of it has to be kept here."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    def _path(self, spec: str, batch: Sequence[Question]) -> Path:
        asked = [VERSION, self.about, parse(spec).name, [asdict(question) for question in batch]]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"


def _reply(data: dict) -> Reply:  # type: ignore[type-arg]
    tuples = {name: tuple(data[name]) for name in ("choices", "greedy", "candidates", "written")}
    return Reply(**tuples, footprint=Footprint(**data["footprint"]))
