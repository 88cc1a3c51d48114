"""One self-contained HTML file from a template, a style sheet, a script and the data."""

from __future__ import annotations

import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from sensli.errors import SensliError
from sensli.modules import checks
from sensli.page.words import words
from sensli.text.strict_json import strict
from sensli.text.writing import write_bytes

SCRIPTS = (  # in this order: each uses the earlier ones
    "tools.js", "network.js", "boxes.js", "graph.js", "decision.js", "boundary.js", "chart.js", "film.js"
)  # fmt: skip


def write_page(path: str | os.PathLike[str], data: dict[str, Any]) -> Path:
    """Write the page; an earlier one is replaced only when the new one is complete.

    Args:
        path: The file to write.
        data: What `page_data` returned.

    Returns:
        The path.
    """
    checks.instance("data", data, dict, "what page_data(history) returned")
    target = checks.path("path", path, error=SensliError)
    write_bytes(target, render(data).encode("utf-8", "replace"))  # a title may hold what is not text
    return target


def render(data: dict[str, Any]) -> str:
    """The whole page as text."""
    assets = files("sensli.page")
    template, style, *scripts = (
        (assets / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)
    )
    heading, text = words(data)
    # Inside a script element only "</" and "<!--" could end or confuse it; a backslash before "<" is the same JSON string.
    payload = json.dumps(strict(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"style": style, "script": "".join(scripts), "heading": heading, "words": text, "data": payload}
    # in one pass: a name given by the user must not be taken for a placeholder of the template
    return re.sub(r"<!--(\w+)-->", lambda place: parts[place.group(1)], template)
