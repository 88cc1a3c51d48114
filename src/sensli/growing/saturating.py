"""`Saturating`: the curve of a loss over training as a law, c + B t^-b, and the trigger that asks what training can still win."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from sensli.growing.triggers import (
    SavedForm,
    Trigger,
    TriggerContext,
    is_count,
    is_doublings,
    is_finite_number,
    is_form,
    is_point,
)
from sensli.modules import checks

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


# ---- The trigger that asks it: look when little is left to win for a network of this size.


class Saturating(Trigger):
    """Fires when the network has nearly learnt what it can: ``Saturating(0.25)``.

    The loss of a network of one size falls as c + B t^-b, with t the calls of training. The law is fitted to the metrics since the
    last growth. It fires when what training can still win, B t^-b, is probably less than a share of c, which remains in the end.
    Then a larger network, which would end some percent of c lower, falls faster per FLOP from the same loss.

    A loss that goes to zero, and a metric that rises, never fire it. After a growth, values count once the metric is back where it
    was, and it waits for ``apart`` times as many calls as there were before: the best size doubles when the compute quadruples or so.
    Each look in a row without a growth doubles the number of calls until the next. Each call is taken to train on as many samples, at
    about the same learning rate.

    Args:
        share: The share of c (default: 0.25).
        calls: The least number of calls with a metric that a fit needs, and the least number of calls between two looks (default: 8).
        apart: After a growth it waits for this many times the calls before it (default: 2.0).
        steps: The least number of steps of the optimizer. Early in a training a loss may rest for a while and then fall on, which
            nothing in its curve foretells (default: 0).
    """

    def __init__(self, share: float = 0.25, *, calls: int = 8, apart: float = 2.0, steps: int = 0) -> None:
        self.share = checks.share("share", share, 0.25)
        self.calls = checks.whole("calls", calls, 8, least=5)
        self.apart = checks.at_least("apart", apart, 0, 2.0)
        self.steps = checks.whole("steps", steps, 1000, least=0)
        self._begun = 0  # calls before the last growth
        self._time = 0  # calls since then
        self._curve = LearningCurve()
        self._level: float | None = None  # to which the metric must come back after a growth
        self._waited = 0  # calls since the last look
        self._vain = 0  # looks in a row without a growth

    @property
    def needs_metric(self) -> bool:
        return True

    def fires(self, context: TriggerContext) -> bool:
        if context.metric is None:
            raise ValueError("Saturating needs a metric: call grower.step(loader, loss_fn, metric=loss).")
        self._time += 1
        self._waited += 1
        now = self._time - 0.5  # a mean over the call
        if context.metric < 0:
            warnings.warn(
                "Saturating needs a loss whose least value is 0, and the metric is negative: it does not fire. Use Diminishing instead.",
                stacklevel=2,
            )
            return False
        if context.metric < 1e300:  # a number, and one whose sums are numbers
            if self._level is not None and context.metric <= self._level:
                self._level = None
            if self._level is None:
                self._curve.add(now, context.metric)
        waits = self._waited < self.calls * (1 << max(self._vain - 1, 0)) or self._time < self.apart * self._begun
        waits = waits or (context.steps is not None and context.steps < self.steps)
        if self._curve.count < self.calls or waits:
            return False
        return self._curve.saturation(now, self.share, self._begun) >= _LIKELY

    def looked(self) -> None:
        self._waited, self._vain = 0, min(self._vain + 1, 63)  # no training is longer

    def grown(self) -> None:
        self._level = self._curve.level if self._level is None else self._level
        self._begun, self._time, self._curve = self._begun + self._time, 0, LearningCurve()
        self._waited = self._vain = 0

    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, f"_{name}") for name in _SATURATING if name not in ("points", "width")}
        return own | {"points": [list(point) for point in self._curve.points], "width": self._curve.width}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not is_form(state, _SATURATING):
            raise ValueError(f"{self!r} needs counts, a level, and sums of times and values, got {state!r}.")
        self._curve = LearningCurve(state["points"], state["width"])
        for name in set(_SATURATING) - {"points", "width"}:
            setattr(self, f"_{name}", state[name])

    def __repr__(self) -> str:
        steps = f", steps={self.steps}" if self.steps else ""
        return f"Saturating({self.share:g}, calls={self.calls}, apart={self.apart:g}{steps})"


_LIKELY = 2 / 3  # at least twice as likely as not
_SATURATING: SavedForm = {
    "begun": is_count,
    "time": is_count,
    "level": lambda value: value is None or (is_finite_number(value) and value >= 0),
    "waited": is_count,
    "vain": is_doublings,
    "points": lambda value: (
        isinstance(value, list)
        and len(value) <= LearningCurve.MOST
        and all(is_point(point, 3) and min(point) >= 0 and point[2] >= 1 for point in value)
    ),
    "width": lambda value: is_count(value, 1),
}
