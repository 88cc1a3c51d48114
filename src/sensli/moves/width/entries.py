"""What new units begin with, and by how much old ones move with them: a value for each axis of their width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sensli.modules.engines.fsdp import whole

if TYPE_CHECKING:
    from sensli.moves.width.width import Axis, Width


@dataclass(frozen=True, eq=False)
class Entries:
    """New entries along the axes of a width, in their order; None where they are what the axis is filled with.

    Of units that are copies they are added to what is copied.
    """

    values: tuple[Tensor | None, ...]
    shifts: tuple[Tensor | None, ...] = ()  # likewise what is added to the entries that are there; empty: nothing

    def count(self, width: Width) -> int:
        """Of how many units they are."""
        axis, value = next((a, v) for a, v in zip(width.axes, self.values, strict=True) if v is not None)
        return value.shape[axis.dim] // (axis.outer * axis.inner)

    def taken(self, width: Width, chosen: Sequence[int]) -> Entries:
        """Those of the chosen units alone."""
        pairs = zip(width.axes, self.values, strict=True)
        return Entries(tuple(None if v is None else units_of(v, axis, chosen) for axis, v in pairs))


def units_of(entries: Tensor, axis: Axis, chosen: Sequence[int]) -> Tensor:
    """Of entries along an axis, which hold nothing but units, those of the chosen ones."""
    middle = entries.unflatten(axis.dim, (axis.outer, -1, axis.inner))
    picked = middle.index_select(axis.dim + 1, torch.tensor(chosen, dtype=torch.long, device=entries.device))
    flat: Tensor = picked.flatten(axis.dim, axis.dim + 2)
    return flat


def existing(width: Width, axis: Axis) -> Tensor:
    """The entries of the units that are there."""
    tensor = whole(getattr(axis.module.find_module(), axis.name))
    return tensor.narrow(axis.dim, axis.start, axis.outer * width.units * axis.inner)


def by_unit(entries: Tensor, axis: Axis) -> Tensor:
    """Entries that lie along the first dimension as [units, all that belongs to one]."""
    units: Tensor = entries.unflatten(0, (axis.outer, -1, axis.inner)).transpose(0, 1)
    return units.flatten(1)


def laid_out(columns: Tensor, axis: Axis, like: Tensor) -> Tensor:
    """[units, columns of one] as they lie along the axis of a reader."""
    others = [size for dim, size in enumerate(like.shape) if dim != axis.dim]
    parts = columns.unflatten(1, (axis.outer, axis.inner, *others)).transpose(0, 1)
    flat: Tensor = parts.flatten(0, 2).movedim(0, axis.dim)
    return flat


def filled(axis: Axis, tensor: Tensor, value: Tensor | None) -> Tensor | float:
    """New entries of a tensor along one of its axes."""
    if value is not None:
        return value
    if axis.fill == "mean":
        return float(tensor.float().mean())
    return 1.0 if axis.fill == "one" else 0.0
