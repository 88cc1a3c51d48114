"""A width with more units, whose layers begin again: all weights that make or read its units are drawn as torch draws a new layer's.

Each weight is drawn by one width alone, and rows that are new do not read columns that are new at the same look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sensli.moves.sites import Site
from sensli.moves.width.entries import Entries, existing, filled
from sensli.moves.width.width import Axis, Width


def redrawn(site: Site, network: nn.Module, share: float, made: set[tuple[str, str]], source: torch.Generator) -> Site:
    """The site with a share of units more; ``made`` are the weights whose rows belong to a width, as path and name."""
    assert isinstance(site.move, Width)
    width = site.move.on(network)
    more = max(1, round(share * width.units))
    values: list[Tensor | None] = []
    shifts: list[Tensor | None] = []
    for axis in width.axes:
        old = existing(width, axis).detach()
        shape = list(old.shape)
        shape[axis.dim] = axis.outer * more * axis.inner
        drawn = axis.fill in ("row", "column")
        values.append(_drawn(axis, shape, old, source) if drawn else None)
        if axis.fill == "column" and (axis.module.path, axis.name) in made:
            shifts.append(None)  # its rows are those of another width, which draws them
        elif drawn:
            shifts.append(_drawn(axis, list(old.shape), old, source) - old)
        else:
            shifts.append(filled(axis, old, None) - old)
    known = site.move
    grown = replace(
        known, more=more, added=known.added * more // known.more, flops=known.flops * more // known.more,
        _entries=Entries(tuple(values), tuple(shifts)),
    )  # fmt: skip
    return replace(site, move=grown)


def _drawn(axis: Axis, shape: Sequence[int], like: Tensor, source: torch.Generator) -> Tensor:
    """As torch draws a linear layer or a convolution: uniform up to one over the root of the inputs. Biases are zero."""
    if like.dim() < 2:
        return like.new_zeros(shape)
    weight: Tensor = getattr(axis.module.find_module(), axis.name)
    bound = (weight.numel() / len(weight)) ** -0.5
    drawn = 2 * torch.rand(shape, generator=source, dtype=torch.float64, device=source.device) - 1
    entries: Tensor = (drawn * bound).to(like)
    return entries
