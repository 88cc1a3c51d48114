"""Numbers around a list of blocks that may count them: in the modules that contain it and in the objects that these hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sensli.moves.lists import Fact
from sensli.moves.twin.numbering import is_number


def held_objects(model: nn.Module, path: str, module: nn.Module) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Configuration-like objects that a module holds, and those that they hold."""
    for name, value in vars(module).items():
        if is_object(value):
            yield path, (name,), value
            for inner, part in vars(value).items():
                if is_object(part):
                    yield path, (name, inner), part


def is_object(value: Any) -> bool:
    skipped = (nn.Module, Tensor, type, dict, list, tuple, set, torch.device, torch.dtype, torch.Generator)
    return hasattr(value, "__dict__") and not isinstance(value, skipped) and not callable(value)


def ancestors(model: nn.Module, container: str) -> Iterator[tuple[str, nn.Module]]:
    parts = container.split(".")
    for length in range(len(parts)):
        path = ".".join(parts[:length])
        yield path, model.get_submodule(path)


def numbers(model: nn.Module, container: str, count: int) -> list[Fact]:
    """Numbers around a list that equal its length: of the modules that contain it, and of objects that they hold."""
    found: list[Fact] = []
    seen: set[int] = set()
    for path, module in ancestors(model, container):
        for where, through, holder in [(path, (), module), *held_objects(model, path, module)]:
            if id(holder) not in seen:
                seen.add(id(holder))
                found += counts(Fact(where, through, "", "count"), holder, count)
    return found


def counts(like: Fact, holder: Any, count: int) -> Iterator[Fact]:
    for name, value in vars(holder).items():
        if is_number(value) and value == count:
            yield replace(like, name=name, kind="count")
        elif isinstance(value, (list, tuple)):
            for item, entry in enumerate(value):
                if is_number(entry) and entry == count:
                    yield replace(like, name=name, kind="item", item=item)
