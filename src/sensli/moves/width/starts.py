"""How new units start: rows that are measured, random ones, GradMax's, Net2Net's; and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules.copies import NoDropout
from sensli.modules.running import first_tensor, run, untouched, upcast, whole_tensor
from sensli.modules.wrappers import run_eagerly
from sensli.moves.point import Point
from sensli.moves.roles import Geometry, MapRole, map_of, role_of
from sensli.moves.sites import Ahead, Gauge, Site
from sensli.moves.stretching import Copied
from sensli.moves.width.gauge import MANY, ColumnGauge, ReaderGauge, calibrate, candidates, directions, is_cut, makings
from sensli.moves.width.replica import Places, Replica, inputs_of
from sensli.moves.width.width import Axis, Entries, Width, by_unit, existing_entries, laid_out, units_of

if TYPE_CHECKING:
    from sensli.moves.width.confirming import WidthRehearsal

# ---- The protocol of a start: what new units begin with, and what measures their worth.


class Start:
    """One way in which new units begin, so that the function is kept.

    Everything is the same on all processes, and draws no global random number.
    """

    together: ClassVar[bool] = True  # whether the units of several blocks can begin as one site

    def refusal(self, site: Site, trial: WidthRehearsal) -> str:
        """Why the units of a site cannot begin so, after a trial on a copy; empty if they can."""
        return ""

    def entries(self, width: Width) -> Entries:
        """What new units begin with if they were never measured; ``width`` is bound to its modules."""
        raise NotImplementedError

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        """What measures the worth of new units; ``width`` is bound to its modules."""
        raise NotImplementedError

    def sources(self, units: int, more: int) -> tuple[int, ...]:
        """Of each new unit the one that it is a copy of; empty where units are not copies."""
        return ()


# ---- Random rows with the spread of those that are there. Their columns are zero, so the function does not depend on the
# choice.


class RandomRows(Start):
    """Rows are drawn, measured or not."""

    def entries(self, width: Width) -> Entries:
        return drawn_rows(width, torch.Generator().manual_seed(width.units))

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        return ColumnGauge(width, lambda: self.entries(width))


def drawn_rows(width: Width, generator: torch.Generator) -> Entries:
    """Random rows for the units that would come: matrices with the spread of the old ones, biases zero."""

    def rows(axis: Axis) -> Tensor:
        tensor, shape = whole_tensor(axis.tensor), axis.shape_of(width.more)
        if tensor.dim() < 2:
            return tensor.new_zeros(shape)
        # In single precision, which is drawn several times as fast.
        return torch.randn(shape, generator=generator, device=generator.device).to(tensor) * tensor.std(correction=0)

    return Entries(tuple(rows(axis) if axis.fill == "row" else None for axis in width.axes))


# ---- The rows that are worth most of several that a measurement tries, made for the data: a few samples pass before it.
#
# Rows get the length and the bias with which units are about as large on these samples as those that are there, and
# some follow what comes back to the readers. Columns are zero.


class Sensitive(RandomRows):
    """Rows by their merit; random ones for a width that was never measured."""

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        return TryingGauge(width, lambda: candidates(width))


class TryingGauge(ColumnGauge):
    """Candidates are made for the data where some of these are seen beforehand."""

    def ahead(self) -> Ahead | None:
        return None if self._width._entries is not None else FittingGauge(self._width, self.points)


class FittingGauge(Ahead):
    """Sees what the layers that make a width are given, and what comes back to those that read it."""

    raw: ClassVar[bool] = True

    def __init__(self, width: Width, points: Sequence[tuple[Point, nn.Module]]) -> None:
        super().__init__(points=points)
        self._width = width
        self._readers = [axis.module.find_module() for axis in width.filled_with("column")]
        makers = {axis.module.path: role_of(axis.module.find_module()) for axis in width.filled_with("row")}
        self._makers = {path: role.module for path, role in makers.items() if role is not None and role.makes}
        self._given: dict[str, Tensor] = {}
        self._cut: list[bool] = []  # of each reader whether what is below zero hardly arrives there
        self._back: dict[int, Tensor] = {}

    def hooks(self, add: Callable[[dict[str, Tensor]], None], unscaled: Callable[[Tensor], Tensor]) -> list[Any]:
        makers = [_seeing(module, partial(self._given.__setitem__, path)) for path, module in self._makers.items()]
        return [*makers, *(_seeing(module, lambda x: self._cut.append(is_cut(x))) for module in self._readers)]

    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        self._back[index] = cotangent
        return {}

    def found(self) -> dict[str, Tensor]:
        """Candidates, by the number of their axis."""
        seen = {path: found for path, x in self._given.items() if (found := inputs_of(self._makers[path], x))}
        pointed = self._pointed(seen) if self._can_point(seen) else {}
        entries = _others(self._width, min(map(len, pointed.values()), default=0))
        if not self._back:  # without a loss nothing can be chosen: random rows, as many as will come
            entries = entries.taken(self._width, range(self._width.more))
        entries = _joined(self._width, entries, pointed)
        inputs = {path: inputs for path, (_, inputs) in seen.items()}
        entries = calibrate(self._width, entries, inputs, cut=bool(self._cut) and all(self._cut))
        return {str(index): value for index, value in enumerate(entries.values) if value is not None}

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        """The site with candidates for its units."""
        assert isinstance(site.move, Width)
        entries = Entries(tuple(sums.get(str(index)) for index in range(len(site.move.axes))))
        entries = entries.rounded(site.move) if self.compact else entries
        return replace(site, move=replace(site.move, _entries=entries))

    def _can_point(self, seen: Mapping[str, Any]) -> bool:
        """Whether one row of each layer makes a unit: the rows of a head or of fused maps do different things."""
        rows = self._width.filled_with("row")
        return bool(self._back) and all(a.module.path in seen and a.outer * a.inner == 1 for a in rows)

    def _pointed(self, seen: Mapping[str, tuple[Places, Tensor]]) -> dict[int, Tensor]:
        """Rows that follow the cotangent, by the number of their axis."""
        found = {}
        for making in makings(self._width):
            places, inputs = seen[making.axis.module.path]
            parts = [g.movedim(map_of(self._readers[index]).channel, -1) for index, g in self._back.items()]
            back = torch.cat([places.nearby(part) for part in parts], 1)
            found[making.weight] = directions(inputs, back.to(inputs), self._width.more)
        return found


def _seeing(module: nn.Module, see: Callable[[Tensor], None]) -> Any:
    """The handle of a hook that sees what a layer is given in the pass, not what a replica gives it."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = first_tensor(args or tuple(kwargs.values()))
        if x is not None and torch.is_grad_enabled():
            see(upcast(x.detach()))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _others(width: Width, pointed: int) -> Entries:
    """Candidates without data, fewer where others join them: with those two for each unit that would come, or one and a half."""
    entries, more = candidates(width), width.more
    if not pointed:
        return entries
    count = (2 * more if more < MANY else 3 * more // 2) - pointed
    last = entries.count(width) - more  # where rows begin that are there, perturbed
    return entries.taken(width, [*range(count - count // 2), *range(last, last + count // 2)])


def _joined(width: Width, entries: Entries, pointed: Mapping[int, Tensor]) -> Entries:
    """Candidates and, after them, rows that were found by the number of their axis, [rows, inputs]; without a bias."""
    if not pointed:
        return entries
    count = min(map(len, pointed.values()))
    values = []
    for index, (axis, value) in enumerate(zip(width.axes, entries.values, strict=True)):
        if value is not None:
            others = [size for dim, size in enumerate(value.shape) if dim != axis.dim]
            new = value.new_zeros(count)
            if index in pointed:
                new = pointed[index][:count].unflatten(1, others).movedim(0, axis.dim).to(value)
            value = torch.cat([value, new], axis.dim)
        values.append(value)
    return Entries(tuple(values))


# ---- Rows that are zero, and the columns for which the gradient of the rows is largest, as in GradMax.
#
# A unit that is zero changes nothing, whatever reads it. The gradient of its rows is then linear in its columns, so
# the columns are singular vectors of that map: the gradient of a bypass from what the rows multiply to what the
# readers give. A column is half as large as those that are there are on average.
#
# torch's ReLU has the slope 0 at 0, where a unit would be dead for ever. So units have a bias above zero, as large as
# one rounding error, and the slope that the method counts on.


SCALE = 0.5  # of the columns, in the mean size of those that are there
_LARGEST = 2**24  # entries of the bypass: what is larger costs more than the training step
_STEEPEST = 10.0  # more is the work of a norm, which makes units of any size equally large


class GradMaxStart(Start):
    """Columns by the gradient that they give the rows; random columns for a width that was never measured."""

    together: ClassVar[bool] = False  # each block has its own bypass

    def refusal(self, site: Site, trial: WidthRehearsal) -> str:
        assert isinstance(site.move, Width)
        width = site.move.by_path().in_model(trial.model)
        problem = _problem(width)
        if problem:
            return problem
        if trial.largest(site) > _STEEPEST * _smallest(width):
            return 'init="gradmax" needs units that are zero where their rows are, and here they are not'
        try:
            slope = _slope(trial, width)
        except MeasurementError:
            return 'init="gradmax" needs the gradient where rows are zero, and the model\'s code cannot give it (a checkpoint, say)'
        if slope == 0:
            return 'init="gradmax" needs a gradient where rows are zero, and here is none (torch\'s ReLU has the slope 0 at 0)'
        if slope > _STEEPEST:
            return 'init="gradmax" needs units that may be small, and a norm on the way makes them all equally large'
        return ""

    def entries(self, width: Width) -> Entries:
        return _entries(width, _random(width, width.more))

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        return RowGauge(width)


class RowGauge(ReaderGauge):
    """Sums the gradient of the bypass: what the rows multiply by what the readers give."""

    def _candidates(self) -> float:
        return _bias(self._width)

    def _sums(self, index: int, read: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        return {f"bypass{index}": self._columns(index, read, cotangent)}

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        bypass = self._bypass(sums)
        return [((bypass @ self._directions(bypass).T.to(bypass)).T, Geometry())]

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        assert isinstance(site.move, Width)
        entries = _entries(self._width, self._directions(self._bypass(sums))) if sums else None
        return replace(site, move=replace(site.move, _entries=entries))

    def _bypass(self, sums: Mapping[str, Tensor]) -> Tensor:
        """[weights of a unit, its columns in all readers]."""
        return torch.cat(self._summed(sums, "bypass"), 1)

    def _directions(self, bypass: Tensor) -> Tensor:
        """The columns of the new units, one after the other: [units, columns of one]."""
        if self._width._entries is not None:
            return _columns(self._width, self._width._entries)
        return largest_columns(self._width, bypass.cpu().double())


def largest_columns(width: Width, bypass: Tensor) -> Tensor:
    """Columns along the largest singular values; random ones where there are more units than these."""
    if not bool(bypass.isfinite().all()):  # training has diverged, and the merit says so
        return _random(width, width.more)
    _, _, found = torch.linalg.svd(bypass, full_matrices=False)
    found = found[: width.more]
    signs = found.gather(1, found.abs().argmax(1, keepdim=True)).sign()  # which svd leaves open
    drawn = _random(width, width.more)
    return torch.cat([found * signs * _size(width), drawn[len(found) :]])


def _problem(width: Width) -> str:
    """What the axes of a width already tell."""
    makers = width.filled_with("row")
    module = makers[0].module.find_module()
    norms = [axis.module.path for axis in width.axes if axis.fill in ("one", "zero")]
    if norms:
        return (
            f'init="gradmax" needs units that may be small, and {norms[0]} is a norm that makes them all equally large'
        )
    if {axis.module.path for axis in makers} != {makers[0].module.path} or makers[0].outer * makers[0].inner > 1:
        return 'init="gradmax" needs units that one row makes, and here several do (a gate, heads, a stream, depthwise kernels)'
    role = role_of(module)
    if not isinstance(role, MapRole) or not role.makes or not role.can_unfold:
        return f'init="gradmax" does not know {makers[0].module.path} ({type(module).__name__})'
    columns = sum(existing_entries(width, axis).numel() // width.units for axis in width.filled_with("column"))
    if role.inputs_per_unit * columns > _LARGEST:
        return f'init="gradmax" would need the singular vectors of a {role.inputs_per_unit} x {columns} matrix, which is too large'
    return ""


def _slope(trial: WidthRehearsal, width: Width) -> float:
    """By how much what is read of a unit moves at most, where its rows are zero, for each that its rows give."""
    replica, asker = Replica(trial.model), object()
    replica.ask(asker, width, _bias(width))
    given: list[float] = []

    def watch(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = first_tensor(args or tuple(kwargs.values()))
        assert x is not None
        given.append(float(map_of(module).unfold(x.detach()).abs().max()))

    handle = width.axes[0].module.find_module().register_forward_pre_hook(watch, with_kwargs=True)
    try:
        with replica.beside(), untouched(trial.model), torch.enable_grad(), run_eagerly(), NoDropout():
            run(trial.model, trial.example)
            read = [float(each.abs().max()) for held in replica.read.values() for each in held]
    finally:
        handle.remove()
    return max(read) / (max(given) or 1.0)


def _bias(width: Width) -> float:
    """What new units are, beside their rows: as small as a rounding error, and zero where there is no bias."""
    return _smallest(width) if isinstance(width.axes[0].module.find_module().bias, Tensor) else 0.0


def _smallest(width: Width) -> float:
    weight = width.axes[0].module.find_module().weight
    assert isinstance(weight, Tensor)
    return torch.finfo(weight.dtype).eps


def _entries(width: Width, columns: Tensor) -> Entries:
    """Zero rows, the bias, and these columns."""
    rest, values = columns, []
    for axis in width.axes:
        value = None
        if axis.fill == "column":
            own = existing_entries(width, axis)
            part, rest = rest.split([own.numel() // width.units, rest.shape[1] - own.numel() // width.units], 1)
            value = laid_out(part.to(own), axis, own)
        elif axis.fill == "row":
            start = _bias(width) if axis.name == "bias" else 0.0
            value = existing_entries(width, axis).new_full(axis.shape_of(width.more), start)
        values.append(value)
    return Entries(tuple(values))


def _columns(width: Width, entries: Entries) -> Tensor:
    """The inverse of `laid_out`, for all readers."""
    found = []
    for axis, value in zip(width.axes, entries.values, strict=True):
        if axis.fill == "column":
            assert value is not None
            found.append(by_unit(value.movedim(axis.dim, 0), axis).cpu().double())
    return torch.cat(found, 1)


def _existing_columns(width: Width) -> Tensor:
    return _columns(width, Entries(tuple(existing_entries(width, axis) for axis in width.axes)))


def _size(width: Width) -> float:
    """Of a new column: half the mean of the others, or one half if all of those are zero."""
    return SCALE * (float(_existing_columns(width).norm(dim=1).mean()) or 1.0)


def _random(width: Width, count: int) -> Tensor:
    """Columns of the same size in random directions."""
    generator = torch.Generator().manual_seed(width.units)
    drawn = torch.randn(
        count, _existing_columns(width).shape[1], generator=generator, dtype=torch.float64, device="cpu"
    )
    columns: Tensor = drawn / drawn.norm(dim=1, keepdim=True) * _size(width)
    return columns


# ---- Every new unit is a copy of one that is there, as in Net2Net: its rows and all that belongs to it on the way are
# copied, and what read the one unit is shared between it and its copies.
#
# Exact up to rounding, and without noise: copies that get the same updates stay equal. The moments of an optimizer,
# which copies begin without, or dropout make them differ; plain SGD does not.


class Net2NetStart(Start):
    """Copies. Their merit is the gradient of the copied columns, although at first order a copy can do nothing that its source cannot."""

    def refusal(self, site: Site, trial: WidthRehearsal) -> str:
        return "copies of them change what the model returns" if trial.changes(site) else ""

    def entries(self, width: Width) -> Entries:
        """The copies, without the columns that they share."""
        sources = width.sources or self.sources(width.units, width.more)

        def copies(axis: Axis) -> Tensor | None:
            return None if axis.fill == "column" else units_of(existing_entries(width, axis), axis, sources)

        return Entries(tuple(map(copies, width.axes)))

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        sources = width.sources or self.sources(width.units, width.more)
        return CopyGauge(replace(width, sources=sources), lambda: self.entries(width))

    def sources(self, units: int, more: int) -> tuple[int, ...]:
        drawn = torch.randint(units, (more,), generator=torch.Generator().manual_seed(units), device="cpu")
        return tuple(int(unit) for unit in drawn)


class CopyGauge(ColumnGauge):
    """The gradients of the columns of copies."""

    def __init__(self, width: Width, candidates: Callable[[], Entries]) -> None:
        super().__init__(width, candidates)
        self.columns = self.entries = 0  # columns are copied too, so that each is needed

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        found = []
        for (gradient, geometry), axis in zip(super().gradients(sums, shape), self._readers, strict=True):
            made = [a for a in self._width.axes if a.fill == "row" and (a.module, a.name) == (axis.module, axis.name)]
            for row in made:  # it makes what it reads: its copied rows share what comes back to their sources
                stretch = self._width.stretch(row)
                assert isinstance(stretch, Copied)
                stretch = replace(stretch, dim=2, shared=True)
                parts = gradient.unflatten(1, (axis.outer * axis.inner, row.tensor.shape[row.dim], -1))
                gradient = stretch.copied(parts).flatten(1)
            found.append((gradient, geometry))
        return found

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        return site  # copies are known without a measurement


# ---- The ways in which new units may start, by name.


STARTS: dict[str, Start] = {
    "sensitive": Sensitive(),
    "random": RandomRows(),
    "gradmax": GradMaxStart(),
    "net2net": Net2NetStart(),
}
