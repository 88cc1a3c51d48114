"""From the sums that were caught to merits: exact over all the data, or from a sample without the share of the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sensli.errors import MeasurementError
from sensli.merits.caught import SiteCatch, WeightCatch
from sensli.merits.confidence import Estimate, estimate
from sensli.merits.merits import Merit, Merits
from sensli.merits.natural import NATURAL
from sensli.moves.sites import Site


def share_remaining(count: int, known: int | None) -> float:
    """The share of the data that was not seen; without a known end there is always more."""
    return 1.0 if not known else max(0.0, 1 - count / known)


def estimate_of(caught: SiteCatch | WeightCatch, norm: str, sizes: Sequence[float], remaining: float) -> Estimate:
    total = sum(sizes)
    return estimate(
        lambda without: caught.merit(norm, total - (0 if without is None else sizes[without]), without, total),
        sizes,
        remaining,
    )


def value_of(caught: SiteCatch | WeightCatch, norm: str, sizes: Sequence[float], remaining: float) -> float:
    """Exact where nothing remains, else without the share of the noise; never below zero, where less than the noise is left of it."""
    if remaining == 0:
        merit = caught.merit(norm, sum(sizes))
        return merit if math.isnan(merit) else max(0.0, merit)
    return max(0.0, estimate_of(caught, norm, sizes, remaining).value)


def mean_of_weights(
    weights: Sequence[WeightCatch], norm: str, sizes: Sequence[float], remaining: float
) -> float | None:
    """The mean over the existing weights of the squared norm of their gradient: the denominator of the threshold."""
    weights = compared(weights, norm)
    if not weights:
        return None
    halves = [sum(sizes[0::2]), sum(sizes[1::2])]
    parts = halves if halves[1] else sizes
    return sum(value_of(weight, norm, parts, remaining) for weight in weights) / len(weights)


def compared(weights: Sequence[WeightCatch], norm: str) -> list[WeightCatch]:
    """The existing weights that merits in this norm are compared with."""
    return [weight for weight in weights if norm != NATURAL or weight.factored]


def as_merits(
    sites: Sequence[Site],
    caught: Sequence[SiteCatch],
    values: Sequence[float],
    mean: float | None,
    weights: int,
    **facts: Any,
) -> Merits:
    """``mean``: over so many existing weights; None if there are none."""
    if mean is not None and not math.isfinite(mean):
        raise MeasurementError(
            f"the mean over the existing weights is {mean}: one of their gradients is not finite although the loss is. "
            "Lower the learning rate, clip gradients, or measure with ratio=False."
        )
    records = []
    for site, its, value in zip(sites, caught, values, strict=True):
        quotient = None if mean is None else (value / mean if mean > 0 else math.inf)
        share = None if quotient is None else quotient / weights
        records.append(Merit(its.settled(site), value, quotient, its.dead, share))
    return Merits(records, **facts).check()
