"""Configurations: the objects that modules hold and were built from. What is one, and what their class builds from a changed one."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sensli.modules import random_state
from sensli.modules.running import let_memory_through

_OTHERS = (nn.Module, Tensor, Enum, type, dict, list, tuple, set)
# How people call a number of blocks.
COUNTS = frozenset(
    f"{prefix}{number}_{what}" for prefix in ("", "_") for number in ("num", "n") for what in ("layers", "layer", "blocks", "block")
) | {"depth", "num_hidden_layers"}  # fmt: skip


def is_configuration(value: Any) -> bool:
    """Whether a value is an object with attributes, and not a module, a tensor, a function, a constant or a collection."""
    return hasattr(value, "__dict__") and not isinstance(value, _OTHERS) and not callable(value)


def held_objects(holder: Any) -> Iterator[tuple[str, Any]]:
    """The configurations that a module, or another configuration, holds: the name and the object."""
    return ((name, value) for name, value in vars(holder).items() if is_configuration(value))


def nested_objects(module: nn.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The configurations that a module holds, and those that these hold: the names that lead there and the object."""
    for name, value in held_objects(module):
        yield (name,), value
        yield from (((name, inner), part) for inner, part in held_objects(value))


def is_number(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def find_counts(holder: Any, count: int) -> Iterator[tuple[str, str, int]]:
    """Attributes that are this number: the name and "count", or of an entry in a list the name, "item" and its place there."""
    for name, value in vars(holder).items():
        if is_number(value) and value == count:
            yield name, "count", 0
        elif isinstance(value, (list, tuple)):
            yield from ((name, "item", i) for i, entry in enumerate(value) if is_number(entry) and entry == count)


# ---- Building a module again from the configuration that it holds, to compare: what saving and loading will do with it.

_DRAWS = frozenset(("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"))
_LARGE = 2**16  # entries of a tensor that is not allocated only to be replaced
_SMALL = 200_000_000  # parameters: what may be built with values where the meta device does not do


def build_again(like: nn.Module, configuration: Any, *, values: bool = False) -> nn.Module | None:
    """A module of the same class from a copy of a configuration.

    It has no values or, with ``values``, those that it computes while it is built, but for its weights, which are to be loaded: large
    ones are on the meta device.
    """
    for device, light in (("cpu", True), ("cpu", False)) if values else (("meta", False), ("cpu", False)):
        if device == "cpu" and not light and sum(p.numel() for p in like.parameters()) > _SMALL:
            return None  # one more copy with values might not fit
        try:
            with warnings.catch_warnings(), random_state.kept(), torch.device(device), _Undrawn(light):
                warnings.simplefilter("ignore")
                built: nn.Module = type(like)(copy.deepcopy(configuration))
        except Exception as error:
            let_memory_through(error)
            continue
        if light and any(buffer.is_meta for buffer in built.buffers()):
            continue
        return built
    return None


class _Undrawn(TorchFunctionMode):
    """Parameters are not filled with random numbers, which is most of the time that building a model takes.

    ``light``: large ones have no memory either, until they are loaded.
    """

    def __init__(self, light: bool) -> None:
        super().__init__()
        self._light = light

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, nn.Parameter):
                return target
        if self._light and func is torch.empty and _entries(args) >= _LARGE:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _entries(size: Any) -> int:
    """Of `torch.empty`, which is given a shape or the lengths of all axes."""
    lengths = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    return math.prod(lengths) if all(isinstance(length, int) for length in lengths) else 0


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all that is saved."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def differences(module: nn.Module, built: nn.Module | None) -> set[tuple[str, str]]:
    """Where two models differ: in what they save, and in the numbers and words inside (block numbers, kinds of attention).

    Told without places in lists: a difference that is there anyway (an adapter in every block) is the same with one block more.
    """
    if built is None:
        return set()
    ours, theirs = shapes(module), shapes(built)
    names = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    there = dict(built.named_modules())
    inside = {
        (type(part).__name__, name)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if (is_number(value) or isinstance(value, str))
        and name != "sensli_growth"
        and name not in COUNTS
        and (vars(there[path]) if path in there else {}).get(name) != value
    }
    return {("", re.sub(r"\d+", "#", name)) for name in names} | inside
