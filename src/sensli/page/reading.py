"""The history in a file, whatever the file is: a history, the state of a Grower, or a checkpoint that holds one."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from sensli.errors import HistoryError, SensliError
from sensli.growing import storage
from sensli.modules import checks
from sensli.surgery.history.history import History

_ZIP = b"PK\x03\x04"  # the first bytes of what torch.save writes


def read_history(path: str | os.PathLike[str]) -> History:
    """Read the history from a file that `History.save`, `save_checkpoint`, `json.dump` or `torch.save` wrote. Runs no code from it.

    Args:
        path: The file to read.

    Returns:
        The history.

    Raises:
        HistoryError: If the file cannot be read or does not hold a history.
    """
    path = checks.path("path", path, error=HistoryError)
    try:
        if path.is_dir():  # a checkpoint of a sharded model
            path = path / storage.FILE
        content = path.read_bytes()
        if content.lstrip()[:1] in (b"{", b"["):
            data = json.loads(content)
        elif content.startswith(_ZIP):
            data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        elif content.startswith(storage.MAGIC):
            data = storage.read(path)
        else:
            raise HistoryError(
                f"'{path}' is neither JSON nor a file that torch.save wrote. Give what History.save(path) wrote."
            )
    except SensliError:
        raise
    except Exception as error:
        raise HistoryError(
            f"'{path}' cannot be read ({type(error).__name__}: {_first_line(error)}). Give what History.save(path) wrote, "
            "or a checkpoint of plain data and tensors."
        ) from error
    found = _find(data)
    if found is None:
        raise HistoryError(
            f"'{path}' does not contain a history. Give what History.save(path) wrote, or a checkpoint with grower.state_dict() in it."
        )
    return History.from_dict(found)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]


def _find(data: Any, depth: int = 4) -> Mapping[str, Any] | None:
    """The first mapping with growths in it, under any name, a few levels deep."""
    if not isinstance(data, Mapping) or depth == 0:
        return None
    if "growths" in data:
        return data
    # the grower's own first: a checkpoint may hold the history twice, and that one has the record
    for name in sorted(data, key=lambda name: name != "grower"):
        found = _find(data[name], depth - 1)
        if found is not None:
            return found
    return None
