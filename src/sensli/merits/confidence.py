"""When is the best site clear? Estimates from a sample of batches that noise does not bias, and a test for repeated looks.

The squared norm of a sampled mean gradient is too large by the variance of the mean, so it favours noisy sites. What happens
without one group of batches tells how large that share is (the jackknife: exact for squared Frobenius norms, to first order for
the others), and how uncertain the rest is. Two sites are compared by the logarithm of their quotient, on the same groups: a
batch with a large loss raises all merits together, and what they have in common cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sensli.merits.sums import Catches, WeightCatch

GROUPS = 16  # batches beyond that many are added to existing groups, which bounds the memory


def next_look(batches: int) -> int:
    """After how many batches to look again: 4, 6, 8, 12, 16, 24, 32, ... so that looks stay few and cost little."""
    if batches < 4:
        return 4
    power = 1 << (batches.bit_length() - 1)
    return power * 3 // 2 if batches < power * 3 // 2 else power * 2


@dataclass(frozen=True)
class Estimate:
    """A merit without the share of the noise: from all groups, and without each one of them."""

    value: float
    without: tuple[float, ...]
    spread: float = 0.0  # how far both may be off together, as a share: what was summed are sketches

    @property
    def steady(self) -> bool:
        """Whether no single group makes more than half of it, so that its logarithm is as good as linear."""
        return self.value > 0 and min(self.without) > self.value / 2 and max(self.without) < 2 * self.value


def estimate(merit: Callable[[int | None], float], sizes: Sequence[float], remaining: float = 1.0) -> Estimate:
    """From ``merit(without)``, the merit of the mean gradient without one group, or of all (None).

    Noise adds ``b / size`` to the merit of a mean over that size, so leaving groups out raises it by a known multiple of b. Of that
    share only the part belongs to the sample that the rest of the data would still average out: ``remaining``, the share not seen yet.
    """
    total, whole = sum(sizes), merit(None)
    if len(sizes) < 2:
        return Estimate(whole, (whole,) * len(sizes))
    left = [merit(j) for j in range(len(sizes))]
    noise = remaining * sum((total - size) * (one - whole) for size, one in zip(sizes, left, strict=True))
    return Estimate(
        whole - noise / total, tuple(one - noise / (total - size) for size, one in zip(sizes, left, strict=True))
    )


def pseudo_values(whole: float, without: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """The jackknife's pseudo-values of a quantity, whose mean and spread are its own: ``g w - (g - 1) w_j`` for equal groups."""
    total, groups = sum(sizes), len(sizes)
    # weighted: a group that holds more samples moves the mean by more
    return [(total * whole - (total - size) * one) * groups / total for size, one in zip(sizes, without, strict=True)]


def mean_and_error(values: Sequence[float], remaining: float = 1.0) -> tuple[float, float]:
    """The mean and its standard error; ``remaining`` is the share of the data not seen yet (nothing remains, no error)."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, math.sqrt(variance / n * remaining)


def is_clear(
    sites: Sequence[Estimate],
    sizes: Sequence[float],
    *,
    look: int,
    confidence: float,
    remaining: float = 1.0,
    tolerance: float = 0.0,
) -> bool:
    """Whether the site with the largest estimate beats every other one, at a level that allows for all looks and all rivals.

    With a tolerance it need not beat them, but have at least ``1 - tolerance`` times their merit. The k-th look may err with
    probability ``(1 - confidence) / (k (k + 1))``; these add up to ``1 - confidence``.
    """
    best = max(sites, key=lambda site: site.value)
    allowed = (1 - confidence) / (look * (look + 1)) / max(len(sites) - 1, 1)
    for rival in sites:
        if rival is best:
            continue
        mean, error = mean_and_error(_lead(best, rival, sizes, tolerance), remaining)
        scales = (1.0, 1.0) if best.steady and rival.steady else (best.value, rival.value)
        error = math.hypot(error, scales[0] * best.spread, scales[1] * rival.spread)
        if mean <= 0 or (error > 0 and student_tail(mean / error, len(sizes) - 1) > allowed):
            return False
    return best.value > 0


def _lead(best: Estimate, rival: Estimate, sizes: Sequence[float], tolerance: float) -> list[float]:
    """Pseudo-values of how far the best is ahead: as a logarithm where both are steady, else as a difference."""
    if best.steady and rival.steady:
        whole = math.log(best.value / rival.value)
        without = [math.log(a / b) for a, b in zip(best.without, rival.without, strict=True)]
        return [value - math.log1p(-tolerance) for value in pseudo_values(whole, without, sizes)]
    share = 1 - tolerance
    differences = [a - share * b for a, b in zip(best.without, rival.without, strict=True)]
    return pseudo_values(best.value - share * rival.value, differences, sizes)


def student_tail(t: float, freedom: int) -> float:
    """The probability that Student's t with a whole number of degrees of freedom exceeds ``t`` >= 0, by its finite series."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, series = cosine if odd else 1.0, 0.0
    for k in range(odd, freedom, 2):
        series += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    inside = 2 / math.pi * (angle + sine * series) if odd else sine * series
    return max((1 - inside) / 2, 0.0)


# ---- From the sums that were caught to merits: exact over all the data, or from a sample without the share of the noise.


def estimate_of(caught: Catches, norm: str, sizes: Sequence[float], remaining: float) -> Estimate:
    total = sum(sizes)
    found = estimate(
        lambda without: caught.merit(norm, total - (0 if without is None else sizes[without]), without, total),
        sizes,
        remaining,
    )
    return replace(found, spread=caught.spread)


def value_of(caught: Catches, norm: str, sizes: Sequence[float], remaining: float) -> float:
    """Exact where nothing remains, else without the share of the noise; never below zero, where less than the noise is left of it."""
    if remaining == 0:
        merit = caught.merit(norm, sum(sizes))
        return merit if math.isnan(merit) else max(0.0, merit)
    return max(0.0, estimate_of(caught, norm, sizes, remaining).value)


def mean_of_weights(
    weights: Sequence[WeightCatch], norm: str, sizes: Sequence[float], remaining: float
) -> float | None:
    """The mean over the existing weights of the squared norm of their gradient: the denominator of the threshold."""
    if not weights:
        return None
    halves = [sum(sizes[0::2]), sum(sizes[1::2])]
    parts = halves if halves[1] else sizes
    return sum(value_of(weight, norm, parts, remaining) for weight in weights) / len(weights)
