"""Rows of new units that are made for the data: units as large as those that are there, in the directions that the loss asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sensli.moves.width.entries import Entries, existing
from sensli.moves.width.width import Axis, Width

_LEAST = 4  # places: fewer do not tell how large a unit is
_MOST = 32  # directions: what is beyond them is noise
_CUT = 0.05  # of the squares of what is read, below zero: GELU and SiLU leave less than that, tanh as much as is above
_SMALLEST = 1e-3  # of the largest, where the gradient of a bypass has fewer directions than were asked for
_EXACT = 64  # entries of a cotangent: of so many the leading directions are found exactly
_ROUNDS = 2  # of more, in so many rounds


@dataclass(frozen=True)
class Making:
    """The weights and biases of one layer that make units: the numbers of their axes in the width."""

    axis: Axis
    weight: int
    bias: int | None


def makings(width: Width) -> Iterator[Making]:
    """What makes units, layer by layer."""
    rows = [(index, axis) for index, axis in enumerate(width.axes) if axis.fill == "row"]
    biases = {(axis.module.path, axis.start): index for index, axis in rows if axis.name == "bias"}
    for index, axis in rows:
        if axis.name == "weight":
            # a bias lies along its layer's units as the weights do
            yield Making(axis, index, biases.get((axis.module.path, axis.start)))


def calibrated(width: Width, entries: Entries, inputs: Mapping[str, Tensor], *, cut: bool) -> Entries:
    """The same with other lengths and biases: what each row makes of the inputs has the mean zero and is as large as what is there.

    ``inputs``: of each layer that is known what its weights are multiplied with, [places, inputs]. Without a bias the mean stays. ``cut``:
    whether what is below zero hardly arrives at the readers, as with ReLU.
    """
    values = list(entries.values)
    for making in makings(width):
        rows, axis = values[making.weight], making.axis
        if axis.module.path not in inputs or rows is None:
            continue
        given = inputs[axis.module.path].to(rows)
        if len(given) < _LEAST:
            continue
        bias = None if making.bias is None else values[making.bias]
        old_bias = None if making.bias is None else existing(width, width.axes[making.bias])
        made = _made(given, rows, bias, axis)  # [places, outer, units, inner]
        mean = made.mean(0, keepdim=True) if bias is not None else torch.zeros_like(made[:1])
        there = _made(given, existing(width, axis), old_bias, axis)
        centred = there - there.mean(0, keepdim=True) if bias is not None else there
        wanted = centred.square().mean(0, keepdim=True)
        if cut:
            # A unit that is nearly always off varies far more than what its readers get of it; of one with the mean zero they get half.
            wanted = torch.minimum(wanted, 2 * there.relu().square().mean(0, keepdim=True))
        size = (made - mean).square().mean(0, keepdim=True)
        factor = (wanted.mean((2, 3), keepdim=True) / size).sqrt()
        # nothing to compare with where all that is there is dead, or a unit that does not move on these samples, which stays as it was
        factor = torch.where((factor > 0) & factor.isfinite(), factor, 1.0).flatten()
        mean = torch.where((size > 0) & size.isfinite(), mean, 0.0).flatten()
        values[making.weight] = _scaled(rows, factor, axis)
        if making.bias is not None and bias is not None:
            values[making.bias] = (bias - mean) * factor
    return Entries(tuple(values))


def is_cut(read: Tensor) -> bool:
    """Whether of what a layer reads nearly all is above zero."""
    return bool((-read).relu().square().sum() < _CUT * read.square().sum())


def directions(given: Tensor, back: Tensor, count: int) -> Tensor:
    """Up to ``count`` rows that follow the cotangent: [rows, inputs].

    ``given`` is [places, inputs], ``back`` the cotangents of all readers, [places, outputs]. Rows are the left singular vectors of the
    gradient of a bypass between them, the largest first, each with the sign for which what is above zero is worth more. They are not
    divided by the spread of the inputs: that points to where inputs hardly move, and units overfit. There are none where values are so
    large that their products overflow.
    """
    if not bool((given.square().sum() * back.square().sum()).square().isfinite()):  # no product here is larger
        return given.new_zeros(0, given.shape[1])
    given = given - given.mean(0)
    lead = _leading(given, back, min(count, _MOST, *back.shape, given.shape[1]))
    rows = (given.T @ (back @ lead)).T
    sizes = rows.norm(dim=1)
    rows = rows[sizes > _SMALLEST * sizes.max()]  # the others are rounding errors
    made = given @ rows.T
    above, below = (part.T @ back for part in (made.relu(), (-made).relu()))
    turned = above.square().sum(1) < below.square().sum(1)
    return torch.where(turned[:, None], -rows, rows)


def _leading(given: Tensor, back: Tensor, count: int) -> Tensor:
    """The leading right singular vectors of the gradient of a bypass, [outputs, count]."""
    if back.shape[1] <= _EXACT:
        bypass = given.T @ back
        vectors: Tensor = torch.linalg.eigh(bypass.T @ bypass).eigenvectors  # the smallest first
        return vectors.flip(1)[:, :count]
    drawn = torch.randn(back.shape[1], count, generator=torch.Generator().manual_seed(count), device="cpu").to(back)
    for _ in range(_ROUNDS):
        drawn = torch.linalg.qr(back.T @ (given @ (given.T @ (back @ drawn)))).Q
    return drawn


def _made(given: Tensor, rows: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    """What rows make of inputs: [places, outer, units, inner]."""
    made = given @ rows.movedim(axis.dim, 0).flatten(1).T.to(given)
    made = made if bias is None else made + bias.to(made)
    parts: Tensor = made.unflatten(1, (axis.outer, -1, axis.inner))
    return parts


def _scaled(rows: Tensor, factor: Tensor, axis: Axis) -> Tensor:
    shape = [1] * rows.dim()
    shape[axis.dim] = -1
    return rows * factor.view(shape)
