"""The rows that a measurement tries for new units: random ones, and those that are there, perturbed.

Their spread is that of the rows that are there, so that their activations are as large as those of the other units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sensli.moves.width.width import Axis, Width

PER_UNIT = 2  # tried for each that would come


def candidates(width: Width) -> tuple[Tensor, ...]:
    """Entries of all axes that make a unit, for more units than will be taken. The same on all ranks; draws no global random number."""
    generator = torch.Generator().manual_seed(width.units)
    count = width.more * PER_UNIT if width.start == "sensitive" else width.more
    near = torch.randint(
        width.units, (count // 2,), generator=generator
    )  # units to be perturbed; the others are random
    return tuple(_rows(axis, width.units, count, near, generator) for axis in width.axes if axis.fill == "row")


def _rows(axis: Axis, units: int, count: int, near: Tensor, generator: torch.Generator) -> Tensor:
    tensor: Tensor = getattr(axis.module.find_module(), axis.name).detach()
    old = tensor.double().cpu().unflatten(axis.dim, (axis.outer, units, axis.inner))
    shape = list(old.shape)
    shape[axis.dim + 1] = count
    if tensor.dim() < 2:  # a bias is that of some other unit
        picked = torch.randint(units, (count,), generator=generator)
        drawn = old.index_select(axis.dim + 1, picked)
    else:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * old.std(correction=0)
    if len(near):
        kept = old.index_select(axis.dim + 1, near)
        noisy = kept + 0.5 * drawn.narrow(axis.dim + 1, 0, len(near)) if tensor.dim() > 1 else kept
        drawn = torch.cat([noisy, drawn.narrow(axis.dim + 1, len(near), count - len(near))], dim=axis.dim + 1)
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
