"""From a file to a page: the history in any file that holds one is read, and the page is written as one HTML file."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from sensli.checkpoint import storage
from sensli.errors import HistoryError, SensliError
from sensli.modules import checks
from sensli.page.data import words
from sensli.surgery.history import History
from sensli.text.commands import TRAINER_FILE
from sensli.text.files import write_bytes
from sensli.text.records import strict_data

# ---- The plain data in a file that `torch.save` wrote, whatever else is in it: no tensor is read, and no class of the
# file is made.


class _Unknown:
    """In the place of everything that is not plain data."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _Unknown:
        return self

    def append(self, _: Any) -> None:
        """Of what was a list."""

    extend = add = update = append


class _PlainReader(pickle.Unpickler):
    """Reads mappings, sequences, numbers and texts; calls nothing that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Unknown

    def persistent_load(self, _: Any) -> Any:
        return None


def read_plain(path: Path) -> Any:
    """What the file holds, with `None` or an unknown object where a tensor or an object was."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        with archive.open(name) as stream:
            return _PlainReader(stream).load()


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
            data = storage.read_checkpoint(path)
        else:
            raise HistoryError(
                f"'{path}' is neither JSON nor a file that torch.save wrote. Give what History.save(path) wrote."
            )
    except SensliError:
        raise
    except Exception as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise HistoryError(
            f"'{path}' cannot be read ({type(error).__name__}: {why}). Give what History.save(path) wrote, "
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


# ---- One self-contained HTML file from a template, a style sheet, a script and the data.

SCRIPTS = (  # in this order: each uses the earlier ones
    "tools.js", "network.js", "boxes.js", "graph.js", "decision.js", "boundary.js", "chart.js", "save.js", "film.js"
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
    names = ("page.html", "page.css", *SCRIPTS)
    template, style, *scripts = ((assets / name).read_text(encoding="utf-8") for name in names)
    heading, text = words(data)
    # Inside a script element only "</" and "<!--" could end or confuse it; a backslash before "<" is the same JSON string.
    payload = json.dumps(strict_data(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"style": style, "script": "".join(scripts), "heading": heading, "words": text, "data": payload}
    # in one pass: a name given by the user must not be taken for a placeholder of the template
    return re.sub(r"<!--(\w+)-->", lambda place: parts[place.group(1)], template)
