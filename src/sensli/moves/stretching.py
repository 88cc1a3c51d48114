"""A tensor with more, fewer or other entries along an axis: where the old ones lie, and how what belongs to the tensor follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


class _Along:
    """Units along one axis: from ``start`` on it holds ``outer`` groups of units, each of ``inner`` entries."""

    dim: int
    start: int
    outer: int
    inner: int

    def _split(self, tensor: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before the units, [..., outer, units, inner, ...], and what comes after them."""
        length = self.outer * units * self.inner
        rest = tensor.shape[self.dim] - self.start - length
        before, middle, after = tensor.split([self.start, length, rest], dim=self.dim)
        return before, middle.unflatten(self.dim, (self.outer, units, self.inner)), after

    def _joined(self, before: Tensor, middle: Tensor, after: Tensor) -> Tensor:
        return torch.cat([before, self._flat(middle), after], dim=self.dim)

    def _flat(self, middle: Tensor) -> Tensor:
        return middle.flatten(self.dim, self.dim + 2)

    def _entries(self, middle: Tensor, units: int, new: Tensor | complex) -> Tensor:
        """Entries of so many units, from a number or from what lies flat along the axis."""
        if isinstance(new, Tensor):
            entries: Tensor = new.to(middle).unflatten(self.dim, (self.outer, units, self.inner))
            return entries
        shape = list(middle.shape)
        shape[self.dim + 1] = units
        return middle.new_full(shape, new)


@dataclass(frozen=True)
class Stretch(_Along):
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
    def change(self) -> int:
        """By how much the axis gets longer."""
        return self.outer * self.more * self.inner

    @property
    def fresh(self) -> int:
        """How many entries are new."""
        return self.change

    def applied(self, tensor: Tensor, new: Tensor | complex = 0.0) -> Tensor:
        """The tensor with new entries: a number, or a tensor of the shape of `entries`."""
        before, middle, after = self._split(tensor, self.units)
        middle = torch.cat([middle, self._entries(middle, self.more, new)], dim=self.dim + 1)
        return self._joined(before, middle, after)

    def reverted(self, tensor: Tensor, back: Tensor | complex = 0.0) -> Tensor:
        """The inverse of `applied`: the old entries alone. Nothing was lost, so nothing comes ``back``."""
        before, middle, after = self._split(tensor, self.units + self.more)
        return self._joined(before, middle.narrow(self.dim + 1, 0, self.units), after)

    def entries(self, tensor: Tensor) -> Tensor:
        """Of a stretched tensor the new entries alone, with ``outer * more * inner`` of them along the axis."""
        _, middle, _ = self._split(tensor, self.units + self.more)
        return self._flat(middle.narrow(self.dim + 1, self.units, self.more))

    def taken(self, tensor: Tensor) -> Tensor:
        """The old entries that go: none."""
        return tensor.narrow(self.dim, 0, 0)

    def left(self, tensor: Tensor) -> Tensor:
        """The old entries that stay: all."""
        return tensor


@dataclass(frozen=True)
class Exchange(_Along):
    """Some of the units along one axis of a tensor go, wherever they lie. New ones come in their place, unless they are ``removed``."""

    dim: int
    units: int
    which: tuple[int, ...]  # in ascending order
    removed: bool
    start: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def change(self) -> int:
        """By how much the axis gets longer."""
        return -self.outer * len(self.which) * self.inner if self.removed else 0

    @property
    def fresh(self) -> int:
        """How many entries come: new ones, or the old ones on the way back."""
        return self.outer * len(self.which) * self.inner

    @property
    def others(self) -> tuple[int, ...]:
        """The units that stay."""
        return tuple(sorted(set(range(self.units)) - set(self.which)))

    def applied(self, tensor: Tensor, new: Tensor | complex = 0.0) -> Tensor:
        """The tensor without the entries of these units, or with new ones: a number, or a tensor of the shape of `taken`."""
        return self.left(tensor) if self.removed else self._with(tensor, new)

    def reverted(self, tensor: Tensor, back: Tensor | complex = 0.0) -> Tensor:
        """The inverse of `applied`; ``back`` is what was `taken`, or a number."""
        if not self.removed:
            return self._with(tensor, back)
        before, middle, after = self._split(tensor, self.units - len(self.which))
        # All of them in the wrong order, then in the right one.
        middle = torch.cat([middle, self._entries(middle, len(self.which), back)], dim=self.dim + 1)
        order = torch.tensor([*self.others, *self.which], device=tensor.device).argsort()
        return self._joined(before, middle.index_select(self.dim + 1, order), after)

    def taken(self, tensor: Tensor) -> Tensor:
        """The entries of these units, one after the other in each group."""
        return self._flat(self._picked(self._split(tensor, self.units)[1], self.which))

    def left(self, tensor: Tensor) -> Tensor:
        """The tensor without the entries of these units."""
        before, middle, after = self._split(tensor, self.units)
        return self._joined(before, self._picked(middle, self.others), after)

    def _with(self, tensor: Tensor, new: Tensor | complex) -> Tensor:
        before, middle, after = self._split(tensor, self.units)
        entries = self._entries(middle, len(self.which), new)
        places = torch.tensor(self.which, device=tensor.device)
        return self._joined(before, middle.index_copy(self.dim + 1, places, entries), after)

    def _picked(self, middle: Tensor, units: Sequence[int]) -> Tensor:
        return middle.index_select(self.dim + 1, torch.tensor(units, dtype=torch.long, device=middle.device))


