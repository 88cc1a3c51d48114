"""When is the best site clear? Estimates from a sample of batches that noise does not bias, and a test for repeated looks.

The squared norm of a sampled mean gradient is too large by the variance of the mean, so it favours noisy sites. The jackknife
over groups of batches takes that away: with the merit ``m`` of all groups and ``m_j`` without group j, the pseudo-values
``g m - (g - 1) m_j`` have a mean that is free of the bias (exactly for squared Frobenius norms, to first order for the others) and a
spread that tells its uncertainty. Sites are compared on the same groups, so what they have in common cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

GROUPS = 16  # batches beyond that many are added to existing groups, which bounds the memory


def next_look(batches: int) -> int:
    """After how many batches to look again: 4, 6, 8, 12, 16, 24, 32, ... so that looks stay few and cost little."""
    if batches < 4:
        return 4
    power = 1 << (batches.bit_length() - 1)
    return power * 3 // 2 if batches < power * 3 // 2 else power * 2


def pseudo_values(merit: Callable[[int | None], float], sizes: Sequence[float]) -> list[float]:
    """Jackknife pseudo-values from ``merit(without)``: the merit of the mean gradient without one group, or of all (None)."""
    total, groups = sum(sizes), len(sizes)
    whole = merit(None)
    values = []
    for j, size in enumerate(sizes):
        # weighted: a group that holds more samples moves the mean by more (equals g m - (g - 1) m_j for equal groups)
        share = total / size
        values.append((share * whole - (share - 1) * merit(j)) * size * groups / total)
    return values


def mean_and_error(values: Sequence[float], remaining: float = 1.0) -> tuple[float, float]:
    """The mean and its standard error; ``remaining`` is the share of the data not seen yet (nothing remains, no error)."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, math.sqrt(variance / n * remaining)


def is_clear(pseudo: Sequence[Sequence[float]], *, look: int, confidence: float, remaining: float) -> bool:
    """Whether the site with the largest estimate beats every other one, at a level that allows for all looks and all rivals.

    The k-th look may err with probability ``(1 - confidence) / (k (k + 1))``; these add up to ``1 - confidence``.
    """
    estimates = [sum(values) / len(values) for values in pseudo]
    best = max(range(len(estimates)), key=estimates.__getitem__)
    allowed = (1 - confidence) / (look * (look + 1)) / max(len(pseudo) - 1, 1)
    for rival in range(len(pseudo)):
        if rival == best:
            continue
        mean, error = mean_and_error([a - b for a, b in zip(pseudo[best], pseudo[rival], strict=True)], remaining)
        if mean <= 0 or (error > 0 and student_tail(mean / error, len(pseudo[best]) - 1) > allowed):
            return False
    return estimates[best] > 0


def student_tail(t: float, freedom: int) -> float:
    """The probability that Student's t with a whole number of degrees of freedom exceeds ``t`` >= 0, by its finite series."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if freedom % 2:
        term, series = cosine, 0.0
        for k in range(1, freedom, 2):
            series += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        inside = 2 / math.pi * (angle + sine * series)
    else:
        term, series = 1.0, 0.0
        for k in range(0, freedom, 2):
            series += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        inside = sine * series
    return max((1 - inside) / 2, 0.0)
