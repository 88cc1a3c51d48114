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

from sensli.moves.factors import Factored

NATURAL = "natural"
DAMPING = 0.01  # of the mean eigenvalue of a moment, added to all of them


class Metric:
    """Both moments of one map, ready to divide gradients by. Of sums that have not changed it is made once."""

    def __init__(self, of: Factored) -> None:
        self._of, self._versions = of, _versions(of)
        samples, rows, *used = of.counts.tolist()
        inverses, self.noise = [], 1.0 / max(samples, 1.0)
        self.finite = all(bool(torch.isfinite(part).all()) for part in (of.inputs, of.outputs))
        if not self.finite:
            return
        shares = torch.ones(len(of.inputs), dtype=torch.float64, device=of.inputs.device)
        for moment, taken in ((of.inputs, used[0]), (of.outputs, used[1])):
            inverse, freedom = _divided(moment, taken / max(rows, 1.0), taken)
            inverses.append(inverse)
            shares = shares * freedom
        self.noise *= shares.sum().item()
        self._inputs, self._outputs = inverses

    def fits(self, other: Factored) -> bool:
        """Whether it is the metric of these sums too."""
        return (self._of.inputs is other.inputs and self._of.outputs is other.outputs) and self._versions == _versions(
            other
        )

    def squared(self, gradient: Tensor) -> float:
        """The squared norm of a summed gradient."""
        if not self.finite or not bool(torch.isfinite(gradient).all()):
            return math.nan
        whitened = self._outputs @ gradient.to(self._outputs.dtype) @ self._inputs.mT
        return whitened.square().sum().item()


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
        metric = metrics[index]
        total += metric.squared(each.gradient) / share**2 - metric.noise / share
    return total


def _divided(moment: Tensor, share: float, used: float) -> tuple[Tensor, Tensor]:
    """W with W^T W the inverse of the damped moment, and its degrees of freedom: what pure noise gets of each row, summed over rows.

    Where only a share of the rows is in the moment, some directions have not been seen: damping them by as much as they may be
    underestimated keeps the others from drowning. A row that is not in the moment gets more than one that is, as the formula for
    leaving one out tells.
    """
    wide = moment.double() if moment.device.type in ("cpu", "cuda") else moment.cpu().double()
    length = wide.shape[-1]
    size = wide.diagonal(dim1=-2, dim2=-1).mean(-1)
    damping = (DAMPING + (1 - share) * length / max(used, 1.0)) * size
    eye = torch.eye(length, dtype=wide.dtype, device=wide.device)
    # A moment that is zero belongs to a gradient that is zero: any metric will do.
    damped = wide + torch.where(size > 0, damping, torch.ones_like(size))[:, None, None] * eye
    inverse = torch.linalg.solve_triangular(torch.linalg.cholesky(damped), eye, upper=False)
    freedom = length - torch.where(size > 0, damping, torch.ones_like(size)) * inverse.square().sum((-2, -1))
    return inverse, freedom * (share + (1 - share) / (1 - freedom / max(used, 1.0)).clamp_min(1e-3))


def _versions(of: Factored) -> tuple[int, int]:
    return of.inputs._version, of.outputs._version
