"""Means over runs with confidence intervals, paired differences, and what they say about a claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sensli.merits.confidence import student_tail

CONFIRMED = "confirmed"
NOT_CONFIRMED = "not confirmed"
OPPOSITE = "opposite"
AWAITING = "awaiting"


@lru_cache
def t_quantile(degrees: int) -> float:
    """The 97.5 % point of Student's t: where its tail is 0.025, found by halving."""
    if degrees < 1:
        return math.inf
    low, high = 1.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > 0.025 else (low, middle)
    return high


@dataclass(frozen=True)
class Interval:
    """A mean over runs with its 95 % confidence interval; one run has no interval."""

    mean: float
    half: float
    runs: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        if self.runs < 2:
            return f"{format_number(self.mean)} (one run)"
        return f"{format_number(self.mean)} [{format_number(self.low)}, {format_number(self.high)}]"


@dataclass(frozen=True)
class Paired:
    """First minus second, run by run."""

    first: float  # mean of each side
    second: float
    difference: Interval
    wins: int  # runs in which the first is smaller

    def verdict(self) -> str:
        """The claim is always that the first is smaller: loss, error, or cost."""
        if self.difference.runs < 2:
            return NOT_CONFIRMED
        if self.difference.high < 0:
            return CONFIRMED
        return OPPOSITE if self.difference.low > 0 else NOT_CONFIRMED


def interval(values: Tensor | Sequence[float]) -> Interval:
    """Mean and 95 % interval over the runs; a run that diverged (nan) makes the mean nan."""
    values = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    runs = len(values)
    half = math.inf if runs < 2 else t_quantile(runs - 1) * values.std().item() / math.sqrt(runs)
    return Interval(values.mean().item(), half, runs)


def compare_pairs(first: Tensor, second: Tensor) -> Paired:
    runs = min(len(first), len(second))
    first, second = first[:runs].double(), second[:runs].double()
    wins = int((first < second).sum())
    return Paired(first.mean().item(), second.mean().item(), interval(first - second), wins)


def band(curves: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the runs, and half the width of its 95 % band, at each point; curves [runs, points]."""
    curves = curves.double()
    if len(curves) < 2:
        return curves.mean(0), torch.zeros(curves.shape[1], dtype=torch.float64, device="cpu")
    return curves.mean(0), t_quantile(len(curves) - 1) * curves.std(0) / math.sqrt(len(curves))


def smooth(curves: Tensor, window: int) -> Tensor:
    """Moving average over the last `window` points (fewer at the start); curves [runs, points]."""
    if window <= 1:
        return curves
    sums = torch.nn.functional.pad(curves.double().cumsum(1), (1, 0))
    ends = torch.arange(1, curves.shape[1] + 1, device="cpu")
    starts = (ends - window).clamp(min=0)
    return (sums[:, ends] - sums[:, starts]) / (ends - starts)


def overall_verdict(verdicts: list[str]) -> str:
    """One word for a claim from the words for its parts."""
    done = [verdict for verdict in verdicts if verdict != AWAITING]
    if not done:
        return AWAITING
    if all(verdict == CONFIRMED for verdict in done):
        return CONFIRMED
    if all(verdict == OPPOSITE for verdict in done):
        return OPPOSITE
    return "confirmed in part" if CONFIRMED in done else NOT_CONFIRMED


def format_number(value: float) -> str:
    """Three significant digits, no exponent for everyday sizes."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        digits = 3 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{min(digits, 5)}f}"
    return f"{value:.1e}"
