"""Which growths of a model a module bears: set by surgery, so that a grown model knows by itself what has grown, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from sensli.modules.wrappers import own_modules

NEW = "sensli_growth"  # on a module that was not there before: the number of its growth
CHANGED = "sensli_changes"  # on a module that was: the numbers of the growths that changed it
RECORDS = "sensli_records"  # on either: the records of these growths, by number
ALL = (NEW, CHANGED, RECORDS)


def mark(module: nn.Module, number: int, *, new: bool) -> None:
    """The growth of this number made the module, or changed it."""
    if new:
        setattr(module, NEW, number)
    else:
        setattr(module, CHANGED, (*module.__dict__.get(CHANGED, ()), number))


def unmark(module: nn.Module, number: int) -> None:
    """The inverse of `mark` and `tell`."""
    _set(module, RECORDS, {key: value for key, value in module.__dict__.get(RECORDS, {}).items() if key != number})
    if module.__dict__.get(NEW) == number:
        delattr(module, NEW)
        return
    _set(module, CHANGED, tuple(each for each in module.__dict__.get(CHANGED, ()) if each != number))


def tell(module: nn.Module, number: int, record: Any) -> None:
    """The record of a growth that the module is marked with: what takes it back."""
    setattr(module, RECORDS, {**module.__dict__.get(RECORDS, {}), number: record})


def told(module: nn.Module, number: int) -> Any:
    """What `tell` was given for this growth, or None."""
    return module.__dict__.get(RECORDS, {}).get(number)


def _set(module: nn.Module, name: str, value: Any) -> None:
    if value:
        setattr(module, name, value)
    elif name in module.__dict__:
        delattr(module, name)


def new_in(module: nn.Module) -> int | None:
    """The number of the growth that made this module, or None."""
    number: int | None = module.__dict__.get(NEW)
    return number


def grown(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """All growths of a model: the number, and the path and the module that bear it. Averages in the model have the same once more."""
    for path, module in own_modules(model):
        number = new_in(module)
        if number is not None:
            yield number, path, module
        for changed in module.__dict__.get(CHANGED, ()):
            yield changed, path, module


def count_growths(model: nn.Module) -> int:
    """How often the model has grown: one growth may have made several modules."""
    return len({number for number, _, _ in grown(model)})
