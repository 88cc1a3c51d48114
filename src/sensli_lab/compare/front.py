"""The front: the lower envelope of the fixed networks' loss over FLOPs; and how far a run is from it.

`front ratio` at a loss = FLOPs that the run needs to reach it / FLOPs that the best fixed network needs. Below 1 the run was there first.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sensli_lab.compare.jobs import Comparison, Job, Run, RunStore
from sensli_lab.compare.methods import Method
from sensli_lab.errors import NoResults
from sensli_lab.work.statistics import Interval, Paired, compare_pairs, interval

LEVELS = 40
BEGIN = 0.05  # share of the FLOPs that count as the least: before it, curves fall through the first losses


@dataclass(frozen=True)
class LossCurve:
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
class FrontRatios:
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


def front_at(fixed: Sequence[LossCurve], flops: float) -> float:
    """The lowest loss that any of the fixed networks had by then."""
    return min(curve.best_by(flops) for curve in fixed)


def front_ratios(run: LossCurve, fixed: Sequence[LossCurve]) -> FrontRatios:
    """The front ratio over the range of losses that both reached, at levels equally spaced in the logarithm of the loss."""
    total = max(curve.flops[-1] for curve in fixed)
    last = max(run.lowest, min(curve.lowest for curve in fixed))
    levels = _levels(max(front_at(fixed, BEGIN * total), last), last)
    least = BEGIN * total
    return FrontRatios(
        tuple(max(run.reached(one), least) / max(min(curve.reached(one) for curve in fixed), least) for one in levels)
    )


def _levels(first: float, last: float) -> list[float]:
    if first == last:
        return [last] * LEVELS
    low, high = math.log(max(last, 1e-12)), math.log(max(first, 1e-12))
    inner = [math.exp(high + (low - high) * step / (LEVELS - 1)) for step in range(LEVELS - 1)]
    return [*inner, last]  # exactly: a rounded level may lie below what was reached


# ---- What the runs of a task say: each method beside the small, the large and the best fixed network, seed by seed.

Runs = Mapping[str, Mapping[int, Run]]  # method -> seed -> run


@dataclass(frozen=True)
class CostFactor:
    """A ratio's geometric mean over the seeds with its 95 % interval."""

    log: Interval

    @property
    def mean(self) -> float:
        return math.exp(self.log.mean)

    def __str__(self) -> str:
        if self.log.runs < 2:
            return f"{self.mean:.2f} (one run)"
        return f"{self.mean:.2f} [{math.exp(self.log.low):.2f}, {math.exp(self.log.high):.2f}]"


@dataclass(frozen=True)
class Matches:
    """When a method is as good as the large network at its end, by seed: shares of its FLOPs, `BEGIN` at least, infinite for never."""

    shares: tuple[float, ...]

    def __str__(self) -> str:
        there = [share for share in self.shares if math.isfinite(share)]
        if len(there) == len(self.shares):
            return str(_factor(there))
        return f"in {len(there)} of {len(self.shares)} seeds" if there else "never"


@dataclass(frozen=True)
class Front:
    """The front ratio of a method over its seeds: at each level from the first losses that count to the lowest one that was reached.

    A growing run is compared with the fixed networks of its own seed. A fixed network is one of those, so it is compared with the
    fronts of the other seeds: what is left above 1 is chance, and a size that is not the best.
    """

    levels: tuple[CostFactor, ...]
    worst: CostFactor  # the largest ratio of each run, wherever it was
    mean: CostFactor  # over all levels

    @classmethod
    def of(cls, found: Sequence[Sequence[FrontRatios]]) -> Front:
        """From the ratios of each seed: one for a growing run, one for every other seed for a fixed network."""

        def over_seeds(of: Callable[[FrontRatios], float]) -> CostFactor:
            return _factor([math.exp(sum(math.log(of(one)) for one in ratios) / len(ratios)) for ratios in found])

        def at(level: int) -> CostFactor:
            return over_seeds(lambda one: one.levels[level])

        return cls(tuple(map(at, range(LEVELS))), over_seeds(lambda one: one.worst), over_seeds(lambda one: one.mean))

    @property
    def end(self) -> CostFactor:
        return self.levels[-1]

    @property
    def most(self) -> CostFactor:
        """At the level where the mean over the seeds is largest."""
        return max(self.levels, key=lambda one: one.mean)


@dataclass(frozen=True)
class Row:
    """One method: means over its seeds, differences to others over the seeds that both have."""

    method: Method
    seeds: int
    validation: Interval
    test: Interval
    error: Interval | None
    to_small: Paired | None  # test loss, this method minus the other one
    to_large: Paired | None
    front: Front | None
    matches: Matches | None  # the large network; not of itself
    decisions: float  # share of all FLOPs
    parameters: float


def load_runs(asked: Comparison, store: RunStore) -> dict[str, dict[int, Run]]:
    """The stored runs of these methods; those that have none are left out."""
    found: dict[str, dict[int, Run]] = {}
    for method in asked.methods:
        jobs = {seed: Job(asked.task, method, seed, asked.budget) for seed in range(asked.seeds)}
        runs = {seed: run for seed, job in jobs.items() if (run := store.load(job)) is not None}
        if runs:
            found[method.name] = runs
    if not found:
        name, size = asked.task.name, "" if asked.budget == 1 else f" --budget {asked.budget:g}"
        raise NoResults(
            f"{store.root}: no run of the task {name} with the budget x {asked.budget:g} is stored. Compute them with: "
            f"sensli compare run {name}{size}"
        )
    return found


