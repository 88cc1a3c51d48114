"""The history in a file, whatever the file is: a history, the state of a Grower, or a checkpoint that holds one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sensli.errors import HistoryError, SensliError
from sensli.growing import storage
from sensli.modules import checks
from sensli.page.plain import read_plain
from sensli.surgery.history.history import History
from sensli.text.names import TRAINER_FILE

_ZIP = b"PK\x03\x04"  # the first bytes of what torch.save writes


def read_history(path: str | os.PathLike[str]) -> History:
    """Read the history from whatever holds one. Runs no code from it, and reads no weights.

    Args:
        path: A file that `History.save`, `save_checkpoint`, `json.dump`, `torch.save` or Lightning's Trainer wrote; or the folder of a
            sharded checkpoint, of a checkpoint of the Hugging Face Trainer, or its output folder, of which the last checkpoint is read.

    Returns:
        The history.

    Raises:
        HistoryError: If the file cannot be read or does not hold a history.
    """
    path = checks.path("path", path, error=HistoryError)
    try:
        path = _file_in(path) if path.is_dir() else path
        with path.open("rb") as stream:
            start = stream.read(64)
        if start.lstrip()[:1] in (b"{", b"["):
            data = json.loads(path.read_bytes())
        elif start.startswith(_ZIP):
            data = read_plain(path)
        elif start.startswith(storage.MAGIC):
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


def _file_in(folder: Path) -> Path:
    """The file of a folder that has the history: of a sharded checkpoint, of one of the Hugging Face Trainer, or of its last one."""
    saved = [each for each in folder.glob("checkpoint-*/" + TRAINER_FILE) if each.parent.name[11:].isdigit()]
    last = sorted(saved, key=lambda each: int(each.parent.name[11:]))[-1:]
    candidates = (folder / storage.FILE, folder / TRAINER_FILE, *last)
    found = next((each for each in candidates if each.is_file()), None)
    if found is None:
        raise HistoryError(
            f"'{folder}' is a folder without a history: it has no file '{storage.FILE}' (of save_checkpoint), no '{TRAINER_FILE}' (of "
            "GrowthCallback), and no checkpoint-* with one. Give the file itself."
        )
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]


def _find(data: Any, depth: int = 6) -> Mapping[str, Any] | None:
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
