"""`Diminishing`: look when training on brings little for its FLOPs, compared with what it has brought since the last growth."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from sensli.growing.trigger import Moment, Trigger
from sensli.modules import checks

_MODES = {"min": 1.0, "max": -1.0}


class Diminishing(Trigger):
    """Fires when the metric improves per FLOP by less than a share of its mean since the last growth: ``Diminishing(0.25)``.

    The rate of now is the median of the slopes between all pairs of the last calls, so that single values count for little. Each
    call is taken to train on as many samples; the FLOPs of a call are those of the model as it is. Where a `Trial` decides, each
    time in a row that the model without a growth wins doubles the number of calls until the next look.

    Args:
        share: The share of the mean rate below which it fires (default: 0.25).
        window: The number of calls that the rate of now is taken from, and the least number of calls between two looks
            (default: 5).
        mode: Whether a smaller metric is better (``"min"``) or a larger one (``"max"``) (default: "min").
    """

    def __init__(self, share: float = 0.25, *, window: int = 5, mode: str = "min") -> None:
        self.share = checks.share("share", share, 0.25)
        self.window = checks.whole("window", window, 5, least=2)
        self.mode = checks.one_of("mode", mode, _MODES)
        self._spent = 0.0  # FLOPs since the last growth, of one sample
        self._first: list[float] | None = None  # FLOPs and value with which that time began
        self._recent: list[list[float]] = []  # those of the last calls
        self._waited = 0  # calls since the last look
        self._declined = 0  # times in a row that the model without a growth has won

    @property
    def needs_metric(self) -> bool:
        return True

    def fires(self, moment: Moment) -> bool:
        if moment.metric is None:
            raise ValueError("Diminishing needs a metric: call grower.step(batches, loss_fn, metric=validation_loss).")
        self._spent += moment.sizes["flops"]
        self._waited += 1
        value = _MODES[self.mode] * moment.metric
        if math.isfinite(value):
            point = [self._spent, value]
            if self._first is None:
                self._first = point
            else:
                self._recent = [*self._recent, point][-self.window :]
        return self._waited >= self.window * 2**self._declined and self._flat

    @property
    def _flat(self) -> bool:
        """Whether the rate of the last calls is a small share of the mean rate."""
        if self._first is None or len(self._recent) < self.window:
            return False
        now = -statistics.median(_slope(*pair) for pair in itertools.combinations(self._recent, 2))
        middle = [statistics.median(column) for column in zip(*self._recent, strict=True)]
        return now <= self.share * max(0.0, -_slope(self._first, middle))

    def looked(self) -> None:
        self._waited = 0

    def grown(self) -> None:
        # The function is the same, so the time after a growth begins where the time before it ended.
        self._first = self._recent[-1] if self._recent else self._first
        self._recent, self._waited, self._declined = [], 0, 0

    def judged(self, grew: bool) -> None:
        self._declined = 0 if grew else min(self._declined + 1, 63)  # no training is longer

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != set(_STATE) or not all(fine(state[name]) for name, fine in _STATE.items()):
            raise ValueError(f"{self!r} needs FLOPs, pairs of FLOPs and values, and two counts, got {state!r}.")
        for name in _STATE:
            setattr(self, f"_{name}", state[name])

    def __repr__(self) -> str:
        return f"Diminishing({self.share:g}, window={self.window}, mode={self.mode!r})"


def _slope(one: list[float], other: list[float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else 0.0


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _point(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_number, value))


_STATE: dict[str, Callable[[Any], bool]] = {  # what is saved, and what it must look like
    "spent": _number,
    "first": lambda value: value is None or _point(value),
    "recent": lambda value: isinstance(value, list) and all(map(_point, value)),
    "waited": lambda value: type(value) is int and value >= 0,
    "declined": lambda value: type(value) is int and 0 <= value < 64,
}
