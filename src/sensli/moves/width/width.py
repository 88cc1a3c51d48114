"""A width: all axes that change together when a layer gets more units, and the attributes that count them, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import UnknownSite, unknown_choice
from sensli.modules.running import whole_tensor
from sensli.moves.point import Bind, Point, Ref, attribute
from sensli.moves.sites import Cost, Edit, Gauge, New, Site, plural
from sensli.moves.stretching import FRESH, Copied, Stretch
from sensli.text.records import Plain

# ---- What new units begin with, and by how much old ones move with them: a value for each axis of their width.


@dataclass(frozen=True, eq=False)
class Entries:
    """New entries along the axes of a width, in their order; None where they are what the axis is filled with.

    Of units that are copies they are added to what is copied.
    """

    values: tuple[Tensor | None, ...]
    shifts: tuple[Tensor | None, ...] = ()  # likewise what is added to the entries that are there; empty: nothing
    sizes: Tensor | None = None  # then the values are those of one unit, and each new one is so many times that
    # Then values are whole numbers of a byte, and what stands along the axis is so many times them; None where they are themselves.
    grains: tuple[Tensor | None, ...] = ()

    def count(self, width: Width) -> int:
        """Of how many units they are."""
        return self._held(width) if self.sizes is None else len(self.sizes)

    def _held(self, width: Width) -> int:
        axis, value = next((a, v) for a, v in zip(width.axes, self.values, strict=True) if v is not None)
        return value.shape[axis.dim] // (axis.outer * axis.inner)

    def taken(self, width: Width, chosen: Sequence[int]) -> Entries:
        """Those of the chosen units alone."""
        if self.sizes is not None:
            return replace(self, sizes=self.sizes[list(chosen)])
        found = ((axis, self.along(index, axis)) for index, axis in enumerate(width.axes))
        return Entries(tuple(None if v is None else units_of(v, axis, chosen) for axis, v in found))

    @property
    def is_held(self) -> bool:
        """Whether all values are held as they are, and none is made when it is asked for."""
        return self.sizes is None and not self.grains

    def rounded(self, width: Width) -> Entries:
        """The same to about a hundredth of what they are, in a quarter of the memory: they may be anything, but not change."""
        pairs = [_rounded(value, axis) for axis, value in zip(width.axes, self.values, strict=True)]
        return replace(self, values=tuple(value for value, _ in pairs), grains=tuple(grain for _, grain in pairs))

    def along(self, index: int, axis: Axis) -> Tensor | None:
        """The new entries along the axis of this number. Those that are not held as they are, are made here and held nowhere."""
        value = self.values[index]
        grain = self.grains[index] if self.grains else None
        if value is not None and grain is not None:
            return value.to(grain.dtype).mul_(grain)
        if value is None or self.sizes is None:
            return value
        one = value.unflatten(axis.dim, (axis.outer, 1, axis.inner))
        shape = [-1 if dim == axis.dim + 1 else 1 for dim in range(one.dim())]
        made: Tensor = (one * self.sizes.to(one).view(shape)).flatten(axis.dim, axis.dim + 2)
        return made


def units_of(entries: Tensor, axis: Axis, chosen: Sequence[int]) -> Tensor:
    """Of entries along an axis, which hold nothing but units, those of the chosen ones."""
    middle = entries.unflatten(axis.dim, (axis.outer, -1, axis.inner))
    picked = middle.index_select(axis.dim + 1, torch.tensor(chosen, dtype=torch.long, device=entries.device))
    flat: Tensor = picked.flatten(axis.dim, axis.dim + 2)
    return flat


def _rounded(value: Tensor | None, axis: Axis) -> tuple[Tensor | None, Tensor | None]:
    """Entries as whole numbers of a byte, and for each place along the axis what one of them stands for."""
    if value is None or value.dim() < 2:
        return value, None
    others = [dim for dim in range(value.dim()) if dim != axis.dim]
    largest = value.abs().amax(others, keepdim=True)
    grain = torch.where(largest > 0, largest / torch.iinfo(torch.int8).max, 1.0)
    return (value / grain).round_().to(torch.int8), grain


def existing_entries(width: Width, axis: Axis) -> Tensor:
    """The entries of the units that are there."""
    return whole_tensor(axis.tensor).narrow(axis.dim, axis.start, axis.outer * width.units * axis.inner)


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


def fill_entries(axis: Axis, tensor: Tensor, value: Tensor | None) -> Tensor | float:
    """New entries of a tensor along one of its axes."""
    if value is not None:
        return value
    if axis.fill == "mean":
        return float(tensor.float().mean())
    return 1.0 if axis.fill == "one" else 0.0


FILLS = ("row", "column", "one", "zero", "mean")
TOLERANCE = 1e-4  # relative: a longer sum is added up in another order


@dataclass(frozen=True)
class Axis(Plain):
    """One axis of one parameter or buffer that holds the units: what the new entries are filled with."""

    _needed = None

    module: Ref
    name: str
    dim: int
    # "row": what makes a unit; "column": zeros, in a reader; "one", "zero", "mean" (of the others): on the way
    fill: str
    start: int = 0
    outer: int = 1
    inner: int = 1
    length: int = 0  # of the axis when it was found: where it has another, positions may have moved
    overwritten: bool = False  # of a reader: somebody works in place on what it gives

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer itself, of an axis that is bound to its module."""
        tensor: Tensor = getattr(self.module.find_module(), self.name)
        return tensor

    def shape_of(self, units: int) -> list[int]:
        """The shape of the entries of so many units."""
        shape = list(self.tensor.shape)
        shape[self.dim] = self.outer * units * self.inner
        return shape

    def _verify(self) -> None:
        if self.fill not in FILLS:
            raise ValueError(unknown_choice("fill", self.fill, FILLS))


