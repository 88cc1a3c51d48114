"""Packages that only some features need: imported when they are, with a clear word where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from sensli.errors import MissingExtra


def imported(module: str, feature: str, *, extra: str | None = None) -> Any:
    """A module of a package that may be missing; ``extra`` is the one of ours that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        wanted = package if extra is None else f"'sensli[{extra}]'"
        raise MissingExtra(
            f"{feature} needs {package}, which cannot be imported ({error}). Get it with: pip install {wanted}"
        ) from error
