"""Calling a user's model: arguments, devices, and putting back what a run would change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sensli.modules import random_state

HALF = (torch.float16, torch.bfloat16)


def run(model: nn.Module, example: Any) -> Any:
    """Call the model: a tensor is its only argument, a tuple its arguments, a dict its keyword arguments.

    Keys that ``forward`` does not take, such as labels, are left out: a batch of the training data can be the example.
    """
    if isinstance(example, dict):
        return model(**(taken_by(model, example) or example))  # with none of them, torch says what is missing
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(example)


def taken_by(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that ``forward`` takes; all of them where it takes any."""
    try:
        known = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # written in C, or says nothing of its arguments
        return given
    if any(each.kind is each.VAR_KEYWORD for each in known):
        return given
    names = {each.name for each in known if each.kind is not each.VAR_POSITIONAL}
    return {name: value for name, value in given.items() if name in names}


def describe(example: Any) -> str:
    """The shapes of an example, for error texts."""
    if isinstance(example, Tensor):
        return f"{str(example.dtype).removeprefix('torch.')} tensor of shape {tuple(example.shape)}"
    if isinstance(example, (tuple, list)):
        return "(" + ", ".join(describe(part) for part in example) + ")"
    if isinstance(example, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in example.items()) + "}"
    return type(example).__name__


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors(getattr(value, entry.name, None))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of tuples, lists and dicts with every tensor changed; other values as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(part, change) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    return value


def to_device(value: Any, device: torch.device | None) -> Any:
    """The same nest of tensors on a device. Those that were made in inference mode become ordinary ones, which autograd takes."""
    value = mapped(value, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
    if device is None:
        return value
    # What comes to the host is waited for: until a copy has arrived, anybody would read what was there before.
    return mapped(value, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def is_capable(device: torch.device) -> bool:
    """Whether it surely has double precision, complex numbers and eigenvalues; MPS has none of them."""
    return device.type in ("cpu", "cuda")


def capable(tensor: Tensor) -> Tensor:
    """The tensor where all of these can be computed: there, or on the CPU."""
    return tensor if is_capable(tensor.device) else tensor.cpu()


def widened(value: Any) -> Any:
    """The same nest with half precision turned into single."""
    return mapped(value, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)


def device_of(model: nn.Module) -> torch.device | None:
    """The device of the model's first parameter or buffer."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return None if first is None else first.device


def undrawn(module: nn.Module) -> list[Any]:
    """Hooks after which the random numbers that a module draws are given back: nobody after it gets others than without it."""
    states: list[dict[str, Any]] = []

    def before(*_: Any) -> None:
        states.append(random_state.of_torch())

    def after(*_: Any) -> None:
        random_state.restore_torch(states.pop())

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and random state are put back when the context ends."""
    kept = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    with random_state.kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, values in kept:
                    module._buffers[name] = buffer  # a forward may bind the name to another tensor
                    # Written only where it moved: a graph that the user holds may have saved the buffer.
                    if buffer is not None and values is not None and not _same(buffer, values):
                        buffer.copy_(values)


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Gradients are put back when the context ends: the user's code may call ``backward()``. Inside there are none: nothing is copied."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal values, where nan equals nan."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
