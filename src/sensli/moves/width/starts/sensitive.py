"""The rows that are worth most of several that a measurement tries: random ones, and those that are there, perturbed.

Their spread is that of the rows that are there, so that their activations are as large as those of the other units. Columns are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sensli.moves.move import Gauge
from sensli.moves.width.entries import Entries, existing
from sensli.moves.width.gauge import ColumnGauge
from sensli.moves.width.starts.random import drawn_rows
from sensli.moves.width.starts.start import Start
from sensli.moves.width.width import Axis, Width

PER_UNIT = 3  # tried for each that would come: a random direction, its opposite, and a unit that is there, perturbed


class Sensitive(Start):
    """Rows by their merit; random ones for a width that was never measured."""

    def entries(self, width: Width) -> Entries:
        return drawn_rows(width, torch.Generator().manual_seed(width.units))

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        return ColumnGauge(width, candidates(width))


def candidates(width: Width) -> Entries:
    """Entries of all axes that make a unit, for more units than will be taken."""
    generator = torch.Generator().manual_seed(width.units)
    near = torch.randint(width.units, ((PER_UNIT - 2) * width.more,), generator=generator)
    return Entries(tuple(_rows(axis, width, near, generator) if axis.fill == "row" else None for axis in width.axes))


def _rows(axis: Axis, width: Width, near: Tensor, generator: torch.Generator) -> Tensor:
    own = existing(width, axis)
    units, dim = width.units, axis.dim + 1
    old = own.double().cpu().unflatten(axis.dim, (axis.outer, units, axis.inner))
    moved = old.index_select(dim, near)
    if own.dim() < 2:  # a bias is that of some unit that is there
        picked = torch.randint(units, (width.more,), generator=generator)
        drawn = opposite = old.index_select(dim, picked)
    else:
        shape = list(old.shape)
        shape[dim] = width.more
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * old.std(correction=0)
        opposite = -drawn  # after a ReLU the one may be dead where the other is alive
        moved = moved + 0.5 * old.std(correction=0) * torch.randn(moved.shape, generator=generator, dtype=torch.float64)
    rows: Tensor = torch.cat([drawn, opposite, moved], dim=dim).flatten(axis.dim, axis.dim + 2)
    return rows.to(own.device, own.dtype)
