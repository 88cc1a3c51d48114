"""A width: all axes that change together when a layer gets more units, and the edit that changes them.

New units start with zero columns in everything that reads them, so the function is kept whatever their rows are.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from sensli.errors import MovedSite, UnknownSite, UnsupportedModel, one_of
from sensli.modules.engines.fsdp import is_sharded
from sensli.modules.marks import new_in
from sensli.moves.move import Cost, Edit, Gauge, New
from sensli.moves.point import Point, Ref
from sensli.moves.stretching import Exchange, Resize, Stretch, like_layout

if TYPE_CHECKING:
    from sensli.moves.sites import Site

FILLS = ("row", "column", "one", "zero", "mean")
TOLERANCE = 1e-4  # relative: a longer sum is added up in another order
STARTS = ("sensitive", "random")


@dataclass(frozen=True)
class Axis:
    """One axis of one parameter or buffer that holds the units: what the new entries are filled with."""

    module: Ref
    name: str
    dim: int
    fill: str  # "row": what makes a unit; "column": zeros, in a reader; "one", "zero", "mean" (of the others): beside the way
    start: int = 0
    outer: int = 1
    inner: int = 1
    length: int = 0  # of the axis when it was found: where it has another, positions may have moved

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**{name: getattr(self, name) for name in _AXIS}, "module": self.module.path}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Axis:
        """The inverse of `to_dict`."""
        if data["fill"] not in FILLS:
            raise ValueError(one_of("fill", data["fill"], FILLS))
        return cls(Ref(data["module"]), **{name: data[name] for name in _AXIS})


_AXIS = ("name", "dim", "fill", "start", "outer", "inner", "length")


@dataclass(frozen=True)
class Size:
    """An attribute that counts units, of a module or of an object that it holds: ``out_features``, ``num_heads``, ``intermediate_size``."""

    module: Ref
    name: str
    per_unit: int = 1
    through: tuple[
        str, ...
    ] = ()  # attributes from the module to the object that has it; empty if the module itself does
    unsaid: bool = False  # None stands for the number of units that there were

    def holder(self, module: nn.Module) -> Any:
        """The object that has the attribute."""
        found: Any = module
        for name in self.through:
            found = getattr(found, name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "module": self.module.path,
            "name": self.name,
            "per_unit": self.per_unit,
            "through": list(self.through),
            "unsaid": self.unsaid,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Size:
        """The inverse of `to_dict`."""
        return cls(Ref(data["module"]), data["name"], data["per_unit"], tuple(data["through"]), data["unsaid"])


@dataclass(frozen=True)
class Width:
    """More units for a width."""

    tag: ClassVar[str] = "width"
    kind: ClassVar[str] = "units"
    tolerance: ClassVar[float | None] = TOLERANCE

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
    blocks: int = (
        0  # how many equal blocks get them at once, being all that a configuration describes; 0: only this one
    )
    _rows: tuple[Tensor, ...] | None = field(
        default=None, repr=False, compare=False
    )  # entries of the "row" axes, as measured

    def line(self, point: Point) -> str:
        per_block = len(self.readers) // max(1, self.blocks)
        others = f" and {per_block - 1} more" if per_block > 1 else ""
        alike = f" and in {_plural(self.blocks - 1, 'block')} like it" if self.blocks > 1 else ""
        what = " groups" if self.heads > 1 else " heads" if self.heads else ""
        change = f"{self.layer} {self.units} -> {self.units + self.more}{what}"
        return f"{self} in {point.path}{alike} ({change}), read by {self.readers[0]}{others}"

    def __str__(self) -> str:
        if self.heads > 1:
            return f"+{_plural(self.more, 'group')} of {self.heads} heads"
        return f"+{_plural(self.more, 'head' if self.heads else 'unit')}"

    def describe(self, model: nn.Module) -> str:
        """Every tensor that changes, with its old and new shape."""
        lines = []
        for each in resizes(model, self):
            lines.append(f"{each.name}: {tuple(each.old_shape)} -> {tuple(each.stretched(each.tensor.detach()).shape)}")
        return "\n".join(lines)

    def cost(self, point: Point) -> Cost:
        return Cost(self.added, self.flops)

    def gauge(self, site: Site, model: nn.Module) -> Gauge:
        from sensli.moves.width.gauge import WidthGauge

        return WidthGauge(self, model)

    def plan(self, model: nn.Module, site: Site) -> Edit:
        return Widening(model, site)

    def made(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> Edit:
        return _Widened(model, site, module, path)

    def joining(self, model: nn.Module, site: Site) -> Sequence[New]:
        return ()

    def check(self, point: Point) -> None:
        numbers = [self.units, self.more, *(n for axis in self.axes for n in (axis.outer, axis.inner))]
        others = [self.heads, self.blocks, *(n for axis in self.axes for n in (axis.start, axis.dim))]
        if min(numbers) < 1 or min(others) < 0 or not self.readers:
            raise ValueError(f"{numbers} read by {list(self.readers)} do not describe a width")
        names = [*(axis.name for axis in self.axes), *(n for size in self.sizes for n in (size.name, *size.through))]
        if any(name.startswith("__") or not name.isidentifier() for name in names):
            raise ValueError(f"{names} are not names of parameters and sizes")

    def on(self, model: nn.Module) -> Width:
        """The same bound to the modules of a model, with their paths of today."""
        axes = tuple(replace(axis, module=Ref.to(*found(model, axis.module))) for axis in self.axes)
        sizes = tuple(replace(size, module=Ref.to(*found(model, size.module))) for size in self.sizes)
        return replace(self, axes=axes, sizes=sizes)

    def by_path(self) -> Width:
        """The same known by paths alone, as another model of the same architecture has it."""
        axes = tuple(replace(axis, module=Ref(axis.module.path)) for axis in self.axes)
        sizes = tuple(replace(size, module=Ref(size.module.path)) for size in self.sizes)
        return replace(self, axes=axes, sizes=sizes, _rows=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Rows are values, and values are in a state dict."""
        data = {
            name: getattr(self, name)
            for name in ("units", "more", "layer", "flops", "start", "added", "heads", "blocks", "layers")
        }
        return {
            **data,
            "readers": list(self.readers),
            "axes": [axis.to_dict() for axis in self.axes],
            "sizes": [size.to_dict() for size in self.sizes],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Width:
        """The inverse of `to_dict`."""
        if data["start"] not in STARTS:
            raise ValueError(one_of("start", data["start"], STARTS))
        lists = {
            "readers": tuple(data["readers"]),
            "axes": tuple(Axis.from_dict(axis) for axis in data["axes"]),
            "sizes": tuple(Size.from_dict(size) for size in data["sizes"]),
        }
        return cls(**{**data, **lists})


class Widening(Edit):
    """Parameters and buffers get more entries, and the attributes that count them follow. The objects stay."""

    def __init__(self, model: nn.Module, site: Site, *, strict: bool = True) -> None:
        if is_sharded(model):
            raise UnsupportedModel(
                "a model sharded by fully_shard cannot be widened: its parameters are parts of tensors whose shape is fixed. Widen it "
                "before it is sharded, or grow layers instead."
            )
        move = site.move
        assert isinstance(move, Width)
        if move.blocks and not covers_all_blocks(model, move):
            raise UnknownSite(
                f"'{site}' is for all blocks of this {type(model).__name__}, but their number has changed. Call find_sites again."
            )
        self._move = move = move.on(model)
        self.name, self.module = site.find(model)
        if strict and move.layers not in (None, layers_in(model)):
            raise MovedSite(
                f"a layer was inserted since find_sites found '{site}', and may read its units or make others. Call find_sites again."
            )
        self.resized = resizes(model, move, strict=strict)
        point = replace(site.point, anchor=Ref.to(self.name, self.module))
        self.site = replace(site, point=point, move=replace(_costing(move, self.resized), _rows=None))
        check_sizes(move)
        self.renames = {}
        self.beside = {each.name: tuple(each.old_shape) for each in self.resized}

    def build(self) -> None:
        from sensli.moves.width.starts import new_rows

        rows = self._move._rows
        if rows is None or not _fitting(self._move, rows):  # never measured, or the layer reads more since
            rows = new_rows(self._move)
        self._old = [each.tensor.detach().clone() for each in self.resized]
        self._new = [_filled(each, self._move, rows) for each in self.resized]

    def apply(self) -> None:
        changed: list[Size] = []
        try:
            for size in self._move.sizes:  # first: an object that a module holds may refuse to be changed
                _change(size, self._move, self._move.more)
                changed.append(size)
        except BaseException:
            for size in changed:
                _change(size, self._move, -self._move.more)
            raise
        for each, value in zip(self.resized, self._new, strict=True):
            put(each.tensor, value)

    def revert(self) -> None:
        for each, value in zip(self.resized, self._old, strict=True):
            put(each.tensor, value)
        for size in self._move.sizes:
            _change(size, self._move, -self._move.more)


def _costing(width: Width, resized: Sequence[Resize]) -> Width:
    """The same with what it costs now: a width that was grown since it was found may have changed that."""
    more = [
        (len(each.new_shape) > 1, math.prod(each.new_shape) - math.prod(each.old_shape))
        for each in resized
        if each.is_parameter
    ]
    added, biases = sum(entries for _, entries in more), sum(entries for matrix, entries in more if not matrix)
    if added == width.added:
        return width
    flops = width.flops * (added - biases) / max(width.added - biases, 1)  # biases count no FLOPs
    return replace(width, added=added, flops=round(flops))


class _Widened(Edit):
    """A widening that was made before."""

    def __init__(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> None:
        assert isinstance(site.move, Width)
        self.name, self.module, self.site = path, module, site
        self._move = site.move.on(model)
        self.resized = resizes(model, self._move, made=True)
        check_sizes(self._move)
        self.renames, self.beside = {}, {}

    def revert(self) -> None:
        for each in self.resized:
            put(each.tensor, like_layout(each.shrunk(each.tensor.detach()), each.tensor))
        for size in self._move.sizes:
            _change(size, self._move, -self._move.more)


def resizes(model: nn.Module, width: Width, *, made: bool = False, strict: bool = False) -> list[Resize]:
    """The parameters and buffers that change, each once, with all their axes that do. ``made``: they have changed already."""
    by_tensor: dict[int, tuple[str, Tensor, list[Stretch]]] = {}
    for axis in width.axes:
        path, module = found(model, axis.module)
        tensor = getattr(module, axis.name, None)
        stretch = Stretch(axis.dim, width.units, width.more, axis.start, axis.outer, axis.inner)
        if (
            not isinstance(tensor, Tensor)
            or tensor.dim() <= axis.dim
            or not _fits(stretch, tensor, axis.length if strict else 0, made=made)
        ):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else "missing"
            raise MovedSite(
                f"{path}.{axis.name} is {shape}, which does not hold the {width.units} units that find_sites saw: the model has changed. "
                "Call find_sites again."
            )
        _, _, stretches = by_tensor.setdefault(id(tensor), (f"{path}.{axis.name}", tensor, []))
        if stretch not in stretches:
            stretches.append(stretch)
    found_ones = []
    for name, tensor, stretches in by_tensor.values():
        # From the end of an axis: what comes before keeps its position.
        ordered = tuple(sorted(stretches, key=lambda stretch: (stretch.dim, -stretch.start)))
        old = list(tensor.shape)
        if made:
            for stretch in ordered:
                old[stretch.dim] -= stretch.outer * stretch.more * stretch.inner
        found_ones.append(Resize(name, tensor, ordered, tuple(old)))
    return found_ones


def layers_in(model: nn.Module) -> int:
    """How many layers were inserted into a model."""
    return sum(new_in(module) is not None for module in model.modules())


def check_sizes(width: Width) -> None:
    """Raise if something that should count the units of a width, bound to its modules, is not there or is not a number."""
    for size in width.sizes:
        value: Any = size.module.find_module()
        for name in (*size.through, size.name):
            value = getattr(value, name, "missing")
        if type(value) is not int and not (size.unsaid and value is None):
            where = ".".join(part for part in (size.module.path, *size.through, size.name) if part)
            raise UnknownSite(
                f"{where} is {value!r}, which does not count the units that find_sites saw: the model has changed. Call find_sites again."
            )


def family(path: str) -> str:
    """The same for the layers of all blocks of a stack."""
    return re.sub(r"\d+", "*", path)


def covers_all_blocks(model: nn.Module, width: Width) -> bool:
    """Whether all blocks that the model has now are among those of a width."""
    ours = Counter(family(path) for path in {axis.module.path for axis in width.axes})
    there = Counter(family(path) for path, _ in model.named_modules())
    return all(there[name] == count for name, count in ours.items())


def found(model: nn.Module, ref: Ref) -> tuple[str, nn.Module]:
    """A module of a width in the model."""
    place = ref.find(model)
    if place is None:
        raise UnknownSite(
            f"'{ref.path}' is not part of this {type(model).__name__}, but a width that was found has it. Call find_sites again."
        )
    return place


def put(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other values of another shape; whoever holds it sees them. A gradient of the old shape goes."""
    tensor.grad = None
    tensor.data = value


def change_sizes(width: Width, more: int) -> None:
    """Let the attributes that count units follow; ``more`` may be below zero."""
    for size in width.sizes if more else ():
        _change(size, width, more)


def _fits(stretch: Stretch, tensor: Tensor, length: int, *, made: bool) -> bool:
    if length and tensor.shape[stretch.dim] != length:
        return False
    units = stretch.units + stretch.more if made else stretch.units
    return tensor.shape[stretch.dim] >= stretch.start + stretch.outer * units * stretch.inner


def _fitting(width: Width, rows: Sequence[Tensor]) -> bool:
    """Whether rows that were measured have the shape that the layers have now."""
    axes = [axis for axis in width.axes if axis.fill == "row"]
    for axis, new in zip(axes, rows, strict=True):
        shape = list(getattr(axis.module.find_module(), axis.name).shape)
        shape[axis.dim] = axis.outer * width.more * axis.inner
        if shape != list(new.shape):
            return False
    return True


def _filled(resize: Resize, width: Width, rows: Sequence[Tensor]) -> Tensor:
    """The new values of one tensor; where two axes grow, what is new in both is a column: zero."""
    value = resize.tensor.detach()
    fills: dict[Stretch | Exchange, tuple[Axis, int]] = {
        Stretch(axis.dim, width.units, width.more, axis.start, axis.outer, axis.inner): (axis, index)
        for index, axis in enumerate(width.axes)
        if getattr(axis.module.find_module(), axis.name, None) is resize.tensor
    }
    numbers = {index: number for number, index in enumerate(i for i, a in enumerate(width.axes) if a.fill == "row")}
    for stretch in sorted(
        resize.stretches, key=lambda stretch: fills[stretch][0].fill != "row"
    ):  # rows first: columns are zero in them
        axis, index = fills[stretch]
        new: Tensor | float
        if axis.fill == "row":
            new = rows[numbers[index]]
        elif axis.fill == "mean":
            new = float(value.float().mean())
        else:
            new = 1.0 if axis.fill == "one" else 0.0
        value = stretch.applied(value, new)
    return like_layout(value, resize.tensor)


def _change(size: Size, width: Width, more: int) -> None:
    holder = size.holder(size.module.find_module())
    value = getattr(holder, size.name)
    count = (width.units * size.per_unit if value is None else value) + more * size.per_unit
    setattr(holder, size.name, None if size.unsaid and count == width.units * size.per_unit else count)


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
