"""The file beside the weights in every folder that a growing Trainer saves: what `GrowthCallback` needs to resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sensli.errors import CheckpointError, brief
from sensli.text.names import TRAINER_FILE
from sensli.text.strict_json import dumps as strict_json
from sensli.text.writing import write_bytes

FORMAT = 1


def write(folder: Path, state: dict[str, Any]) -> None:
    """Write plain data; an earlier file is replaced only when the new one is complete."""
    write_bytes(folder / TRAINER_FILE, strict_json({"format": FORMAT, **state}).encode(), CheckpointError)


def read(folder: Path) -> dict[str, Any] | None:
    """What `write` wrote; None if the file is missing, or the model had not begun to grow."""
    file = folder / TRAINER_FILE
    if not file.is_file():
        return None
    try:
        state: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if state["format"] > FORMAT:
            raise CheckpointError(
                f"{file} has format {state['format']}, newer than {FORMAT}. Update sensli to read it."
            )
        if not isinstance(state["grower"], (dict, type(None))):
            raise TypeError(f"'grower' is {brief(state['grower'])}")
        return state if state["grower"] is not None else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged: {type(error).__name__}: {error}. Use an intact checkpoint."
        ) from error
