"""Whether two models have the same architecture, and if not, where they first differ."""

from __future__ import annotations

from itertools import zip_longest
from typing import TypeAlias

from torch import nn

Named: TypeAlias = tuple[str, nn.Module]


def first_difference(one: nn.Module, other: nn.Module) -> str:
    """The first difference, in words; empty if there is none. Values, types of numbers, devices and modes may differ."""
    pairs = zip_longest(one.named_modules(remove_duplicate=False), other.named_modules(remove_duplicate=False))
    for own, its in pairs:
        if own is None or its is None or own[0] != its[0]:
            return _named_otherwise(one, other, own, its)
        (path, module), (_, again) = own, its
        place = f"'{path}'" if path else "the model"
        if _kind(module) != _kind(again):
            return f"{place} is {_shown(module)} there and {_shown(again)} in other"
        if _settings(module) != _settings(again):
            return f"{place} is {_shown(module)}({_settings(module)}) there and {_shown(again)}({_settings(again)}) in other"
        shapes, its_shapes = _shapes(module), _shapes(again)
        for name in {**shapes, **its_shapes}:
            if shapes.get(name) != its_shapes.get(name):
                whole = f"{path}.{name}" if path else name
                return f"{whole} is {_shape(shapes, name)} there and {_shape(its_shapes, name)} in other"
    return ""


def _named_otherwise(one: nn.Module, other: nn.Module, own: Named | None, its: Named | None) -> str:
    """Two modules in the same position that have different paths, or only one of them."""
    for named, model, text in ((own, other, "other has no module '{}'"), (its, one, "only other has a module '{}'")):
        if named is not None and named[0] not in dict(model.named_modules(remove_duplicate=False)):
            return text.format(named[0])
    return f"the modules of other come in another order, beginning with '{own[0] if own else ''}'"


def _kind(module: nn.Module) -> tuple[str, str]:
    # By name: a factory that defines its class inside makes another class at every call.
    return type(module).__module__, type(module).__qualname__


def _shown(module: nn.Module) -> str:
    return type(module).__name__


def _settings(module: nn.Module) -> str:
    """What torch prints of the layers that it has; what a user's module prints may be values."""
    return module.extra_repr() if type(module).__module__.startswith("torch.") else ""


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    # Not those buffers that are not saved: a cache is as large as what was computed last.
    saved = ((name, value) for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set)
    named = (*module._parameters.items(), *saved)
    return {name: None if tensor is None else tuple(tensor.shape) for name, tensor in named}


def _shape(shapes: dict[str, tuple[int, ...] | None], name: str) -> str:
    return f"of shape {shapes[name]}" if shapes.get(name) is not None else "missing"
