"""Every new unit is a copy of one that is there, as in Net2Net: its rows and all that belongs to it on the way are copied, and what read
the one unit is shared between it and its copies.

Exact up to rounding, and without noise: copies that get the same updates stay equal. The moments of an optimizer, which copies begin
without, or dropout make them differ; plain SGD does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sensli.moves.copying import Copied
from sensli.moves.geometry import Geometry
from sensli.moves.move import Gauge
from sensli.moves.width.entries import Entries, existing, units_of
from sensli.moves.width.gauge import ColumnGauge
from sensli.moves.width.starts.start import Start
from sensli.moves.width.width import Width

if TYPE_CHECKING:
    from sensli.moves.sites import Site
    from sensli.moves.width.confirming import Trial


class Net2Net(Start):
    """Copies. Their merit is the gradient of the copied columns, although at first order a copy can do nothing that its source cannot."""

    def refusal(self, site: Site, trial: Trial) -> str:
        return "copies of them change what the model returns" if trial.changes(site) else ""

    def entries(self, width: Width) -> Entries:
        """The copies, without the columns that they share."""
        sources = width.sources or self.sources(width.units, width.more)
        return Entries(
            tuple(
                None if axis.fill == "column" else units_of(existing(width, axis), axis, sources) for axis in width.axes
            )
        )

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        sources = width.sources or self.sources(width.units, width.more)
        return CopyGauge(replace(width, sources=sources), lambda: self.entries(width))

    def sources(self, units: int, more: int) -> tuple[int, ...]:
        drawn = torch.randint(units, (more,), generator=torch.Generator().manual_seed(units), device="cpu")
        return tuple(int(unit) for unit in drawn)


class CopyGauge(ColumnGauge):
    """The gradients of the columns of copies."""

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        found = []
        for (gradient, geometry), axis in zip(super().gradients(sums, shape), self._readers, strict=True):
            made = [a for a in self._width.axes if a.fill == "row" and (a.module, a.name) == (axis.module, axis.name)]
            for row in made:  # it makes what it reads: its copied rows share what comes back to their sources
                rows: Tensor = getattr(row.module.find_module(), row.name)
                stretch = self._width.stretch(row)
                assert isinstance(stretch, Copied)
                stretch = replace(stretch, dim=2, shared=True)
                parts = gradient.unflatten(1, (axis.outer * axis.inner, rows.shape[row.dim], -1))
                gradient = stretch.copied(parts).flatten(1)
            found.append((gradient, geometry))
        return found

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        return site  # copies are known without a measurement
