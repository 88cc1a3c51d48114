"""Files that are either whole or noticed: written aside, renamed into place, and carrying their own checksum."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from sensli.paper.errors import StoreError

_MAGIC = b"sensli tensors 1 "


class Damaged(Exception):
    """The file is not what was once written."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary neighbour, flush to disk, rename: a reader sees the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}). Choose another folder with --out.") from None


def write_tensors(path: Path, content: dict[str, Any]) -> str:
    """Store tensors and plain values; returns the checksum of what was written."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getvalue()
    checksum = hashlib.sha256(payload).hexdigest()
    write_bytes(path, _MAGIC + checksum.encode() + b"\n" + payload)
    return checksum


def read_tensors(path: Path, checksum: str | None = None) -> dict[str, Any]:
    """Read what `write_tensors` wrote, or raise Damaged; nothing in the file is executed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from None
    head, _, payload = content.partition(b"\n")
    found = hashlib.sha256(payload).hexdigest()
    if head != _MAGIC + found.encode() or (checksum is not None and checksum != found):
        raise Damaged("the checksum does not match")
    loaded: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True)
    return loaded


def write_json(path: Path, content: dict[str, Any]) -> None:
    body = {**content, "checksum": _json_checksum(content)}
    write_bytes(path, (json.dumps(body, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        raise Damaged("not readable as JSON") from None
    if not isinstance(content, dict) or content.pop("checksum", None) != _json_checksum(content):
        raise Damaged("the checksum does not match")
    return content


def _json_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
