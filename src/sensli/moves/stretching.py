"""A tensor with more entries along an axis: where the old ones lie, and how what belongs to the tensor follows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Stretch:
    """More units along one axis of a tensor.

    From ``start`` on the axis holds ``outer`` groups of ``units`` units, each of ``inner`` entries: a channel that was flattened owns
    ``inner`` columns, and a fused pair of gates has two groups. The ``more`` new units come at the end of every group.
    """

    dim: int
    units: int
    more: int
    start: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def old_length(self) -> int:
        """How many entries the units take."""
        return self.outer * self.units * self.inner

    def applied(self, tensor: Tensor, new: Tensor | complex = 0.0) -> Tensor:
        """The tensor with new entries: a number, or a tensor of the shape of `entries`."""
        before, middle, after = self._split(tensor, self.units)
        if isinstance(new, Tensor):
            entries = new.to(tensor).unflatten(self.dim, (self.outer, self.more, self.inner))
        else:
            shape = list(middle.shape)
            shape[self.dim + 1] = self.more
            entries = tensor.new_full(shape, new)
        middle = torch.cat([middle, entries], dim=self.dim + 1).flatten(self.dim, self.dim + 2)
        return torch.cat([before, middle, after], dim=self.dim)

    def reverted(self, tensor: Tensor) -> Tensor:
        """The inverse of `applied`: the old entries alone."""
        before, middle, after = self._split(tensor, self.units + self.more)
        kept = middle.narrow(self.dim + 1, 0, self.units).flatten(self.dim, self.dim + 2)
        return torch.cat([before, kept, after], dim=self.dim)

    def entries(self, tensor: Tensor) -> Tensor:
        """Of a stretched tensor the new entries alone, with ``outer * more * inner`` of them along the axis."""
        _, middle, _ = self._split(tensor, self.units + self.more)
        return middle.narrow(self.dim + 1, self.units, self.more).flatten(self.dim, self.dim + 2)

    def _split(self, tensor: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor]:
        length = self.outer * units * self.inner
        rest = tensor.shape[self.dim] - self.start - length
        before, middle, after = tensor.split([self.start, length, rest], dim=self.dim)
        return before, middle.unflatten(self.dim, (self.outer, units, self.inner)), after


@dataclass(frozen=True, eq=False)
class Resize:
    """A parameter or buffer that changes its shape, and by what. The object stays: whoever holds it sees the new values."""

    name: str
    tensor: Tensor
    stretches: tuple[Stretch, ...]
    old_shape: tuple[int, ...]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def new_shape(self) -> tuple[int, ...]:
        shape = list(self.old_shape)
        for stretch in self.stretches:
            shape[stretch.dim] += stretch.outer * stretch.more * stretch.inner
        return tuple(shape)

    def stretched(self, tensor: Tensor, fill: complex | Fill = 0.0, along: Collection[int] | None = None) -> Tensor:
        """What belongs to the tensor entry by entry (a moment), or to whole rows or columns of it (a factored one), with its new shape.

        ``fill`` is a number, or gives the new entries of one stretch. ``along``: the axes that both have; without it their lengths tell.
        """
        along = _shared(tensor, self.old_shape) if along is None else along
        for stretch in self.stretches:
            if stretch.dim in along:
                tensor = stretch.applied(tensor, fill(stretch, tensor) if callable(fill) else fill)
        return tensor

    def shrunk(self, tensor: Tensor, along: Collection[int] | None = None) -> Tensor:
        """The inverse of `stretched`."""
        along = _shared(tensor, self.new_shape) if along is None else along
        for stretch in reversed(self.stretches):
            if stretch.dim in along:
                tensor = stretch.reverted(tensor)
        return tensor

    def is_old(self) -> Tensor:
        """Of each entry of the stretched tensor whether it was there before."""
        return self.stretched(torch.ones(self.old_shape, dtype=torch.bool, device=self.tensor.device), False)


Fill = Callable[[Stretch, Tensor], Tensor]


def _shared(tensor: Tensor, shape: tuple[int, ...]) -> Collection[int]:
    """The axes of this shape that a tensor has; one of length 1 it has only if it has all of them."""
    if tensor.dim() != len(shape):
        return ()  # a count of steps
    whole = tuple(tensor.shape) == shape
    return [dim for dim, length in enumerate(shape) if whole or tensor.shape[dim] == length != 1]


def like_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the memory layout of another: channels last stays channels last."""
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if like.dim() == dims and like.is_contiguous(memory_format=layout) and not like.is_contiguous():
            return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()
