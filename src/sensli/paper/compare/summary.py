"""What the runs of a task say: each method beside the small, the large and the best fixed network, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sensli.paper.compare.front import BEGIN, LEVELS, Curve, Ratios, front_ratios
from sensli.paper.compare.job import Job
from sensli.paper.compare.methods import Method
from sensli.paper.compare.run import Run
from sensli.paper.compare.store import Store
from sensli.paper.compare.task import Task
from sensli.paper.errors import NoResults
from sensli.paper.report.statistics import Interval, Paired, interval, paired

Runs = Mapping[str, Mapping[int, Run]]  # method -> seed -> run


@dataclass(frozen=True)
class Factor:
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

    levels: tuple[Factor, ...]
    worst: Factor  # the largest ratio of each run, wherever it was
    mean: Factor  # over all levels

    @classmethod
    def of(cls, found: Sequence[Sequence[Ratios]]) -> Front:
        """From the ratios of each seed: one for a growing run, one for every other seed for a fixed network."""

        def over_seeds(of: Callable[[Ratios], float]) -> Factor:
            return _factor([math.exp(sum(math.log(of(one)) for one in ratios) / len(ratios)) for ratios in found])

        def at(level: int) -> Factor:
            return over_seeds(lambda one: one.levels[level])

        return cls(tuple(map(at, range(LEVELS))), over_seeds(lambda one: one.worst), over_seeds(lambda one: one.mean))

    @property
    def end(self) -> Factor:
        return self.levels[-1]

    @property
    def most(self) -> Factor:
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


def load(task: Task, methods: Sequence[Method], seeds: int, budget: float, store: Store) -> dict[str, dict[int, Run]]:
    """The stored runs of these methods; those that have none are left out."""
    found: dict[str, dict[int, Run]] = {}
    for method in methods:
        jobs = {seed: Job(task, method, seed, budget) for seed in range(seeds)}
        runs = {seed: run for seed, job in jobs.items() if (run := store.load(job)) is not None}
        if runs:
            found[method.name] = runs
    if not found:
        size = "" if budget == 1 else f" --budget {budget:g}"
        raise NoResults(
            f"{store.root}: no run of the task {task.name} with the budget x {budget:g} is stored. Compute them with: "
            f"sensli compare run {task.name}{size}"
        )
    return found


def curve(run: Run) -> Curve:
    return Curve(tuple(run.flops), tuple(run.validation))


def fixed_curves(runs: Runs, methods: Sequence[Method], seed: int) -> list[Curve] | None:
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
    return Row(
        method=method,
        seeds=len(own),
        validation=_interval([run.validation[-1] for run in own.values()]),
        test=_interval([run.test_loss for run in own.values()]),
        error=_interval(errors) if errors else None,
        to_small=_difference(own, runs.get("small")) if method.name != "small" else None,
        to_large=_difference(own, runs.get("large")) if method.name != "large" else None,
        front=front(method, methods, runs),
        matches=_matches(own, runs.get("large")) if method.name != "large" else None,
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


def _difference(own: Mapping[int, Run], other: Mapping[int, Run] | None) -> Paired | None:
    both = sorted(own.keys() & (other or {}).keys())
    if other is None or not both:
        return None
    return paired(*(torch.tensor([some[seed].test_loss for seed in both], device="cpu") for some in (own, other)))


def _matches(own: Mapping[int, Run], large: Mapping[int, Run] | None) -> Matches | None:
    both = sorted(own.keys() & (large or {}).keys())
    if large is None or not both:
        return None
    shares = (curve(own[seed]).reached(large[seed].validation[-1]) / large[seed].flops[-1] for seed in both)
    return Matches(tuple(max(share, BEGIN) for share in shares))


def _interval(values: Sequence[float]) -> Interval:
    return interval(torch.tensor(values, dtype=torch.float64, device="cpu"))


def _factor(values: Sequence[float]) -> Factor:
    return Factor(_interval([math.log(value) for value in values]))
