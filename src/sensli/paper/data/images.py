"""What a data set of images is: raw bytes with labels, and the numbers to normalise by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sensli.paper.errors import PaperError


class DataError(PaperError):
    """The images are missing, or not the official ones."""


@dataclass(frozen=True)
class Raw:
    """Images uint8 [N, height, width, colours] and labels int64 [N], as published."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Facts:
    """What is known of a data set without reading it."""

    train: int
    test: int
    classes: int
    colours: int
    size: int  # height and width
    mean: tuple[float, ...]
    std: tuple[float, ...]


def check_sum(content: bytes, sha1: str, path: Path) -> None:
    found = hashlib.sha1(content).hexdigest()
    if found != sha1:
        raise DataError(
            f"{path} is not the published file (SHA-1 {found[:12]}..., expected {sha1[:12]}...): it is damaged or altered. "
            "Delete it and run the same command again to download it."
        )


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). Check the folder given with --data.") from None
