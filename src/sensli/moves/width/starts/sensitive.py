"""The rows that are worth most of several that a measurement tries: random ones, those that are there, perturbed, and those that follow
what comes back to the readers. Columns are zero.

A few samples before the measurement tell how large rows must be for units as large as the others. Without them the spread is that of the
rows that are there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sensli.moves.move import Ahead, Gauge
from sensli.moves.width.entries import Entries, existing
from sensli.moves.width.gauge import ColumnGauge
from sensli.moves.width.starts.fitted import FittingGauge
from sensli.moves.width.starts.random import drawn_rows
from sensli.moves.width.starts.start import Start
from sensli.moves.width.width import Axis, Width

_MANY = 64  # new units: among so many random directions hardly one lacks something like its opposite


class Sensitive(Start):
    """Rows by their merit; random ones for a width that was never measured."""

    def entries(self, width: Width) -> Entries:
        return drawn_rows(width, torch.Generator().manual_seed(width.units))

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        return TryingGauge(width, lambda: candidates(width))


class TryingGauge(ColumnGauge):
    """Candidates are made for the data where that is known beforehand."""

    def ahead(self) -> Ahead | None:
        return None if self._width._entries is not None else FittingGauge(self._width, self.points, candidates)


def candidates(width: Width, pointed: int = 0) -> Entries:
    """Entries of all axes that make a unit, for more units than will be taken.

    For each that would come: a random direction, unless there are many its opposite, and a unit that is there, perturbed. Where others
    will join them, ``pointed`` in number, there are fewer: two for each unit that would come with those, or one and a half of many.
    """
    more = width.more
    drawn, moved, both = more, more, more < _MANY
    if pointed:
        others = (2 * more if more < _MANY else 3 * more // 2) - pointed
        drawn, moved, both = others - others // 2, others // 2, False
    generator = torch.Generator().manual_seed(width.units)
    near = torch.randint(width.units, (moved,), generator=generator)
    picked = torch.randint(width.units, (drawn,), generator=generator)
    return Entries(
        tuple(_rows(axis, width, near, picked, both, generator) if axis.fill == "row" else None for axis in width.axes)
    )


def _rows(axis: Axis, width: Width, near: Tensor, picked: Tensor, both: bool, generator: torch.Generator) -> Tensor:
    own = existing(width, axis)
    dim = axis.dim + 1
    old = own.unflatten(axis.dim, (axis.outer, width.units, axis.inner))
    moved = old.index_select(dim, near.to(own.device))
    if own.dim() < 2:  # a bias is that of some unit that is there
        drawn = opposite = old.index_select(dim, picked.to(own.device))
    else:
        shape = list(old.shape)
        shape[dim] = len(picked)
        spread = own.std(correction=0)
        drawn = torch.randn(shape, generator=generator).to(own) * spread
        opposite = -drawn  # after a ReLU the one may be dead where the other is alive
        moved = moved + torch.randn(moved.shape, generator=generator).to(own) * (0.5 * spread)
    rows: Tensor = torch.cat([drawn, opposite, moved] if both else [drawn, moved], dim=dim)
    return rows.flatten(axis.dim, axis.dim + 2)
