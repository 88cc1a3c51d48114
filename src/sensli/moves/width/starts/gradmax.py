"""Rows that are zero, and the columns for which the gradient of the rows is largest, as in GradMax.

A unit that is zero changes nothing, whatever reads it. The gradient of its rows is then linear in its columns, so the columns are singular
vectors of that map: the gradient of a bypass from what the rows multiply to what the readers give. A column is half as large as those
that are there are on average.

torch's ReLU has the slope 0 at 0, where a unit would be dead for ever. So units have a bias above zero, as large as one rounding error,
and the slope that the method counts on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules.arguments import first_tensor
from sensli.modules.dropout import NoDropout
from sensli.modules.running import run, untouched
from sensli.modules.wrappers import eager
from sensli.moves.geometry import Geometry
from sensli.moves.move import Gauge
from sensli.moves.roles import role_of
from sensli.moves.width.entries import Entries, by_unit, existing, laid_out
from sensli.moves.width.gauge import ReaderGauge
from sensli.moves.width.layers import inputs_per_unit, unfolded, unfolds
from sensli.moves.width.replica import Replica
from sensli.moves.width.starts.start import Start
from sensli.moves.width.width import Width

if TYPE_CHECKING:
    from sensli.moves.sites import Site
    from sensli.moves.width.confirming import Trial

SCALE = 0.5  # of the columns, in the mean size of those that are there
_LARGEST = 2**24  # entries of the bypass: what is larger costs more than the training step
_STEEPEST = 10.0  # more is the work of a norm, which makes units of any size equally large


class GradMax(Start):
    """Columns by the gradient that they give the rows; random columns for a width that was never measured."""

    together: ClassVar[bool] = False  # each block has its own bypass

    def refusal(self, site: Site, trial: Trial) -> str:
        assert isinstance(site.move, Width)
        width = site.move.by_path().on(trial.model)
        problem = _problem(width)
        if problem:
            return problem
        if trial.largest(site) > _STEEPEST * _smallest(width):
            return 'start="gradmax" needs units that are zero where their rows are, and here they are not'
        try:
            slope = _slope(trial, width)
        except MeasurementError:
            return 'start="gradmax" needs the gradient where rows are zero, and the model\'s code cannot give it (a checkpoint, say)'
        if slope == 0:
            return 'start="gradmax" needs a gradient where rows are zero, and here is none (torch\'s ReLU has the slope 0 at 0)'
        if slope > _STEEPEST:
            return 'start="gradmax" needs units that may be small, and a norm on the way makes them all equally large'
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
        return largest(self._width, bypass.cpu().double())


def largest(width: Width, bypass: Tensor) -> Tensor:
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
    makers = [axis for axis in width.axes if axis.fill == "row"]
    module = makers[0].module.find_module()
    norms = [axis.module.path for axis in width.axes if axis.fill in ("one", "zero")]
    if norms:
        return (
            f'start="gradmax" needs units that may be small, and {norms[0]} is a norm that makes them all equally large'
        )
    if {axis.module.path for axis in makers} != {makers[0].module.path} or makers[0].outer * makers[0].inner > 1:
        return 'start="gradmax" needs units that one row makes, and here several do (a gate, heads, a stream, depthwise kernels)'
    role = role_of(module)
    if role is None or not role.makes or not unfolds(module):
        return f'start="gradmax" does not know {makers[0].module.path} ({type(module).__name__})'
    columns = sum(existing(width, axis).numel() // width.units for axis in width.axes if axis.fill == "column")
    if inputs_per_unit(module) * columns > _LARGEST:
        return f'start="gradmax" would need the singular vectors of a {inputs_per_unit(module)} x {columns} matrix, which is too large'
    return ""


def _slope(trial: Trial, width: Width) -> float:
    """By how much what is read of a unit moves at most, where its rows are zero, for each that its rows give."""
    replica, asker = Replica(trial.model), object()
    replica.ask(asker, width, _bias(width))
    given: list[float] = []

    def watch(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = first_tensor(args or tuple(kwargs.values()))
        assert x is not None
        given.append(float(unfolded(module, x.detach()).abs().max()))

    handle = width.axes[0].module.find_module().register_forward_pre_hook(watch, with_kwargs=True)
    try:
        with replica.beside(), untouched(trial.model), torch.enable_grad(), eager(), NoDropout():
            run(trial.model, trial.example)
            read = [float(each.abs().max()) for held in replica.last.read.values() for each in held]
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
            own = existing(width, axis)
            part, rest = rest.split([own.numel() // width.units, rest.shape[1] - own.numel() // width.units], 1)
            value = laid_out(part.to(own), axis, own)
        elif axis.fill == "row":
            shape = list(getattr(axis.module.find_module(), axis.name).shape)
            shape[axis.dim] = width.more
            value = existing(width, axis).new_full(shape, _bias(width) if axis.name == "bias" else 0.0)
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
    return _columns(width, Entries(tuple(existing(width, axis) for axis in width.axes)))


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
