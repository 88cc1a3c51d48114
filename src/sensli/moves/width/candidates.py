"""Rows that a measurement tries where no data were seen before it: random ones, and those that are there, perturbed.

Their spread is that of the rows that are there, so that their activations are about as large as those of the other units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sensli.moves.width.entries import Entries, existing
from sensli.moves.width.width import Axis, Width

MANY = 64  # new units: among so many random directions hardly one lacks something like its opposite


def candidates(width: Width) -> Entries:
    """Entries of all axes that make a unit, for more units than will be taken.

    For each that would come: a random direction, unless there are many its opposite, and a unit that is there, perturbed.
    """
    generator = torch.Generator().manual_seed(width.units)
    near = torch.randint(width.units, (width.more,), generator=generator, device=generator.device)
    return Entries(tuple(_rows(axis, width, near, generator) if axis.fill == "row" else None for axis in width.axes))


def _rows(axis: Axis, width: Width, near: Tensor, generator: torch.Generator) -> Tensor:
    own = existing(width, axis)
    units, dim = width.units, axis.dim + 1
    old = own.unflatten(axis.dim, (axis.outer, units, axis.inner))
    moved = old.index_select(dim, near.to(own.device))
    if own.dim() < 2:  # a bias is that of some unit that is there
        picked = torch.randint(units, (width.more,), generator=generator, device=generator.device)
        drawn = opposite = old.index_select(dim, picked.to(own.device))
    else:
        shape = list(old.shape)
        shape[dim] = width.more
        spread = own.std(correction=0)
        drawn = torch.randn(shape, generator=generator, device=generator.device).to(own) * spread
        opposite = -drawn  # after a ReLU the one may be dead where the other is alive
        moved = moved + torch.randn(moved.shape, generator=generator, device=generator.device).to(own) * (0.5 * spread)
    tried = [drawn, moved] if width.more >= MANY else [drawn, opposite, moved]
    rows: Tensor = torch.cat(tried, dim=dim).flatten(axis.dim, axis.dim + 2)
    return rows
