"""Paired differences with confidence intervals, and what they say about a claim."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sensli.merits.confidence import student_tail
from sensli_lab.paper import cnn
from sensli_lab.paper.image_sets import FACTS
from sensli_lab.paper.planning import Plan
from sensli_lab.paper.store import Result

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
            return f"{number(self.mean)} (one run)"
        return f"{number(self.mean)} [{number(self.low)}, {number(self.high)}]"


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


def interval(values: Tensor) -> Interval:
    """Mean and 95 % interval over the runs; a run that diverged (nan) makes the mean nan."""
    values = values.double()
    runs = len(values)
    half = math.inf if runs < 2 else t_quantile(runs - 1) * values.std().item() / math.sqrt(runs)
    return Interval(values.mean().item(), half, runs)


def paired(first: Tensor, second: Tensor) -> Paired:
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


def overall(verdicts: list[str]) -> str:
    """One word for a claim from the words for its parts."""
    done = [verdict for verdict in verdicts if verdict != AWAITING]
    if not done:
        return AWAITING
    if all(verdict == CONFIRMED for verdict in done):
        return CONFIRMED
    if all(verdict == OPPOSITE for verdict in done):
        return OPPOSITE
    return "confirmed in part" if CONFIRMED in done else NOT_CONFIRMED


def number(value: float) -> str:
    """Three significant digits, no exponent for everyday sizes."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        digits = 3 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{min(digits, 5)}f}"
    return f"{value:.1e}"


# ---- What growing cost, compared with the grown network from the start, run by run: FLOPs, time, and the share of
# looking.


@dataclass(frozen=True)
class CostRatios:
    """Grown over extended, mean over the runs. `chosen` follows from the insertions alone, without the looks."""

    flops: Interval  # by the paper's rule: a look costs three passes of the network with a layer more at every place
    computed: (
        Interval  # what is computed here: three passes of the network as it is, and a weight gradient at every place
    )
    time: Interval
    steady: Interval  # time, with the median epoch of every stretch between two looks: not affected by a machine's busy moments
    chosen: Interval
    looking: Interval  # share of the looks in the time of the grown arm

    def __str__(self) -> str:
        return (
            f"FLOPs ratio {self.computed}; by the paper's rule, which counts a look as passes of a network extended everywhere, "
            f"{self.flops}; time ratio {self.time}, from median epochs {self.steady}; from the insertions alone {self.chosen}; "
            f"looking took {number(100 * self.looking.mean)} % of the time"
        )


def ratios(grown: Result, whole: Result) -> CostRatios:
    flops = grown.final("flops") / whole.final("flops")
    computed = (_training_flops(grown) + _look_flops(grown)) / whole.final("flops")
    time = grown.final("seconds") / whole.final("seconds")
    steady = _steady(grown) / _steady(whole)
    parts = (flops, computed, time, steady, chosen(grown), looking(grown))
    return CostRatios(*(interval(values) for values in parts))


def pair(plan: Plan) -> tuple[str, str] | None:
    """The arm that grows and the arm that has its network from the start, if the plan has such a pair."""
    for arm, settings in plan.arms.items():
        if settings.from_start:
            return plan.grown(arm), arm
    return None


def looking(result: Result) -> Tensor:
    """The share of the looks in the time of every run."""
    return result.runs["look_seconds"].sum(1) / result.final("seconds")


def chosen(result: Result) -> Tensor:
    """Training FLOPs of the grown network over those of the network it ended as, looks not counted: [runs]."""
    settings, facts = result.settings, FACTS[result.settings.data.name]
    ends = [cnn.forward_flops(settings.network, facts, stages[-1]) for stages in _stages(result)]
    return _training_flops(result) / (3 * settings.epochs * torch.tensor(ends, dtype=torch.float64, device="cpu"))


def _stages(result: Result) -> list[list[list[int]]]:
    """Convolutions per stage before each look and after the last one, run by run."""
    network = result.settings.network
    runs: list[list[int]] = result.runs["place"].tolist()
    return [[cnn.grown(network, places[:look]) for look in range(len(places) + 1)] for places in runs]


def _training_flops(result: Result) -> Tensor:
    """FLOPs per image of all training steps, looks not counted: [runs]."""
    settings, facts = result.settings, FACTS[result.settings.data.name]
    times = torch.tensor((0, *settings.insert_at, settings.epochs), device="cpu").diff()
    forward = [[cnn.forward_flops(settings.network, facts, one) for one in stages] for stages in _stages(result)]
    return 3 * (torch.tensor(forward, dtype=torch.float64, device="cpu") * times).sum(1)


def _look_flops(result: Result) -> Tensor:
    """FLOPs per image of all looks, with the share of the images that each one needed: [runs]."""
    network, facts = result.settings.network, FACTS[result.settings.data.name]
    looks = [[cnn.look_flops(network, facts, one) for one in stages[:-1]] for stages in _stages(result)]
    return (torch.tensor(looks, dtype=torch.float64, device="cpu") * result.runs["look_share"]).sum(1)


def _steady(result: Result) -> Tensor:
    """Seconds of a run if every epoch between two looks took the median of them, plus the looks."""
    settings = result.settings
    epochs = result.runs["seconds"].double().diff(dim=1)
    total = torch.zeros(len(epochs), dtype=torch.float64, device="cpu")
    if "look_seconds" in result.runs:
        looks = result.runs["look_seconds"].double()
        for k, time in enumerate(settings.insert_at):
            epochs[:, time - 1] -= looks[:, k]  # a look counts to the epoch before it
        total += looks.sum(1)
    for start, end in zip((0, *settings.insert_at), (*settings.insert_at, settings.epochs), strict=True):
        total += epochs[:, start:end].median(1).values * (end - start)
    return total
