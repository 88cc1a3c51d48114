"""What ``norm="auto"`` may cost: norms that would take longer than the passes themselves give way to one that costs nothing.

Work is counted from shapes, never timed, so that every run and every rank decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sensli.merits.caught import SiteCatch, WeightCatch
from sensli.merits.norms import operator_work

_FREE = 2**28  # operations, less than a tenth of a second: not worth another norm
# With groups of batches: norms of all sites for every batch, over the looks after 4, 6, 8, 12 and 16 batches.
_SETS = 51 / 16


def affordable(
    asked: str,
    norm: str,
    sites: Sequence[SiteCatch],
    weights: Sequence[WeightCatch],
    batches: float,
    *,
    groups: bool = False,
) -> str:
    """The norm to take: the one that was chosen, or Frobenius where "auto" was asked for and operator norms cost more than the passes.

    ``batches``: how many this process has passed through the model; ``groups``: whether norms are taken without each group of them too.
    """
    if asked != "auto" or norm != "operator":
        return norm
    costs = _norms(sites) * (_SETS * batches if groups else 1) + _norms(weights)
    return norm if costs <= max(_FREE, batches * _pass(sites, weights)) else "frobenius"


def _norms(parts: Iterable[SiteCatch | WeightCatch]) -> float:
    work = 0.0
    for part in parts:
        for total, geometry in part.parts():
            work += operator_work(tuple(total.shape), geometry)
    return work


def _pass(sites: Sequence[SiteCatch], weights: Sequence[WeightCatch]) -> float:
    """Products of one batch: a site's gradient; for a weight the forward pass, and both gradients of the backward pass."""
    samples = sites[0].shape[0] if sites else 0
    work = sum(math.prod(site.shape[2:]) * _entries(site) for site in sites)
    work += sum(3 * math.prod(weight.shape) * _entries(weight) for weight in weights)
    return float(samples * work)


def _entries(part: SiteCatch | WeightCatch) -> int:
    return sum(total.numel() for total, _ in part.parts())
