"""The curve of a loss over training as a law, c + B t^-b: what training can still win, from the values so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_POWERS = [0.1 * tenths for tenths in range(1, 16)]  # of b
_EARLY = 0.1  # the share of the time that is left out at the beginning, where no law holds
_LAW = 3e-4  # no law holds better
_FAR = 4.4  # times the median deviation, three of the standard one: beyond it a value counts as one that is so far off


class LearningCurve:
    """Values over time, kept in a bounded number of means of neighbors; from what `points` and `width` were, if there were any."""

    MOST = 64

    def __init__(self, points: Sequence[Sequence[float]] = (), width: int = 1) -> None:
        self.points = [list(point) for point in points]  # the sums of times and of values, and how many there are
        self.width = width  # how many values make a point

    def add(self, time: float, value: float) -> None:
        """Take one more value, at a later time."""
        if self.points and self.points[-1][2] < self.width:
            self.points[-1] = [total + new for total, new in zip(self.points[-1], (time, value, 1), strict=True)]
            return
        if len(self.points) == self.MOST:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [[one + other for one, other in zip(*pair, strict=True)] for pair in pairs]
            self.width *= 2
        self.points.append([time, value, 1])

    @property
    def count(self) -> int:
        """How many values there are."""
        return int(sum(count for _, _, count in self.points))

    @property
    def level(self) -> float | None:
        """The median of the last three points, or of those that there are."""
        last = sorted(values / count for _, values, count in self.points[-3:])
        return last[len(last) // 2] if last else None

    def saturation(self, now: float, share: float, begun: float) -> float:
        """How likely it is that what training can still win is less than this share of what remains in the end.

        Every power b, with every beginning of the time, gives the best c and B, both at least 0; how well they fit says how likely they
        are. A curve that rises has a likelihood of 0.

        Args:
            now: The time at which the question is asked.
            share: Of c.
            begun: How long before time 0 the training had begun.
        """
        times, values, counts = torch.tensor(self.points, dtype=torch.float64, device="cpu").unbind(1)
        times, values = times / counts, values / counts
        late = times >= _EARLY * now
        times, values, counts = times[late], values[late], counts[late]
        if len(values) < 4 or not values.max() > 0:
            return 0.0
        values, weights = values / values.max(), counts / counts.sum()
        # A single value far above would bend every fit: none is larger than all of the three before it. If it is the last, wait.
        before = torch.stack([values[:-3], values[1:-2], values[2:-1]]).amax(0)
        if values[-1] > before[-1]:
            return 0.0
        values[3:] = values[3:].minimum(before)
        # The law may have begun before the first value: a network that was trained before, or has grown from one.
        begins = sorted({0.0, 0.5, now / 8, now / 4, begun / 4, begun / 2, begun})
        powers = torch.tensor([(b, earlier) for b in _POWERS for earlier in begins], dtype=torch.float64, device="cpu")
        power, earlier = powers.unsqueeze(2).unbind(1)
        shapes = ((times + earlier) / (now + earlier)) ** -power  # 1 now, so that B is what can still be won
        for _ in range(3):  # what is still far off is moved to the edge of the noise around the best fit
            ends, gains = _fits(shapes, values, weights)
            misses = values - ends - gains * shapes
            best = misses[(weights * misses**2).sum(1).argmin()]
            noise = _FAR * best.abs().median()
            values = values - best + best.clamp(-noise, noise)
        if _rises(times, values, weights):
            return 0.0
        ends, gains = _fits(shapes, values, weights)
        error = (weights * (values - ends - gains * shapes) ** 2).sum(1) + _LAW**2
        likelihood = torch.softmax(-0.5 * len(values) * error.log(), 0)
        return float(likelihood[(gains < share * ends).squeeze(1)].sum())


def _fits(shapes: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best c and B of each shape, both at least 0."""
    middle, mean = (weights * shapes).sum(1, keepdim=True), (weights * values).sum()
    spread = (weights * (shapes - middle) ** 2).sum(1, keepdim=True)
    gains = ((weights * (shapes - middle) * (values - mean)).sum(1, keepdim=True) / spread).clamp(min=0)
    ends = mean - gains * middle
    alone = (weights * shapes * values).sum(1, keepdim=True) / (weights * shapes**2).sum(1, keepdim=True)
    return ends.clamp(min=0), torch.where(ends < 0, alone, gains)


def _rises(times: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether the values rise by more than their noise explains: two errors of the slope."""
    times, values = times - (weights * times).sum(), values - (weights * values).sum()
    both, own, all_ = ((weights * product).sum() for product in (times * values, times**2, values**2))
    explained = both**2 / own
    return bool(both > 0 and explained > 1e-18 and explained * (len(values) - 2) > 4 * (all_ - explained))
