"""The rows that a measurement tries for new units: random ones, and those that are there, perturbed.

Their spread is that of the rows that are there, so that their activations are as large as those of the other units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sensli.moves.width.width import Axis, Width

PER_UNIT = 3  # tried for each that would come: a random direction, its opposite, and a unit that is there, perturbed


def candidates(width: Width) -> tuple[Tensor, ...]:
    """Entries of all axes that make a unit, for more units than will be taken. The same on all ranks; draws no global random number."""
    generator = torch.Generator().manual_seed(width.units)
    count = width.more * PER_UNIT if width.start == "sensitive" else width.more
    near = torch.randint(width.units, (count - 2 * width.more if count > width.more else 0,), generator=generator)
    return tuple(_rows(axis, width, count, near, generator) for axis in width.axes if axis.fill == "row")


def _rows(axis: Axis, width: Width, count: int, near: Tensor, generator: torch.Generator) -> Tensor:
    tensor: Tensor = getattr(axis.module.find_module(), axis.name).detach()
    units, dim = width.units, axis.dim + 1
    own = tensor.narrow(axis.dim, axis.start, axis.outer * units * axis.inner)
    old = own.double().cpu().unflatten(axis.dim, (axis.outer, units, axis.inner))
    if tensor.dim() < 2:  # a bias is that of some unit that is there
        picked = torch.randint(units, (width.more,), generator=generator)
        drawn = opposite = old.index_select(dim, picked)
        moved = old.index_select(dim, near)
    else:
        shape = list(old.shape)
        shape[dim] = width.more
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * old.std(correction=0)
        opposite = -drawn  # behind a ReLU the one may be dead where the other is alive
        moved = old.index_select(dim, near)
        moved = moved + 0.5 * old.std(correction=0) * torch.randn(moved.shape, generator=generator, dtype=torch.float64)
    if count > width.more:
        drawn = torch.cat([drawn, opposite, moved], dim=dim)
    rows: Tensor = drawn.flatten(axis.dim, axis.dim + 2)
    return rows.to(tensor.device, tensor.dtype)


def taken(rows: tuple[Tensor, ...], width: Width, chosen: list[int]) -> tuple[Tensor, ...]:
    """Of candidates the chosen ones."""
    axes = [axis for axis in width.axes if axis.fill == "row"]
    picked = torch.tensor(chosen)
    return tuple(
        each.unflatten(axis.dim, (axis.outer, -1, axis.inner))
        .index_select(axis.dim + 1, picked.to(each.device))
        .flatten(axis.dim, axis.dim + 2)
        for each, axis in zip(rows, axes, strict=True)
    )