@dataclass(frozen=True, eq=False)
class Resize:
    """A parameter or buffer whose entries change, and how. The object stays: whoever holds it sees the new values."""

    name: str
    tensor: Tensor
    stretches: tuple[Stretch | Exchange, ...]
    old_shape: tuple[int, ...]
    # What went, for the way back: of the tensor, of its gradient, of what an optimizer keeps of it.
    lost: dict[object, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def is_shared(self) -> bool:
        """Whether the change divides old entries between units and their copies."""
        return any(isinstance(stretch, Copied) and stretch.shared for stretch in self.stretches)

    @property
    def new_shape(self) -> tuple[int, ...]:
        shape = list(self.old_shape)
        for stretch in self.stretches:
            shape[stretch.dim] += stretch.change
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

    def taken(self, tensor: Tensor, along: Collection[int] | None = None) -> tuple[Tensor, ...]:
        """The entries that `stretched` loses, for `shrunk`. Empty where it loses none."""
        if not any(isinstance(stretch, Exchange) for stretch in self.stretches):
            return ()
        along, found = _shared(tensor, self.old_shape) if along is None else along, []
        for stretch in self.stretches:
            if stretch.dim in along:
                found.append(stretch.taken(tensor))
                tensor = stretch.applied(tensor)
        return tuple(found)

    def shrunk(
        self, tensor: Tensor, along: Collection[int] | None = None, back: complex | Fill | Sequence[Tensor] = 0.0
    ) -> Tensor:
        """The inverse of `stretched`. ``back``: what it lost, as `taken` gave it; or what comes instead, as ``fill`` there."""
        along = _shared(tensor, self.new_shape) if along is None else along
        steps = [stretch for stretch in self.stretches if stretch.dim in along]
        for number, stretch in reversed(list(enumerate(steps))):
            lost = back[number] if isinstance(back, Sequence) else back
            tensor = stretch.reverted(tensor, lost(stretch, tensor) if callable(lost) else lost)
        return tensor


Fill = Callable[[Stretch | Exchange, Tensor], Tensor]


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


OWN = "value"  # what a tensor calls its own entries in `Resize.lost`


# ---- New units that are copies of old ones: what makes a unit is copied, what reads it is shared between the unit and its
# copies.
#
# Some of the new units may be no copies: their source is `FRESH`.

FRESH = -1  # the source of a unit that is not a copy


@dataclass(frozen=True)
class Copied(Stretch):
    """More units along one axis, each a copy of the one in ``sources``. Of moments it is an ordinary stretch."""

    sources: tuple[int, ...] = ()
    shared: bool = False  # a unit and its copies have together what the unit had alone

    def copied(self, tensor: Tensor, new: Tensor | complex = 0.0) -> Tensor:
        """The tensor with its copies. ``new``: what units that are not copies begin with; a tensor of entries is also added to copies."""
        before, middle, after = self._split(tensor, self.units)
        sources = torch.tensor(self.sources, device=middle.device)
        if self.shared:  # by how many there are of each unit, with its copies
            counts = 1 + torch.bincount(sources[sources != FRESH], minlength=self.units)
            middle = middle / self._beside(counts.to(middle.dtype), middle)
        picked = middle.index_select(self.dim + 1, sources.clamp_min(0))
        if min(self.sources) == FRESH:
            number = 0.0 if isinstance(new, Tensor) else new
            picked = torch.where(self._beside(sources == FRESH, middle), torch.full_like(picked, number), picked)
        if isinstance(new, Tensor):
            picked = picked + self._entries(middle, self.more, new)
        return self._joined(before, torch.cat([middle, picked], dim=self.dim + 1), after)

    def given_back(self, tensor: Tensor) -> Tensor:
        """The tensor without its copies; what they shared goes back to the units that they were copied from."""
        before, middle, after = self._split(tensor, self.units + self.more)
        old, new = middle.split([self.units, self.more], dim=self.dim + 1)
        if self.shared:
            sources = torch.tensor(self.sources, device=old.device)
            copies = (sources != FRESH).nonzero().flatten()
            old = old.index_add(self.dim + 1, sources[copies], new.index_select(self.dim + 1, copies))
        return self._joined(before, old, after)

    def owned(self, tensor: Tensor) -> Tensor:
        """Of what is there before whether it is the tensor's own, with that of the new units: copies are, others are not."""
        _, middle, _ = self._split(tensor, self.units)
        copies = torch.tensor([source != FRESH for source in self.sources], device=tensor.device)
        shape = list(middle.shape)
        shape[self.dim + 1] = self.more
        return self.applied(tensor, self._flat(self._beside(copies, middle).expand(shape)))

    def _beside(self, values: Tensor, middle: Tensor) -> Tensor:
        """A value for each unit, with as many dimensions as what is split."""
        return values.reshape(-1, *[1] * (middle.dim() - self.dim - 2))


def is_copied(resize: Resize) -> bool:
    """Whether the new entries of a tensor are copies of its old ones."""
    return any(isinstance(stretch, Copied) for stretch in resize.stretches)


def with_copies(resize: Resize, tensor: Tensor) -> Tensor:
    """A tensor of values, such as the parameter itself, with its copies."""
    for stretch in resize.stretches:
        assert isinstance(stretch, Copied)
        tensor = stretch.copied(tensor)
    return tensor


def is_own(resize: Resize) -> Tensor:
    """Of each entry of the tensor after the change whether it was there before or is a copy of such a one."""
    own = torch.ones(resize.old_shape, dtype=torch.bool, device=resize.tensor.device)
    for stretch in resize.stretches:
        own = stretch.owned(own) if isinstance(stretch, Copied) else stretch.applied(own, False)
    return own


def given_back(resize: Resize, tensor: Tensor) -> Tensor:
    """The inverse of `with_copies`, up to rounding; what has changed since is added up."""
    for stretch in reversed(resize.stretches):
        assert isinstance(stretch, Copied)
        tensor = stretch.given_back(tensor)
    return tensor
