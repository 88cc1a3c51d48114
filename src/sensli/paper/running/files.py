"""Files that are either whole or noticed: they carry their own checksum."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sensli.growing import storage
from sensli.paper.errors import StoreError
from sensli.text.writing import write_bytes

_MAGIC = b"file of sensli results\n"


class Damaged(Exception):
    """The file is not what was once written."""


def write_tensors(path: Path, content: dict[str, Any]) -> str:
    """Store tensors and plain values; returns the checksum of what was written."""
    return storage.write_tensors(path, content, _MAGIC, StoreError)


def read_tensors(path: Path, checksum: str | None = None) -> dict[str, Any]:
    """Read what `write_tensors` wrote, or raise Damaged; nothing in the file is executed."""
    try:
        content, found = storage.read_tensors(path, _MAGIC)
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from None
    except storage.Unusable as error:
        raise Damaged(str(error)) from None
    if checksum not in (None, found):
        raise Damaged("is not the file that was written with its facts: the checksum does not match")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    body = {**content, "checksum": _json_checksum(content)}
    write_bytes(path, (json.dumps(body, indent=2) + "\n").encode(), StoreError)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
        known = content.pop("checksum", None) if isinstance(content, dict) else None
        found = _json_checksum(content)
    except (OSError, ValueError, RecursionError):
        raise Damaged("it cannot be read as JSON") from None
    if not isinstance(content, dict) or known != found:
        raise Damaged("the checksum does not match")
    return content


def _json_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
