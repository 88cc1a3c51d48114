"""Files that are either whole or noticed: they carry their own checksum."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import torch

from sensli.paper.errors import StoreError
from sensli.text.writing import write_bytes

_MAGIC = b"sensli tensors 1 "


class Damaged(Exception):
    """The file is not what was once written."""


def write_tensors(path: Path, content: dict[str, Any]) -> str:
    """Store tensors and plain values; returns the checksum of what was written."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getvalue()
    checksum = hashlib.sha256(payload).hexdigest()
    write_bytes(path, _MAGIC + checksum.encode() + b"\n" + payload, StoreError)
    return checksum


def read_tensors(path: Path, checksum: str | None = None) -> dict[str, Any]:
    """Read what `write_tensors` wrote, or raise Damaged; nothing in the file is executed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(f"it cannot be read ({error.strerror})") from None
    head, _, payload = content.partition(b"\n")
    found = hashlib.sha256(payload).hexdigest()
    if head != _MAGIC + found.encode() or (checksum is not None and checksum != found):
        raise Damaged("the checksum does not match")
    try:
        loaded = torch.load(io.BytesIO(payload), weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for bytes that are not an archive
        raise Damaged(f"cannot be read as tensors: {type(error).__name__}") from None
    if not isinstance(loaded, dict):
        raise Damaged(f"it contains a {type(loaded).__name__}")
    return loaded


def write_json(path: Path, content: dict[str, Any]) -> None:
    body = {**content, "checksum": _json_checksum(content)}
    write_bytes(path, (json.dumps(body, indent=2) + "\n").encode(), StoreError)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        raise Damaged("it cannot be read as JSON") from None
    if not isinstance(content, dict) or content.pop("checksum", None) != _json_checksum(content):
        raise Damaged("the checksum does not match")
    return content


def _json_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
