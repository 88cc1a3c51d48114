"""The front: the lower envelope of the fixed networks' loss over FLOPs; and how far a growing run is from it.

`front ratio` at a loss = FLOPs that the growing run needs to reach it / FLOPs that the best fixed network needs. Below 1 the growing run
was there first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = 40
BEGIN = 0.05  # share of the FLOPs that count as the least: before it, curves fall through the first losses


@dataclass(frozen=True)
class Curve:
    """A loss over FLOPs, from left to right; between two points it is a straight line."""

    flops: tuple[float, ...]
    losses: tuple[float, ...]

    def reached(self, level: float) -> float:
        """FLOPs after which the loss was first at or below the level; infinite if it never was."""
        before: tuple[float, float] | None = None
        for flops, loss in zip(self.flops, self.losses, strict=True):
            if loss <= level:
                if before is None or not math.isfinite(before[1]):
                    return flops
                return before[0] + (flops - before[0]) * (before[1] - level) / (before[1] - loss)
            before = (flops, loss)
        return math.inf

    @property
    def lowest(self) -> float:
        return min((loss for loss in self.losses if math.isfinite(loss)), default=math.inf)

    def best_by(self, flops: float) -> float:
        """The lowest loss up to so many FLOPs."""
        best, before = math.inf, None
        for here, loss in zip(self.flops, self.losses, strict=True):
            if here > flops:
                if before is not None and math.isfinite(loss):
                    share = (flops - before[0]) / (here - before[0])
                    best = min(best, before[1] + share * (loss - before[1]))
                break
            best, before = min(best, loss) if math.isfinite(loss) else best, (here, loss)
        return best


@dataclass(frozen=True)
class Ratios:
    """The front ratio at the lowest loss that both reached, the largest one on the way there, and the geometric mean of all levels."""

    end: float
    worst: float
    mean: float


def front_at(fixed: Sequence[Curve], flops: float) -> float:
    """The lowest loss that any of the fixed networks had by then."""
    return min(curve.best_by(flops) for curve in fixed)


def front_ratios(grown: Curve, fixed: Sequence[Curve]) -> Ratios:
    """The front ratio over the range of losses that both reached, at levels equally spaced in the logarithm of the loss."""
    total = max(curve.flops[-1] for curve in fixed)
    last = max(grown.lowest, min(curve.lowest for curve in fixed))
    levels = _levels(max(front_at(fixed, BEGIN * total), last), last)
    least = BEGIN * total
    ratios = [
        max(grown.reached(level), least) / max(min(curve.reached(level) for curve in fixed), least) for level in levels
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return Ratios(ratios[-1], max(ratios), mean)


def _levels(first: float, last: float) -> list[float]:
    if first == last:
        return [last]
    low, high = math.log(max(last, 1e-12)), math.log(max(first, 1e-12))
    inner = [math.exp(high + (low - high) * step / (LEVELS - 1)) for step in range(LEVELS - 1)]
    return [*inner, last]  # exactly: a rounded level may lie below what was reached
