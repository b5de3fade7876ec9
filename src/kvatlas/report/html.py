"""One HTML file without a network: a template, its data, and scripts that the page itself allows by their hashes."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from kvatlas.report.charts import library


def html(template: str, scripts: tuple[str, ...], data: Any, **values: Any) -> str:
    """A page of the report as a string.

    Args:
        template: a file of this package, as are the ``scripts`` that run after the chart library.
        data: for the scripts, as JSON.
        values: what else the template names.
    """
    import jinja2

    engine, script = library(), "".join(map(_asset, scripts))
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_asset(template)).render(
        data=_script_json(data),
        css=_asset("page.css"),
        library=engine,
        script=script,
        hashes=[_csp_hash(engine), _csp_hash(script)],
        **values,
    )


def _asset(file: str) -> str:
    return files("kvatlas.report").joinpath(file).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _script_json(value: Any) -> str:
    """JSON that cannot end its script element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
