"""Checks: each looks up stored results, compares, and says in one line what was found.

A check runs over every recipe of its experiment that has results. Where an experiment has not been computed, the line says
so; it is filled in once results are stored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sensli.merits.norms import NORMS
from sensli_lab.errors import BadExperiment, NoResults
from sensli_lab.paper import planning
from sensli_lab.paper.engine import engine
from sensli_lab.paper.planning import Experiment, Plan, RunOptions, plan
from sensli_lab.paper.statistics import (
    AWAITING,
    CONFIRMED,
    NOT_CONFIRMED,
    OPPOSITE,
    Paired,
    interval,
    number,
    paired,
    ratios,
)
from sensli_lab.paper.store import Result, Store

ONE_RUN = "inconclusive: one run"
NOT_LEARNT = "inconclusive: the network did not learn"
UNDECIDED = (ONE_RUN, NOT_LEARNT, AWAITING)
CHANCE = 0.85  # a test error on ten classes above which a network has learnt nothing
CNN = ("1", "5", "9", "12", "14")
WORDS = {"train_loss": "training loss", "test_loss": "test loss", "test_error": "test error"}


@dataclass(frozen=True)
class Finding:
    """One line of evidence."""

    setting: str
    measured: str
    verdict: str


class Evidence:
    """Stored results by experiment."""

    def __init__(self, store: Store, options: RunOptions) -> None:
        self.store, self.options = store, options
        self.experiments = planning.bundled()
        self._plans: dict[tuple[str, str], Plan | None] = {}
        self._loaded: dict[str, dict[str, Result] | None] = {}
        self.left_out: list[str] = []  # why, where only some of the results are stored

    def each(self, name: str, recipes: tuple[str, ...] = ()) -> Iterator[tuple[Plan, dict[str, Result]]]:
        """Every recipe of an experiment (or the named ones) that has all its results."""
        if name not in self.experiments:
            return
        experiment = self.experiments[name]
        for recipe in recipes or experiment.recipes:
            one = self._plan(experiment, recipe)
            if one is None:
                continue
            if one.key not in self._loaded:
                try:
                    self._loaded[one.key] = self.store.load_all(one)
                except NoResults as error:
                    self._loaded[one.key] = None
                    if any(self.store.root.glob(f"{one.key}/*/runs-*.json")):
                        self.left_out.append(str(error))
            results = self._loaded[one.key]
            if results is not None:
                yield one, results

    def _plan(self, experiment: Experiment, recipe: str) -> Plan | None:
        """Made once, because every claim asks for it."""
        key = experiment.name, recipe
        if key not in self._plans:
            try:
                self._plans[key] = plan(experiment, recipe, self.options)
            except BadExperiment:  # not possible at this scale of the epochs, so there can be no results
                self._plans[key] = None
        return self._plans[key]


def _awaiting(experiment: str, what: str) -> Finding:
    command = f"sensli paper run {experiment}"
    kind = f"the CNN experiments: {command} --preset laptop" if experiment in CNN else f"results: {command}"
    return Finding(f"{_called(experiment)}: {what}", f"awaiting {kind}", AWAITING)


def named(one: Plan) -> str:
    return f"{_called(one.experiment.name)} ({one.words})"


def _called(experiment: str) -> str:
    return f"Exp{experiment}" if experiment.isdigit() else experiment


@dataclass(frozen=True)
class Check(ABC):
    """What is found in each recipe of an experiment that has results, or one line that says what is missing."""

    experiment: str
    recipes: tuple[str, ...] = field(default=(), kw_only=True)  # empty: all of them

    def weigh(self, evidence: Evidence) -> list[Finding]:
        stored = evidence.each(self.experiment, self.recipes)
        findings = [finding for one, results in stored for finding in self._found(one, results)]
        return findings or [_awaiting(self.experiment, self._asks())]

    @abstractmethod
    def _found(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]: ...

    @abstractmethod
    def _asks(self) -> str:
        """What the check is about, in a few words."""


@dataclass(frozen=True)
class Smaller(Check):
    """The first arm has smaller values than the second, over paired runs: at the end, unless another moment is given."""

    first: str
    second: str
    curves: tuple[str, ...] = ("train_loss", "test_error")
    hidden: bool = False  # the claim is that there is no visible difference
    epoch: int | None = None  # compare after this epoch
    equal_cost: bool = False  # compare with the second when it has used as many FLOPs as the first did in total
    dead: bool | None = None  # only runs whose first arm had dead units at the insertion (True), or none (False)

    def _asks(self) -> str:
        return f"{self.first} against {self.second}"

    def _found(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        first, second = results[self.first], results[self.second]
        ends, when = self._moments(one)
        rows = self._rows(first)
        if not len(rows):
            return
        for curve in self.curves:
            sides = zip((first, second), ends, strict=True)
            pair = paired(*(side.runs[curve][: one.runs][rows, end] for side, end in sides))
            setting = f"{named(one)}, {WORDS[curve]}{when}{self._subset()}: {self._asks()}"
            if self.hidden:
                setting += " (claimed: no visible difference)"
            idle = [arm for arm in (self.first, self.second) if at_chance(results[arm])]
            remark = f"; at chance level: {' and '.join(idle)}" if idle else ""
            verdict = self._verdict(pair) if len(idle) < 2 else NOT_LEARNT
            yield Finding(setting, _words(pair) + remark, verdict)

    def _moments(self, one: Plan) -> tuple[tuple[int, int], str]:
        """The epochs at which the two are compared, and how to say it."""
        if self.epoch is not None:
            return (self.epoch, self.epoch), f" after {self.epoch} epochs"
        if not self.equal_cost:
            return (-1, -1), ""
        sides = (one.arms[self.first], one.arms[self.second])
        share = engine(sides[0]).counts(sides[0]).flops / engine(sides[1]).counts(sides[1]).flops
        epoch = min(round(share * sides[1].epochs), sides[1].epochs)
        return (-1, epoch), f" at equal FLOPs (epoch {epoch} of {self.second})"

    def _subset(self) -> str:
        return {None: "", True: ", runs with dead units", False: ", runs without dead units"}[self.dead]

    def _rows(self, first: Result) -> torch.Tensor:
        everyone = torch.arange(len(first.runs["train_loss"]), device="cpu")
        if self.dead is None:
            return everyone
        return everyone[(first.runs["dead"][:, 0] > 0) == self.dead]

    def _verdict(self, pair: Paired) -> str:
        if pair.difference.runs < 2:
            return ONE_RUN
        verdict = pair.verdict()
        if self.hidden:
            return CONFIRMED if verdict == NOT_CONFIRMED else NOT_CONFIRMED
        return verdict


def at_chance(result: Result) -> bool:
    """Whether a CNN ends no better than guessing, as it does with the stated Adam 0.01."""
    return result.settings.engine == "cnn" and result.final("test_error").mean().item() > CHANCE


def _words(pair: Paired) -> str:
    return (
        f"{number(pair.first)} against {number(pair.second)}; difference {pair.difference}; "
        f"smaller in {pair.wins} of {pair.difference.runs} runs"
    )


@dataclass(frozen=True)
class Cheaper(Check):
    """The first arm needs fewer FLOPs than the second: a count, so it needs no interval; if asked for, less time as well."""

    first: str
    second: str
    time: bool = False

    def _asks(self) -> str:
        return f"{self.first} against {self.second}"

    def _found(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        sides = results[self.first], results[self.second]
        setting = f"{named(one)}: {self._asks()}"
        if "flops" in sides[0].runs:  # what was actually inserted, and the time it actually took
            found = ratios(*sides)
            measured = str(found) if self.time else f"FLOPs ratio {found.flops}"
            verdict = CONFIRMED if found.flops.mean < 1 else OPPOSITE
            if self.time and not found.steady.high < 1:
                verdict = OPPOSITE if found.steady.low > 1 else NOT_CONFIRMED
            if all(at_chance(side) for side in sides):
                verdict = NOT_LEARNT
            yield Finding(setting, measured, verdict)
            return
        first, second = (engine(s).counts(s).flops for s in (one.arms[self.first], one.arms[self.second]))
        measured = f"{first:,} against {second:,} FLOPs per sample, ratio {first / second:.3f}"
        verdict = CONFIRMED if first < second else OPPOSITE
        yield Finding(setting, measured, verdict)


@dataclass(frozen=True)
class NewGradient(Check):
    """The gradient norm of the new layer stays within a factor of ten of the mean of the others'."""

    arm: str

    def _asks(self) -> str:
        return f"gradient norms of {self.arm}"

    def _found(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        result = results[self.arm]
        time = result.settings.insert_at[0]
        norms = result.runs["gradient_norm"][:, time:].double()  # [runs, epochs, layers]
        new_index = (result.runs["place"][:, 0] + 1).view(-1, 1, 1).expand(-1, norms.shape[1], 1)
        new = norms.gather(2, new_index).squeeze(2)
        others = (norms.sum(2) - new) / (norms.shape[2] - 1)
        logs = (new.clamp(min=1e-30) / others.clamp(min=1e-30)).log10().mean(1)
        mean = interval(logs)
        verdict = CONFIRMED if mean.low > -1 and mean.high < 1 else OPPOSITE if abs(mean.mean) > 1 else NOT_CONFIRMED
        low, high = 10**mean.low, 10**mean.high
        larger = (new.mean(1) > others.mean(1)).sum().item()
        measured = (
            f"new layer's norm over the mean of the others', after the insertion: {number(10**mean.mean)} "
            f"[{number(low)}, {number(high)}] (geometric mean); larger in {larger} of {len(logs)} runs"
        )
        yield Finding(f"{named(one)}: {self.arm}", measured, verdict)


@dataclass(frozen=True)
class ThresholdCheck(Check):
    """A threshold of 1 on the ratio would accept some insertions and reject others."""

    arm: str

    def _asks(self) -> str:
        return f"{self.arm}, ratio at least 1"

    def _found(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        result = results[self.arm]
        best = result.runs["ratios"].nan_to_num(-math.inf).amax(2)  # [runs, times]
        accepted = (best >= 1).double()
        mixed = 0 < accepted.mean().item() < 1
        parts = [
            f"after {time} epochs: {int(accepted[:, k].sum())} of {len(best)} runs, {_median(best[:, k])}"
            for k, time in enumerate(result.settings.insert_at)
        ]
        verdict = ONE_RUN if len(best) < 2 else CONFIRMED if mixed else NOT_CONFIRMED
        verdict = NOT_LEARNT if at_chance(result) else verdict
        yield Finding(f"{named(one)}: {self._asks()}", "; ".join(parts), verdict)


def _median(ratios: torch.Tensor) -> str:
    median = ratios.median().item()
    return f"median ratio {number(median)}" if math.isfinite(median) else "all merits zero"


@dataclass(frozen=True)
class BestTime(Check):
    """The insertion time with the smallest mean loss lies among those named."""

    expected: tuple[int, ...]

    def _asks(self) -> str:
        return "best insertion time"

    def _found(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        grown = {arm: r for arm, r in results.items() if r.settings.insert_at}
        means = {arm: r.final("train_loss").mean().item() for arm, r in grown.items()}
        best = min(means, key=lambda arm: means[arm])
        time = grown[best].settings.insert_at[0]
        losses = torch.stack([r.final("train_loss") for r in grown.values()])
        moments = [r.settings.insert_at[0] for r in grown.values()]
        counts = torch.bincount(losses.argmin(0), minlength=len(moments)).tolist()
        spread = ", ".join(f"{moment}: {count}" for moment, count in zip(moments, counts, strict=True))
        runs = losses.shape[1]
        verdict = ONE_RUN if runs < 2 else CONFIRMED if time in self.expected else NOT_CONFIRMED
        measured = f"best after {time} epochs (mean loss {number(means[best])}); best by run: {spread}"
        yield Finding(f"{named(one)}: best time among {list(self.expected)}", measured, verdict)


# ---- Checks that only the CNN experiments can answer: which norm separates, whether the same place is chosen each time.


SEPARATE = "operator"


@dataclass(frozen=True)
class Separation(Check):
    """Of the five norms, the operator norm tells the best place from the second best most clearly."""

    arm: str

    def _asks(self) -> str:
        return "five norms per place and run"

    def _found(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        values = results[self.arm].runs["norms"][:, 0]
        values = values[:, ~values[0, :, 0].isnan()]  # [runs, places, norms]
        setting = f"{named(one)}: gap between the two best places over the spread of the runs"
        if len(values) < 2:
            yield Finding(setting, "needs the spread of several runs", ONE_RUN)
            return
        found = dict(zip(NORMS, separation(values).tolist(), strict=True))
        favourites = [int(place) for place in values.mean(0).argmax(0)]
        clearest = max(found, key=lambda name: found[name])
        parts = [
            f"{name} {number(found[name])} (place {place + 1})" for name, place in zip(NORMS, favourites, strict=True)
        ]
        verdict = CONFIRMED if clearest == SEPARATE else NOT_CONFIRMED
        yield Finding(setting, f"{', '.join(parts)}; clearest: {clearest}", verdict)


def separation(values: Tensor) -> Tensor:
    """How clearly each norm tells the best place; values [runs, places, norms], result [norms].

    The gap between the two best places (by the mean over the runs) over the root of the mean of their variances: it has no
    unit, so norms of different size compare.
    """
    mean = values.mean(0)
    order = mean.argsort(0, descending=True)[:2]
    best, second = mean.gather(0, order)
    spread = values.var(0).gather(0, order).mean(0).sqrt()
    found: Tensor = (best - second) / spread.clamp(min=torch.finfo(values.dtype).tiny)
    return found


@dataclass(frozen=True)
class SamePlace(Check):
    """Whatever the insertion time, the same place is chosen."""

    def _asks(self) -> str:
        return "the same place at each insertion time"

    def _found(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        grown = [result for result in results.values() if "place" in result.runs]
        places = torch.stack([result.runs["place"][:, 0] for result in grown])  # [times, runs]
        tallies = torch.bincount(places[places >= 0].flatten()).tolist()
        text = ", ".join(f"place {place + 1}: {count}" for place, count in enumerate(tallies))
        verdict = CONFIRMED if len(places.unique()) == 1 else NOT_CONFIRMED
        setting = f"{named(one)}: the same place at each insertion time"
        yield Finding(setting, f"chosen over times and runs: {text}", verdict)
