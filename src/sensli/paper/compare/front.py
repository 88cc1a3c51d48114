"""The front: the lower envelope of the fixed networks' loss over FLOPs; and how far a run is from it.

`front ratio` at a loss = FLOPs that the run needs to reach it / FLOPs that the best fixed network needs. Below 1 the run was there first.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

LEVELS = 40
BEGIN = 0.05  # share of the FLOPs that count as the least: before it, curves fall through the first losses


@dataclass(frozen=True)
class Curve:
    """A loss over FLOPs, from left to right; between two points it is a straight line."""

    flops: tuple[float, ...]
    losses: tuple[float, ...]

    def reached(self, level: float) -> float:
        """FLOPs after which the loss was first at or below the level; infinite if it never was."""
        place = bisect_left(self._gained, -level)
        if place == len(self.flops):
            return math.inf
        if place == 0 or not math.isfinite(self.losses[place - 1]):
            return self.flops[place]
        (here, there), (before, after) = self.flops[place - 1 : place + 1], self.losses[place - 1 : place + 1]
        return here + (there - here) * (before - level) / (before - after)

    @cached_property
    def _gained(self) -> list[float]:
        """The lowest loss so far, negative: it rises from left to right."""
        finite = (loss if math.isfinite(loss) else math.inf for loss in self.losses)
        return [-loss for loss in itertools.accumulate(finite, min)]

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
    """The front ratio at each level, from the first losses that count to the lowest one that both reached."""

    levels: tuple[float, ...]

    @property
    def end(self) -> float:
        return self.levels[-1]

    @property
    def worst(self) -> float:
        return max(self.levels)

    @property
    def mean(self) -> float:
        """The geometric mean of all levels."""
        return math.exp(sum(map(math.log, self.levels)) / len(self.levels))


def front_at(fixed: Sequence[Curve], flops: float) -> float:
    """The lowest loss that any of the fixed networks had by then."""
    return min(curve.best_by(flops) for curve in fixed)


def front_ratios(run: Curve, fixed: Sequence[Curve]) -> Ratios:
    """The front ratio over the range of losses that both reached, at levels equally spaced in the logarithm of the loss."""
    total = max(curve.flops[-1] for curve in fixed)
    last = max(run.lowest, min(curve.lowest for curve in fixed))
    levels = _levels(max(front_at(fixed, BEGIN * total), last), last)
    least = BEGIN * total
    return Ratios(
        tuple(max(run.reached(one), least) / max(min(curve.reached(one) for curve in fixed), least) for one in levels)
    )


def _levels(first: float, last: float) -> list[float]:
    if first == last:
        return [last] * LEVELS
    low, high = math.log(max(last, 1e-12)), math.log(max(first, 1e-12))
    inner = [math.exp(high + (low - high) * step / (LEVELS - 1)) for step in range(LEVELS - 1)]
    return [*inner, last]  # exactly: a rounded level may lie below what was reached
