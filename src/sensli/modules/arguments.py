"""The arguments of a block's call: which of them is the value that flows through the stack, and how to call the block again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Slot = int | str  # a position among the arguments or a keyword

_PLAIN = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice)


def value_slot(args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Tensor) -> Slot | None:
    """Where the value is that a block maps into its own space: the first tensor shaped and typed like what it returns."""
    slots: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
    for slot, value in slots:
        if isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype:
            return slot
    return None


def value_at(args: tuple[Any, ...], kwargs: Mapping[str, Any], slot: Slot) -> Any:
    """The argument in a slot, or None if the call has no such argument."""
    if isinstance(slot, str):
        return kwargs.get(slot)
    return args[slot] if slot < len(args) else None


def with_value(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], slot: Slot, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another value in the slot."""
    if isinstance(slot, str):
        return args, {**kwargs, slot: value}
    return (*args[:slot], value, *args[slot + 1 :]), dict(kwargs)


def first_tensor(output: Any) -> Tensor | None:
    """What a block hands on: its output, or the first part of a tuple."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def with_first(output: Any, value: Any) -> Any:
    """The same output with another first tensor."""
    if isinstance(output, Tensor):
        return value
    if hasattr(output, "_fields"):
        return type(output)(value, *output[1:])
    return type(output)((value, *output[1:]))


def is_plain(value: Any) -> bool:
    """Whether an argument is data without a memory: a second call with it is like the first."""
    if isinstance(value, (tuple, list)):
        return all(is_plain(part) for part in value)
    if isinstance(value, dict):
        return all(is_plain(part) for part in value.values())
    return isinstance(value, _PLAIN)


def without_memory(value: Any) -> Any:
    """The arguments without objects that a call may have changed, such as a cache; and nothing in them carries a graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(without_memory(part) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(without_memory(part) for part in value)
    if isinstance(value, dict):
        return {key: without_memory(part) for key, part in value.items()}
    return value if isinstance(value, _PLAIN) else None
