"""Resuming from the state of an interrupted training: one with the right checksum may still come from other code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sensli.errors import SensliError, brief
from sensli.paper.errors import StoreError


@contextmanager
def restoring() -> Iterator[None]:
    """Say what to do about a state that cannot be used."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, SensliError) as error:
        why = " ".join(str(error).split())
        raise StoreError(
            f"the state of an interrupted training cannot be used ({type(error).__name__}: {why}). Delete the files unfinished-*.pt in "
            "the results folder and run the same command again."
        ) from error


def check_alike(saved: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Raise unless the saved tensors are such as this training has."""
    if saved.keys() != mine.keys():
        raise ValueError(f"its records are {sorted(saved)}, expected {sorted(mine)}")
    for name, value in saved.items():
        if value.shape != mine[name].shape or value.dtype != mine[name].dtype:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, expected {tuple(mine[name].shape)}")


def check_count(value: Any, most: int) -> int:
    """Raise unless it is a whole number from 0."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"a count must be a whole number from 0 to {most}, got {brief(value)}")
    return value
