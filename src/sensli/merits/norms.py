"""Squared norms of a weight's gradient, seen as a matrix or as a circular convolution on its feature map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sensli.merits.natural import NATURAL
from sensli.merits.spectrum import largest, peaks, taps
from sensli.modules import checks
from sensli.modules.running import capable
from sensli.moves.geometry import Geometry

_STEP_WORK = 300  # for each entry of a matrix at one frequency: some ten steps from two starts, forth and back, in complex numbers


def squared_norm(gradient: Tensor, norm: str, geometry: Geometry = Geometry()) -> float:  # noqa: B008 (frozen)
    """The squared norm of a gradient, by name.

    With || || the operator norm and A_o the map to the single output o (a row, or all channels to channel o):

        frobenius    sum G^2                mean_square  sum G^2 / number of entries
        operator     ||A||^2                operator_l2  sum_o ||A_o||^2              operator_l1  (sum_o ||A_o||)^2

    A convolution is the circular one on the actual map. With stride s it keeps every s-th output; a map that is not a
    multiple of the stride counts as the next multiple. Half precision is computed in float32.

    Args:
        gradient: c_out x c_in x k... for a convolution (``geometry.size`` given), otherwise a matrix, rows x all the rest.
        norm: The name of the norm, one of those above.
        geometry: How the weight acts (default: a matrix).

    Returns:
        The squared norm; nan if the gradient is not finite.
    """
    checks.one_of("norm", norm, NORMS)
    checks.instance("gradient", gradient, Tensor, "a tensor")
    checks.instance("geometry", geometry, Geometry, "a Geometry (for example Geometry(size=(32, 32)))")
    if gradient.is_complex():
        hint = "Use torch.view_as_real(gradient)."
        checks.refuse("gradient", "real, not complex", gradient, ValueError, hint)
    _check(gradient, geometry)
    if gradient.numel() == 0:
        return 0.0
    gradient = capable(gradient.detach())
    if gradient.dtype not in (torch.float32, torch.float64):
        gradient = gradient.float()
    lowest, highest = torch.aminmax(gradient)
    largest = max(-lowest.item(), highest.item())
    if not math.isfinite(largest):
        return math.nan
    if not largest:
        return 0.0
    if 2**-16 < largest < 2**16:  # fourth powers are far from the ends of float32: no copy
        return NORMS[norm](gradient, geometry)
    # A power of two out of the way: no square overflows or vanishes, and no bit of the mantissa moves.
    scale = math.ldexp(1.0, max(math.frexp(largest)[1] - 1, -120))
    return NORMS[norm](gradient / scale, geometry) * scale * scale


def choose(norm: str, kinds: Iterable[str]) -> str:
    """The norm meant by a name: "auto" is the operator norm if every site is a convolution, else Frobenius for all."""
    if checks.one_of("norm", norm, ("auto", *NORMS, NATURAL)) != "auto":
        return norm
    return "operator" if set(kinds) == {"conv"} else "frobenius"


def operator_work(shape: Sequence[int], geometry: Geometry) -> int:
    """About how many multiply-adds of a pass an operator norm costs, from above; its matrices are small, so each counts for more."""
    taps = math.prod(shape[2:]) if geometry.size else 1
    frequencies = math.prod(geometry.size) // 2 + 1 if taps > 1 else 1
    return math.prod(shape[:2] if geometry.size else shape) * (frequencies * _STEP_WORK + taps * taps)


def _check(gradient: Tensor, geometry: Geometry) -> None:
    if not geometry.size:
        return
    for name in ("size", "stride", "dilation"):
        given: Any = checks.instance(name, getattr(geometry, name), (tuple, list), "a tuple of whole numbers")
        if (given or name == "size") and len(given) != gradient.dim() - 2:
            raise ValueError(
                f"{name} {given} has {len(given)} entries, but a kernel of shape {tuple(gradient.shape)} "
                f"has {max(gradient.dim() - 2, 0)} spatial axes."
            )
        for index, entry in enumerate(given):
            checks.whole(f"{name}[{index}]", entry, 1)
    if gradient.shape[0] % checks.whole("groups", geometry.groups, 1):
        raise ValueError(f"{geometry.groups} groups do not divide the {gradient.shape[0]} channels of the kernel.")


# ---- the five norms -------------------------------------------------------------------------------------------------


def _frobenius(gradient: Tensor, geometry: Geometry) -> float:
    return gradient.square().sum().item()


def _mean_square(gradient: Tensor, geometry: Geometry) -> float:
    return gradient.square().mean().item()


def _operator(gradient: Tensor, geometry: Geometry) -> float:
    values, grid = taps(gradient, geometry)
    if not geometry.size or geometry.groups == 1:
        return largest(values, grid)
    groups = values.chunk(geometry.groups, dim=1)
    # Block diagonal: the largest over the groups. In the order of their bounds, so that most need no second look.
    bounds = peaks(torch.stack([group.flatten(1) for group in groups], 1), grid).tolist()
    best = 0.0
    for bound, group in sorted(zip(bounds, groups, strict=True), key=lambda pair: -pair[0]):
        if bound > best:
            best = largest(group, grid, floor=best)
    return best


def _operator_l2(gradient: Tensor, geometry: Geometry) -> float:
    return _output_norms(gradient, geometry).sum().item()


def _operator_l1(gradient: Tensor, geometry: Geometry) -> float:
    return _output_norms(gradient, geometry).sqrt().sum().square().item()


NORMS: dict[str, Callable[[Tensor, Geometry], float]] = {
    "frobenius": _frobenius,
    "mean_square": _mean_square,
    "operator": _operator,
    "operator_l2": _operator_l2,
    "operator_l1": _operator_l1,
}


def _output_norms(gradient: Tensor, geometry: Geometry) -> Tensor:
    """The squared operator norm of the map to each single output; shape: outputs."""
    values, grid = taps(gradient, geometry)
    if not (geometry.size and geometry.transposed):
        return peaks(values, grid)
    # The adjoint of the map to one output: rows are the inputs of its group, columns the phases of the stride.
    outputs = gradient.shape[1]
    maps = [group[:, :, output::outputs] for group in values.chunk(geometry.groups, dim=1) for output in range(outputs)]
    if maps[0].shape[2] == 1:
        return peaks(torch.stack([each.flatten(1) for each in maps], 1), grid)
    return values.new_tensor([largest(each, grid) for each in maps])
