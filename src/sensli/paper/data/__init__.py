"""The images of the CNN experiments, by name: where they are, and what is known of them without reading them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sensli.paper.data import cifar10, fashion_mnist
from sensli.paper.data.images import DataError, Facts, Raw

__all__ = ["FACTS", "DataError", "Facts", "Raw", "folder", "load"]

FACTS: dict[str, Facts] = {"cifar10": cifar10.FACTS, "fashion_mnist": fashion_mnist.FACTS}
_LOADERS: dict[str, Callable[[Path], Raw]] = {"cifar10": cifar10.load, "fashion_mnist": fashion_mnist.load}


def folder(given: Path | None = None) -> Path:
    """Where data sets are: the folder given, otherwise SENSLI_DATA, otherwise `data` beside the results."""
    return given or Path(os.environ.get("SENSLI_DATA") or "data")


def load(name: str, given: Path | None = None) -> Raw:
    """The data set, downloaded if it is missing."""
    return _LOADERS[name](folder(given))