@dataclass(frozen=True)
class Size(Plain):
    """An attribute that counts units, of a module or of an object that it holds: ``out_features``, ``num_heads``, ``intermediate_size``."""

    _needed = None

    module: Ref
    name: str
    per_unit: int = 1
    # attributes from the module to the object that has it; empty if the module itself does
    through: tuple[str, ...] = ()
    unsaid: bool = False  # None stands for the number of units that there were

    def holder(self, module: nn.Module) -> Any:
        """The object that has the attribute."""
        return attribute(module, self.through)


@dataclass(frozen=True)
class Factor(Plain):
    """A parameter or buffer whose old entries are multiplied when units come: a method keeps variances so."""

    module: Ref
    name: str
    by: float


@dataclass(frozen=True)
class Width(Plain):
    """More units for a width."""

    tag: ClassVar[str] = "width"
    kind: ClassVar[str] = "units"
    tolerance: ClassVar[float | None] = TOLERANCE
    _needed = ("axes", "sizes", "readers", "start")

    units: int  # how many there are
    more: int  # how many would come
    layer: str  # class of the first module that makes them, for people
    axes: tuple[Axis, ...]
    sizes: tuple[Size, ...] = ()
    readers: tuple[str, ...] = ()  # for people
    added: int = 0  # parameters
    flops: int = 0  # of one forward pass, per sample
    start: str = "sensitive"
    layers: int | None = None  # that had been inserted into the model when it was found
    heads: int = 0  # of an attention that make one unit; 0: units are single
    # how many equal blocks get them at once, being all that a configuration describes; 0: only this one
    blocks: int = 0
    sources: tuple[int, ...] = ()  # of each new unit the one that it is a copy of, or -1; empty where none is a copy
    factors: tuple[Factor, ...] = ()  # of old entries
    _entries: Entries | None = field(default=None, repr=False, compare=False)  # what new units begin with, as measured

    def line(self, point: Point) -> str:
        per_block = len(self.readers) // max(1, self.blocks)
        others = f" and {per_block - 1} more" if per_block > 1 else ""
        alike = f" and in {plural(self.blocks - 1, 'block')} like it" if self.blocks > 1 else ""
        what = " groups" if self.heads > 1 else " heads" if self.heads else ""
        change = f"{self.layer} {self.units} -> {self.units + self.more}{what}"
        return f"{self} in {point.path}{alike} ({change}), read by {self.readers[0]}{others}"

    def __str__(self) -> str:
        if self.heads > 1:
            return f"+{plural(self.more, 'group')} of {self.heads} heads"
        return f"+{plural(self.more, 'head' if self.heads else 'unit')}"

    def cost(self, point: Point) -> Cost:
        return Cost(self.added, self.flops)

    def filled_with(self, fill: str) -> list[Axis]:
        """The axes with one of `FILLS`: "row" are those of what makes units, "column" those of what reads them."""
        return [axis for axis in self.axes if axis.fill == fill]

    def stretch(self, axis: Axis) -> Stretch:
        """How one of the axes gets longer."""
        place = axis.dim, self.units, self.more, axis.start, axis.outer, axis.inner
        return Copied(*place, self.sources, axis.fill == "column") if self.sources else Stretch(*place)

    def gauge(self, site: Site, model: nn.Module) -> Gauge:
        from sensli.moves.width.gauge import ReaderGauge
        from sensli.moves.width.starts import STARTS

        gauge = STARTS[self.start].gauge(self.in_model(model), model)
        if isinstance(gauge, ReaderGauge):
            gauge.watch(model)
        return gauge

    def plan(self, model: nn.Module, site: Site) -> Edit:
        from sensli.moves.width.widening import Widening

        return Widening(model, site)

    def made(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> Edit:
        from sensli.moves.width.widening import Widening

        return Widening(model, site, made=(path, module))

    def joining(self, model: nn.Module, site: Site) -> Sequence[New]:
        return ()

    def check(self, point: Point) -> None:
        numbers = [self.units, self.more, *(n for axis in self.axes for n in (axis.outer, axis.inner))]
        others = [self.heads, self.blocks, *(n for axis in self.axes for n in (axis.start, axis.dim))]
        if min(numbers) < 1 or min(others) < 0 or not self.readers:
            raise ValueError(f"{numbers} read by {list(self.readers)} do not describe a width")
        if self.sources and (
            len(self.sources) != self.more or not FRESH <= min(self.sources) <= max(self.sources) < self.units
        ):
            raise ValueError(f"{self.sources} are not the sources of {self.more} of {self.units} units")
        if any(not 0 < factor.by < math.inf for factor in self.factors):
            raise ValueError(f"{[factor.by for factor in self.factors]} are not factors of weights")
        names = [*(axis.name for axis in self.axes), *(n for size in self.sizes for n in (size.name, *size.through))]
        names += [factor.name for factor in self.factors]
        if any(name.startswith("__") or not name.isidentifier() for name in names):
            raise ValueError(f"{names} are not names of parameters and sizes")

    def bound(self, bind: Bind) -> Width:
        axes = tuple(replace(axis, module=bind(axis.module)) for axis in self.axes)
        sizes = tuple(replace(size, module=bind(size.module)) for size in self.sizes)
        factors = tuple(replace(factor, module=bind(factor.module)) for factor in self.factors)
        return replace(self, axes=axes, sizes=sizes, factors=factors)

    def in_model(self, model: nn.Module) -> Width:
        """The same bound to the modules of a model, with their paths of today."""
        return self.bound(lambda ref: Ref.to(*find_part(model, ref)))

    def by_path(self) -> Width:
        """The same known by paths alone, as another model of the same architecture has it."""
        return self.bound(lambda ref: Ref(ref.path))

    def _verify(self) -> None:
        from sensli.moves.width.starts import STARTS

        if self.start not in STARTS:
            raise ValueError(unknown_choice("start", self.start, STARTS))


def find_part(model: nn.Module, ref: Ref) -> tuple[str, nn.Module]:
    """A module of a width in the model."""
    place = ref.find(model)
    if place is None:
        raise UnknownSite(
            f"'{ref.path}' is not part of this {type(model).__name__}, but a width that was found has it. Call find_sites again."
        )
    return place


def family(path: str) -> str:
    """The same for the layers of all blocks of a stack."""
    return re.sub(r"\d+", "*", path)