def curve(run: Run) -> LossCurve:
    return LossCurve(tuple(run.flops), tuple(run.validation))


def fixed_curves(runs: Runs, methods: Sequence[Method], seed: int) -> list[LossCurve] | None:
    """The curves of all fixed networks under a seed; None if one of them is missing, since the front would be too high."""
    names = [method.name for method in methods if method.in_front and method.name in runs]
    if not names or any(seed not in runs[name] for name in names):
        return None
    return [curve(runs[name][seed]) for name in names]


def rows(methods: Sequence[Method], runs: Runs) -> list[Row]:
    """One row for each method that has runs."""
    return [_row(method, methods, runs) for method in methods if method.name in runs]


def _row(method: Method, methods: Sequence[Method], runs: Runs) -> Row:
    own = runs[method.name]
    errors = [run.test_error for run in own.values() if run.test_error is not None]
    small, large = (runs.get(name, {}) if name != method.name else {} for name in ("small", "large"))
    return Row(
        method=method,
        seeds=len(own),
        validation=interval([run.validation[-1] for run in own.values()]),
        test=interval([run.test_loss for run in own.values()]),
        error=interval(errors) if errors else None,
        to_small=_difference(own, small),
        to_large=_difference(own, large),
        front=front(method, methods, runs),
        matches=_matches(own, large),
        decisions=sum(run.decisions / run.budget for run in own.values()) / len(own),
        parameters=sum(run.parameters for run in own.values()) / len(own),
    )


def front(method: Method, methods: Sequence[Method], runs: Runs) -> Front | None:
    """The front ratios of a method; None of one that has nothing to be compared with."""
    own = runs[method.name]
    fronts = {seed: fixed for seed in own if (fixed := fixed_curves(runs, methods, seed)) is not None}
    found = []
    for seed in own:
        beside = [seed] if method.grows else [other for other in fronts if method.in_front and other != seed]
        ratios = [front_ratios(curve(own[seed]), fronts[other]) for other in beside if other in fronts]
        if ratios:
            found.append(ratios)
    return Front.of(found) if found else None


def _difference(own: Mapping[int, Run], other: Mapping[int, Run]) -> Paired | None:
    both = sorted(own.keys() & other.keys())
    if not both:
        return None
    return compare_pairs(
        *(torch.tensor([some[seed].test_loss for seed in both], device="cpu") for some in (own, other))
    )


def _matches(own: Mapping[int, Run], large: Mapping[int, Run]) -> Matches | None:
    both = sorted(own.keys() & large.keys())
    shares = (curve(own[seed]).reached(large[seed].validation[-1]) / large[seed].flops[-1] for seed in both)
    return Matches(tuple(max(share, BEGIN) for share in shares)) if both else None


def _factor(values: Sequence[float]) -> CostFactor:
    return CostFactor(interval([math.log(value) for value in values]))


# ---- With a decay at the end of every run, a loss on the way says little: what counts is where a run ends. So the same training with
# fewer FLOPs, its decay included, is compared with the fixed sizes that had all of them.


def budget_to_end_at(ends: Mapping[float, float], level: float) -> float:
    """The budget with which a method ends at a loss, from the losses at which it ended with some budgets.

    Between two of them the loss is a straight line over the logarithm of the budget. The smallest budget, if that was enough already;
    infinite, if none was.
    """
    known = sorted(ends.items())
    if known[0][1] <= level:
        return known[0][0]
    for (less, above), (more, below) in itertools.pairwise(known):
        if below <= level:
            share = (above - level) / (above - below)
            return math.exp(math.log(less) + share * (math.log(more) - math.log(less)))
    return math.inf


@dataclass(frozen=True)
class EndCost:
    """FLOPs with which a method ends as low as a fixed size with all of them, as a share of these: by seed, infinite for never."""

    method: str
    shares: tuple[float, ...]
    least: float  # the smallest budget that was tried: a share cannot be below it

    def __str__(self) -> str:
        there = [share for share in self.shares if math.isfinite(share)]
        if len(there) < len(self.shares):
            return f"in {len(there)} of {len(self.shares)} seeds" if there else "never"
        return f"{'at most ' if min(there) <= self.least else ''}{_factor(there)}"


def best_fixed(methods: Sequence[Method], runs: Runs) -> str:
    """The fixed size whose mean test loss is the lowest: the best one in hindsight."""
    means = {
        method.name: sum(run.test_loss for run in runs[method.name].values()) / len(runs[method.name])
        for method in methods
        if method.in_front and method.name in runs
    }
    return min(means, key=lambda name: means[name])


def end_costs(by_budget: Mapping[float, Runs], other: str) -> list[EndCost]:
    """For every growing method that has runs with less than all FLOPs: what it needs to end where ``other`` ended with all of them."""
    whole = by_budget[1.0]
    names = dict.fromkeys(name for budget, runs in by_budget.items() if budget < 1 for name in runs)
    found = []
    for name in names:
        ends = {budget: runs[name] for budget, runs in by_budget.items() if name in runs}
        seeds = sorted(set.intersection(*(set(runs) for runs in ends.values())) & set(whole.get(other, {})))
        levels = {seed: whole[other][seed].test_loss for seed in seeds}
        shares = tuple(
            budget_to_end_at({budget: runs[seed].test_loss for budget, runs in ends.items()}, levels[seed])
            for seed in seeds
        )
        if shares:
            found.append(EndCost(name, shares, min(ends)))
    return found
