"""The natural merit: a gradient measured by its own noise and by its inputs, so that no scale of activations or cotangents counts.

With G the mean gradient of a map (out x in), A the second moment of its input and S that of the cotangent of its output, it is
``tr(G^T S^-1 G A^-1)``: how much the loss would fall by one step of natural gradient descent in that weight alone. It is taken of the sums
themselves, because all numbers of samples cancel.

Gradients that are nothing but noise have a merit too, the number of their entries divided by that of the samples, which would favour
large weights; so much is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from sensli.modules.running import capable
from sensli.moves.factors import Factored

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
    moment = capable(moment)
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
