"""The plain data in a file that `torch.save` wrote, whatever else is in it: no tensor is read, and no class of the file is made."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any


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


class _Reader(pickle.Unpickler):
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
            return _Reader(stream).load()
