"""How what a model returns, or a gradient, differs with new layers from what it was without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from sensli.modules.nearness import moved, rounding


def difference(before: Any, after: Any, in_list: bool) -> str:
    """How two outputs differ; empty if they do not."""
    old, new = list(_parts(before, in_list)), list(_parts(after, in_list))
    if len(old) != len(new):
        return f"the model returns {len(new)} values instead of {len(old)}"
    for one, other in zip(old, new, strict=True):
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return "the model returns values of other types"
        if not isinstance(one, Tensor):
            if one != other and one == one:
                return f"the model returns {other!r} instead of {one!r}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"the model's output changes from shape {tuple(one.shape)} to {tuple(other.shape)}"
        else:
            distance = moved(one.detach(), other.detach())
            if distance:
                return f"the model's output changes by {distance:.1e}"
    return ""


def _parts(value: Any, in_list: bool) -> Iterator[Any]:
    """All tensors and plain values. Where a list of blocks has grown, not the lists with one entry per block in a record."""
    if isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type)):
        named = value.values() if isinstance(value, Mapping) else [getattr(value, f.name, None) for f in fields(value)]
        for part in named:
            if not (in_list and isinstance(part, (tuple, list))):
                yield from _parts(part, in_list)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _parts(part, in_list)
    elif isinstance(value, (Tensor, int, float, complex, str)):
        yield value


def alike(one: Tensor | None, other: Tensor | None, on: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    difference = one - other if on is None else (one - other) * on
    distance = torch.linalg.vector_norm(difference.float() if difference.dtype.itemsize < 4 else difference).item()
    size = torch.linalg.vector_norm(one.float() if one.dtype.itemsize < 4 else one).item()
    return (
        bool(distance <= 100 * rounding(one.dtype) * size) if one.dtype.itemsize > 2 else bool(distance <= 0.1 * size)
    )
