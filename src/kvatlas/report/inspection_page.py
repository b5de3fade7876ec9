"""An inspection as files: one HTML page without network, one picture, one JSON. All of them, or none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvatlas.errors import UserError
from kvatlas.quality.inspect import Inspection
from kvatlas.report import inspection_charts as charts
from kvatlas.report.html import html
from kvatlas.report.inspection import PLACES, WORDS, as_json, percent, rows, sentences, title, zone_heads, zones
from kvatlas.report.inspection_table import HEADS, WHERE, notes, plain_cells


def write_inspection(found: Inspection, folder: str | os.PathLike[str], **about: Any) -> list[Path]:
    """Write ``NAME.html``, ``NAME.png`` and ``NAME.json`` into a folder, which is made if need be.

    NAME is ``inspect-`` and the strategy, with ``-`` for what file names do not like. ``about`` goes into the JSON (the
    model, the text); the page says its ``model`` and ``text``.

    Raises:
        UserError: when the folder cannot be written.
    """
    name = file_name(found.strategy.name)
    said = "; ".join(f"{key}: {about[key]}" for key in ("model", "text") if about.get(key))
    numbers = json.dumps(as_json(found, **about), indent=1, allow_nan=False) + "\n"
    return _write(
        Path(folder),
        {
            f"{name}.html": render(found, said).encode("utf-8"),
            f"{name}.png": charts.picture(found, title(found)),
            f"{name}.json": numbers.encode("utf-8"),
        },
    )


def file_name(strategy: str) -> str:
    """``inspect-h2o-0.3`` for ``h2o:0.3``; long names are cut, and stay different."""
    name = re.sub(r"[^A-Za-z0-9.=_]+", "-", strategy).strip("-.")
    if len(name) > 80:
        name = f"{name[:70]}-{hashlib.sha256(strategy.encode()).hexdigest()[:8]}"
    return f"inspect-{name}"


def render(found: Inspection, about: str = "") -> str:
    """The page as a string."""
    return html(
        "inspection.html.j2",
        ("redraw.js", "inspection.js"),
        charts.specs(found),
        name=found.strategy.name,
        title=title(found),
        about=about,
        sentences=sentences(found),
        heads=charts.HEADS,
        places=charts.PLACES,
        tables=_tables(found),
        notes=notes(found),
        words=WORDS,
        answers=found.strategy.answers(),
    )


def _tables(found: Inspection) -> list[Mapping[str, Any]]:
    shares, heads = zones(found), [head.replace("\n", " ") for head in HEADS]
    where = [[name, *map(percent, shares[name])] for name in PLACES]
    return [
        {"title": "By layer (the sinks, too, in %)", "heads": heads, "rows": [plain_cells(row) for row in rows(found)]},
        {"title": WHERE, "heads": ["%", *zone_heads(found)], "rows": where},
    ]


def _write(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """All files atomically: first each under another name, then all under their own."""
    made: list[tuple[str, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=folder)
            made.append((temporary, folder / name))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)
        for temporary, path in made:
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        for temporary, _ in made:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return [path for _, path in made]
