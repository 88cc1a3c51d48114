"""The slow and obvious way to measure a width: really widen a copy, and read the gradient of the columns that are new."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from sensli.moves.sites import Site
from sensli.moves.width.widening import Widening
from sensli.moves.width.width import Entries, Width


def widened(model: nn.Module, site: Site) -> tuple[nn.Module, Widening]:
    """Really wider, with the rows that the site carries."""
    assert isinstance(site.move, Width)
    other = copy.deepcopy(model)
    move = replace(site.move.by_path(), _entries=site.move._entries)
    edit = Widening(other, replace(site, point=site.point.by_path(), move=move))
    edit.build()
    edit.apply()
    return other, edit


def column_gradients(edit: Widening) -> float:
    """The squared norm of the gradient of the columns that read the new units."""
    return new_gradients(edit, "column")


def new_gradients(edit: Widening, fill: str) -> float:
    """The squared norm of the gradient of new rows or columns."""
    move, total = edit._move, 0.0
    for axis in move.axes:
        if axis.fill == fill:
            gradient = getattr(axis.module.find_module(), axis.name).grad
            if gradient is not None:  # none comes back to what is cut off
                total += move.stretch(axis).entries(gradient).square().sum().item()
    return total


def redrawn(edit: Widening, seed: int) -> None:
    """Give the new units other rows."""
    generator = torch.Generator().manual_seed(seed)
    edit.revert()
    values: list[Tensor | None] = []
    for axis in edit._move.axes:
        value = None
        if axis.fill == "row":
            tensor = getattr(axis.module.find_module(), axis.name)
            shape = [*tensor.shape]
            shape[axis.dim] = axis.outer * edit._move.more * axis.inner
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(tensor)
        values.append(value)
    edit._move = replace(edit._move, _entries=Entries(tuple(values)))
    edit.build()
    edit.apply()
