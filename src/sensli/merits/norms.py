"""Squared norms of a weight's gradient, seen as a matrix or as a circular convolution on its feature map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from sensli.merits.spectrum import largest_singular_value, peaks, taps
from sensli.modules import checks
from sensli.modules.running import fit_threads, to_capable
from sensli.moves.factors import Factored
from sensli.moves.roles import Geometry

# ---- Sketches: what is summed in the place of a gradient that is too large to be held for every site.
#
# With A and B matrices of random signs, ``A G B^T`` has the squared Frobenius norm of G in the mean. It is linear in G,
# so that batches, processes and groups of batches add up before any norm is taken. For other norms there is none.
#
# Of candidates for new units some are chosen, so each keeps a row: the columns of all that would read it are mixed into
# a few by random signs. Their squared norm is that of the columns in the mean.


ROOM = 2**23  # entries of all sums of a measurement together that are held as they are
SKETCHABLE = "frobenius"
SUMS_OF_SQUARES = (SKETCHABLE, "mean_square")


class Sketcher:
    """Makes sketches of one size; a side of a gradient that is not longer than that stays as it is."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self._seed = size, seed
        self._signs: dict[tuple[int, int, torch.device], Tensor] = {}  # as bytes, which take a quarter

    def takes(self, value: Any) -> TypeGuard[Tensor]:
        """Whether this is a gradient, and a sketch of it much smaller."""
        return isinstance(value, Tensor) and value.dim() >= 2 and value.numel() >= 4 * self.size**2

    def sketch(self, gradient: Tensor) -> Tensor:
        """Of a gradient, seen as a matrix of outputs by all the rest."""
        found = gradient.flatten(1)
        if len(found) > self.size:
            found = self._projection(len(found), 0, found) @ found
        if found.shape[1] > self.size:
            found = found @ self._projection(found.shape[1], 1, found).T
        return found

    def can_mix(self, columns: int) -> bool:
        """Whether mixtures of so many columns are much smaller."""
        return columns >= 4 * self.size

    def mix(self, index: int, columns: Tensor) -> Tensor:
        """Of [units, columns of one] a few mixtures of the columns; those of several readers, by their number, add up."""
        return columns @ self._projection(columns.shape[1], 2 + index, columns).T

    def spread(self, sketch: Tensor) -> float:
        """About how far the squared norm of a sketch is off, relative to that of the gradient: one standard deviation.

        Each side adds the variance ``2 / size``, divided by the number of directions that a gradient has: large in one, it is known
        least well.
        """
        sides = sum(length == self.size for length in sketch.shape)
        products = to_capable(sketch) @ to_capable(sketch).T
        directions = products.square().sum() / products.trace().square()
        return math.sqrt(2 * sides / self.size * float(directions.nan_to_num(nan=0.0)))

    def _projection(self, length: int, side: int, like: Tensor) -> Tensor:
        """The same for all gradients with a side of this length, on all processes."""
        key = length, side, like.device
        if key not in self._signs:
            generator = torch.Generator().manual_seed(2 * (1_000_003 * self._seed + length) + side)
            shape, device = (self.size, length), generator.device
            bits = torch.randint(0, 2, shape, generator=generator, device=device, dtype=torch.int8)
            self._signs[key] = (bits * 2 - 1).to(like.device)
        return self._signs[key].to(like.dtype) / math.sqrt(self.size)


def is_beyond_room(entries: int) -> bool:
    """Whether so many entries in all are too many to be held as they are."""
    return entries > ROOM


def sketcher_for(entries: int, groups: bool) -> Sketcher | None:
    """For sums of so many entries in all, with ``groups`` of batches or without; None where they are held as they are."""
    if not is_beyond_room(entries):
        return None
    return Sketcher(128 if groups else 256)  # of groups there are many, and all have the same error


# ---- The natural merit: a gradient measured by its own noise and by its inputs, so that no scale of activations or
# cotangents counts.
#
# With G the mean gradient of a map (out x in), A the second moment of its input and S that of the cotangent of its
# output, it is ``tr(G^T S^-1 G A^-1)``: how much the loss would fall by one step of natural gradient descent in that
# weight alone. It is taken of the sums themselves, because all numbers of samples cancel.
#
# Gradients that are nothing but noise have a merit too, the number of their entries divided by that of the samples,
# which would favour large weights; so much is taken off.


NATURAL = "natural"
DAMPING = 0.01  # of the mean eigenvalue of a moment, added to all of them
_SMALL = 256  # a moment up to this length costs next to nothing
_PROBES = 64


class Metric:
    """Both moments of one map, ready to divide gradients by. Of sums that have not changed it is made once."""

    def __init__(self, of: Factored) -> None:
        self._of, self._versions = of, _versions(of)
        # The squares on the diagonal are as large as anything beside them.
        diagonals = [part.diagonal(dim1=-2, dim2=-1) for part in (of.inputs, of.outputs)]
        self.finite = all(bool(torch.isfinite(part).all()) for part in diagonals)
        if not self.finite:
            return
        samples, rows, *used = of.counts.tolist()
        self._inputs, inputs = _divisor(of.inputs, used[0], rows)
        self._outputs, outputs = _divisor(of.outputs, used[1], rows)
        self.noise: float = (inputs * outputs).sum().item() / samples

    def fits(self, other: Factored) -> bool:
        """Whether it is the metric of these sums too."""
        same = self._of.inputs is other.inputs and self._of.outputs is other.outputs
        return same and self._versions == _versions(other)

    def merit(self, gradient: Tensor, share: float) -> float:
        """Of the gradient summed over a share of the samples, without what noise is worth."""
        if not self.finite or not bool(torch.isfinite(gradient).all()):
            return math.nan
        divided = _solved(self._inputs, _solved(self._outputs, gradient).mT)
        squared: float = divided.double().square().sum().item()
        return squared / share**2 - self.noise / share


