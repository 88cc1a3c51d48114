"""How new units start: the rows that make them. Their columns are zero, so the function does not hang on the choice."""

from __future__ import annotations

import torch
from torch import Tensor

from sensli.moves.width.width import Axis, Width


def new_rows(width: Width) -> tuple[Tensor, ...]:
    """Random rows with the spread of those that are there, for a width that was never measured. Draws no global random number."""
    generator = torch.Generator().manual_seed(width.units)
    return tuple(random_rows(axis, width.more, generator) for axis in width.axes if axis.fill == "row")


def random_rows(axis: Axis, units: int, generator: torch.Generator) -> Tensor:
    """Entries for so many units: matrices drawn with the spread of the old ones, biases zero."""
    tensor: Tensor = getattr(axis.module.find_module(), axis.name).detach()
    shape = list(tensor.shape)
    shape[axis.dim] = axis.outer * units * axis.inner
    if tensor.dim() < 2:
        return tensor.new_zeros(shape)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (drawn * tensor.double().cpu().std(correction=0)).to(tensor.device, tensor.dtype)
