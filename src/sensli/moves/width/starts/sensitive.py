"""The rows that are worth most of several that a measurement tries, made for the data: a few samples pass before it.

Rows get the length and the bias with which units are about as large on these samples as those that are there, and some follow what comes
back to the readers. Columns are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.modules.arguments import first_tensor
from sensli.modules.running import widened
from sensli.moves.move import Ahead, Gauge
from sensli.moves.point import Point
from sensli.moves.roles import role_of
from sensli.moves.width.calibrating import calibrated, directions, is_cut, makings
from sensli.moves.width.candidates import MANY, candidates
from sensli.moves.width.entries import Entries
from sensli.moves.width.gauge import ColumnGauge
from sensli.moves.width.places import Places, inputs_of
from sensli.moves.width.starts.random import drawn_rows
from sensli.moves.width.starts.start import Start
from sensli.moves.width.width import Width

if TYPE_CHECKING:
    from sensli.moves.sites import Site


class Sensitive(Start):
    """Rows by their merit; random ones for a width that was never measured."""

    def entries(self, width: Width) -> Entries:
        return drawn_rows(width, torch.Generator().manual_seed(width.units))

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
        self._readers = [axis.module.find_module() for axis in width.axes if axis.fill == "column"]
        self._makers = {
            axis.module.path: axis.module.find_module()
            for axis in width.axes
            if axis.fill == "row" and (role := role_of(axis.module.find_module())) is not None and role.makes
        }
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
        entries = calibrated(self._width, entries, inputs, cut=bool(self._cut) and all(self._cut))
        return {str(index): value for index, value in enumerate(entries.values) if value is not None}

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        """The site with candidates for its units."""
        assert isinstance(site.move, Width)
        entries = Entries(tuple(sums.get(str(index)) for index in range(len(site.move.axes))))
        return replace(site, move=replace(site.move, _entries=entries))

    def _can_point(self, seen: Mapping[str, Any]) -> bool:
        """Whether one row of each layer makes a unit: the rows of a head or of fused maps do different things."""
        rows = [axis for axis in self._width.axes if axis.fill == "row"]
        return bool(self._back) and all(a.module.path in seen and a.outer * a.inner == 1 for a in rows)

    def _pointed(self, seen: Mapping[str, tuple[Places, Tensor]]) -> dict[int, Tensor]:
        """Rows that follow the cotangent, by the number of their axis."""
        found = {}
        for making in makings(self._width):
            places, inputs = seen[making.axis.module.path]
            back = torch.cat([places.nearby(self._channels_last(index)) for index in self._back], 1)
            found[making.weight] = directions(inputs, back.to(inputs), self._width.more)
        return found

    def _channels_last(self, index: int) -> Tensor:
        back = self._back[index]
        return back.movedim(1, -1) if isinstance(self._readers[index], nn.modules.conv._ConvNd) else back


def _seeing(module: nn.Module, see: Callable[[Tensor], None]) -> Any:
    """The handle of a hook that sees what a layer is given in the pass, not what a replica gives it."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = first_tensor(args or tuple(kwargs.values()))
        if x is not None and torch.is_grad_enabled():
            see(widened(x.detach()))

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
            new = (
                pointed[index][:count].unflatten(1, others).movedim(0, axis.dim).to(value)
                if index in pointed
                else value.new_zeros(count)
            )
            value = torch.cat([value, new], axis.dim)
        values.append(value)
    return Entries(tuple(values))