def natural_merit(maps: Iterable[Factored], share: float, metrics: list[Metric]) -> float:
    """The natural merit, summed over maps. ``metrics`` are those that were made before, and are renewed.

    ``share``: of all samples in the moments, those whose gradients are summed here (less than 1 where a group of batches is left out).
    """
    total = 0.0
    for index, each in enumerate(maps):
        if index >= len(metrics):
            metrics.append(Metric(each))
        elif not metrics[index].fits(each):
            metrics[index] = Metric(each)
        total += metrics[index].merit(each.gradient, share)
    return total


def _divisor(moment: Tensor, used: float, rows: float) -> tuple[Tensor, Tensor]:
    """The triangular root of the damped moment, and its degrees of freedom: what pure noise gets of a row, summed over all rows.

    Where only a share of the rows is in the moment, some directions have not been seen. Damping by as much as they may be
    underestimated keeps the others from drowning. A row that is not in the moment gets more than one that is, as the formula for
    leaving one out tells.
    """
    moment = to_capable(moment)
    length, share = moment.shape[-1], used / rows
    size = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    # A moment that is zero belongs to a gradient that is zero: any divisor will do.
    damping = torch.where(size > 0, (DAMPING + (1 - share) * length / used) * size, torch.ones_like(size))
    root = _root(moment, damping)
    freedom = length - damping.double() * _trace_of_inverse(root)
    return root, freedom * (share + (1 - share) / (1 - freedom / used).clamp_min(1e-3))


def _root(moment: Tensor, damping: Tensor) -> Tensor:
    """Of small moments in double precision, where it costs nothing; of others where it is needed."""
    root = moment
    for dtype in (torch.float64,) if moment.shape[-1] <= _SMALL else (moment.dtype, torch.float64):
        damped = moment.to(dtype, copy=True)
        damped.diagonal(dim1=-2, dim2=-1).add_(damping.to(dtype)[:, None])
        root, failed = torch.linalg.cholesky_ex(damped)
        if not failed.any():
            break
    return root


def _trace_of_inverse(root: Tensor) -> Tensor:
    """Exact for small moments; of others from random signs, the same ones every time, to about a thousandth."""
    length = root.shape[-1]
    if length <= _SMALL:
        probes = torch.eye(length, device="cpu")
    else:
        generator = torch.Generator().manual_seed(0)  # its own, so that the global random state is not touched
        probes = torch.randint(0, 2, (length, _PROBES), generator=generator, device=generator.device) * 2.0 - 1
    found = _solved(root, probes.to(root).expand(len(root), -1, -1)).double().square().sum((-2, -1))
    return found if length <= _SMALL else found / _PROBES


def _solved(root: Tensor, given: Tensor) -> Tensor:
    solved: Tensor = torch.linalg.solve_triangular(root, given.to(root), upper=False)
    return solved


def _versions(of: Factored) -> tuple[int, int]:
    return of.inputs._version, of.outputs._version


_STEP_WORK = 300  # for each entry of a matrix at one frequency: some ten steps from two starts, forth and back, in complex numbers
_SELDOM = 5  # most frequencies are ruled out by their bounds, and need no step


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
    gradient = to_capable(gradient.detach())
    if gradient.dtype not in (torch.float32, torch.float64):
        gradient = gradient.float()
    with fit_threads(math.inf if norm in SUMS_OF_SQUARES else operator_work(gradient.shape, geometry) / _SELDOM):
        in_memory = sorted(
            range(gradient.dim()), key=gradient.stride, reverse=True
        )  # aminmax copies what is in another order
        lowest, highest = torch.aminmax(gradient.permute(in_memory))
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


def choose_norm(norm: str, kinds: Iterable[str]) -> str:
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


def _operator(gradient: Tensor, geometry: Geometry) -> float:
    values, grid = taps(gradient, geometry)
    if not geometry.size or geometry.groups == 1:
        return largest_singular_value(values, grid)
    groups = values.chunk(geometry.groups, dim=1)
    # Block diagonal: the largest over the groups. In the order of their bounds, so that most need no second look.
    bounds = peaks(torch.stack([group.flatten(1) for group in groups], 1), grid).tolist()
    best = 0.0
    for bound, group in sorted(zip(bounds, groups, strict=True), key=lambda pair: -pair[0]):
        if bound > best:
            best = largest_singular_value(group, grid, floor=best)
    return best


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
    return values.new_tensor([largest_singular_value(each, grid) for each in maps])


NORMS: dict[str, Callable[[Tensor, Geometry], float]] = {
    "frobenius": lambda gradient, geometry: gradient.square().sum().item(),
    "mean_square": lambda gradient, geometry: gradient.square().mean().item(),
    "operator": _operator,
    "operator_l2": lambda gradient, geometry: _output_norms(gradient, geometry).sum().item(),
    "operator_l1": lambda gradient, geometry: _output_norms(gradient, geometry).sqrt().sum().square().item(),
}
