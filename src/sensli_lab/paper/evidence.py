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
from sensli_lab.paper import cnn, planning
from sensli_lab.paper.engine import engine
from sensli_lab.paper.image_sets import FACTS
from sensli_lab.paper.planning import Plan, RunOptions, plan
from sensli_lab.paper.store import Result, Store
from sensli_lab.work.statistics import (
    AWAITING,
    CONFIRMED,
    NOT_CONFIRMED,
    OPPOSITE,
    Interval,
    compare_pairs,
    format_number,
    interval,
)

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
    """Stored results by experiment, each plan made and loaded once, because every claim asks for it."""

    def __init__(self, store: Store, options: RunOptions) -> None:
        self.store, self.options = store, options
        self.experiments = planning.bundled_experiments()
        self._loaded: dict[tuple[str, str], tuple[Plan, dict[str, Result]] | None] = {}
        self.left_out: list[str] = []  # why, where only some of the results are stored

    def each(self, name: str, recipes: tuple[str, ...] = ()) -> Iterator[tuple[Plan, dict[str, Result]]]:
        """Every recipe of an experiment (or the named ones) that has all its results."""
        if name not in self.experiments:
            return
        for recipe in recipes or self.experiments[name].recipes:
            if (name, recipe) not in self._loaded:
                self._loaded[name, recipe] = self._load(name, recipe)
            stored = self._loaded[name, recipe]
            if stored is not None:
                yield stored

    def _load(self, name: str, recipe: str) -> tuple[Plan, dict[str, Result]] | None:
        try:
            one = plan(self.experiments[name], recipe, self.options)
        except BadExperiment:  # not possible at this scale of the epochs, so there can be no results
            return None
        try:
            return one, self.store.load_all(one)
        except NoResults as error:
            if any(self.store.root.glob(f"{one.key}/*/runs-*.json")):
                self.left_out.append(str(error))
            return None


@dataclass(frozen=True)
class Check(ABC):
    """What is found in each recipe of an experiment that has results, or one line that says what is missing."""

    experiment: str
    recipes: tuple[str, ...] = field(default=(), kw_only=True)  # empty: all of them

    def weigh(self, evidence: Evidence) -> list[Finding]:
        stored = evidence.each(self.experiment, self.recipes)
        findings = [finding for one, results in stored for finding in self._findings(one, results)]
        if findings:
            return findings
        command = f"sensli paper run {self.experiment}"
        cnn = self.experiment in CNN
        kind = f"the CNN experiments: {command} --preset laptop" if cnn else f"results: {command}"
        return [Finding(f"{_name(self.experiment)}: {self._asks()}", f"awaiting {kind}", AWAITING)]

    @abstractmethod
    def _findings(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]: ...

    @abstractmethod
    def _asks(self) -> str:
        """What the check is about, in a few words."""


def _name(experiment: str) -> str:
    return f"Exp{experiment}" if experiment.isdigit() else experiment


def _setting(one: Plan) -> str:
    return f"{_name(one.experiment.name)} ({one.words})"


@dataclass(frozen=True)
class TwoArms(Check):
    """A comparison of two arms."""

    first: str
    second: str

    def _asks(self) -> str:
        return f"{self.first} against {self.second}"


@dataclass(frozen=True)
class Smaller(TwoArms):
    """The first arm has smaller values than the second, over paired runs: at the end, unless another moment is given."""

    curves: tuple[str, ...] = ("train_loss", "test_error")
    hidden: bool = False  # the claim is that there is no visible difference
    epoch: int | None = None  # compare after this epoch
    equal_cost: bool = False  # compare with the second when it has used as many FLOPs as the first did in total
    dead: bool | None = None  # only runs whose first arm had dead units at the insertion (True), or none (False)

    def _findings(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        first, second = results[self.first], results[self.second]
        ends, when = self._moments(one)
        rows = torch.arange(len(first.runs["train_loss"]), device="cpu")
        if self.dead is not None:
            rows = rows[(first.runs["dead"][:, 0] > 0) == self.dead]
        if not len(rows) or (self.epoch or 0) > first.settings.epochs:  # a shortened training has no such epoch
            return
        subset = {None: "", True: ", runs with dead units", False: ", runs without dead units"}[self.dead]
        claimed = " (claimed: no visible difference)" if self.hidden else ""
        idle = [arm for arm in (self.first, self.second) if at_chance(results[arm])]
        remark = f"; at chance level: {' and '.join(idle)}" if idle else ""
        for curve in self.curves:
            sides = zip((first, second), ends, strict=True)
            both = compare_pairs(*(side.runs[curve][: one.runs][rows, end] for side, end in sides))
            measured = (
                f"{format_number(both.first)} against {format_number(both.second)}; difference {both.difference}; "
                f"smaller in {both.wins} of {both.difference.runs} runs{remark}"
            )
            setting = f"{_setting(one)}, {WORDS[curve]}{when}{subset}: {self._asks()}{claimed}"
            verdict = both.verdict()
            if len(idle) == 2:
                verdict = NOT_LEARNT
            elif both.difference.runs < 2:
                verdict = ONE_RUN
            elif self.hidden:
                verdict = CONFIRMED if verdict == NOT_CONFIRMED else NOT_CONFIRMED
            yield Finding(setting, measured, verdict)

    def _moments(self, one: Plan) -> tuple[tuple[int, int], str]:
        """The epochs at which the two are compared, and how to say it."""
        if self.epoch is not None:
            return (self.epoch, self.epoch), f" after {self.epoch} epochs"
        if not self.equal_cost:
            return (-1, -1), ""
        sides = (one.arms[self.first], one.arms[self.second])
        share = engine(sides[0]).count_arm(sides[0]).flops / engine(sides[1]).count_arm(sides[1]).flops
        epoch = min(round(share * sides[1].epochs), sides[1].epochs)
        return (-1, epoch), f" at equal FLOPs (epoch {epoch} of {self.second})"


def at_chance(result: Result) -> bool:
    """Whether a CNN ends no better than guessing, as it does with the stated Adam 0.01."""
    return result.settings.engine == "cnn" and result.final("test_error").mean().item() > CHANCE


@dataclass(frozen=True)
class Cheaper(TwoArms):
    """The first arm needs fewer FLOPs than the second: a count, so it needs no interval; if asked for, less time as well."""

    time: bool = False

    def _findings(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        sides = results[self.first], results[self.second]
        if "flops" in sides[0].runs:  # what was actually inserted, and the time it actually took
            found = ratios(*sides)
            measured = str(found) if self.time else f"FLOPs ratio {found.flops}"
            verdict = CONFIRMED if found.flops.mean < 1 else OPPOSITE
            if self.time and not found.steady.high < 1:
                verdict = OPPOSITE if found.steady.low > 1 else NOT_CONFIRMED
            if all(at_chance(side) for side in sides):
                verdict = NOT_LEARNT
        else:
            first, second = (engine(s).count_arm(s).flops for s in (one.arms[self.first], one.arms[self.second]))
            measured = f"{first:,} against {second:,} FLOPs per sample, ratio {first / second:.3f}"
            verdict = CONFIRMED if first < second else OPPOSITE
        yield Finding(f"{_setting(one)}: {self._asks()}", measured, verdict)


@dataclass(frozen=True)
class NewGradient(Check):
    """The gradient norm of the new layer stays within a factor of ten of the mean of the others'."""

    arm: str

    def _asks(self) -> str:
        return f"gradient norms of {self.arm}"

    def _findings(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        result = results[self.arm]
        time = result.settings.insert_at[0]
        norms = result.runs["gradient_norm"][:, time:].double()  # [runs, epochs, layers]
        new_index = (result.runs["place"][:, 0] + 1).view(-1, 1, 1).expand(-1, norms.shape[1], 1)
        new = norms.gather(2, new_index).squeeze(2)
        others = (norms.sum(2) - new) / (norms.shape[2] - 1)
        logs = (new.clamp(min=1e-30) / others.clamp(min=1e-30)).log10().mean(1)
        mean = interval(logs)
        verdict = CONFIRMED if mean.low > -1 and mean.high < 1 else OPPOSITE if abs(mean.mean) > 1 else NOT_CONFIRMED
        larger = (new.mean(1) > others.mean(1)).sum().item()
        measured = (
            f"new layer's norm over the mean of the others', after the insertion: {format_number(10**mean.mean)} "
            f"[{format_number(10**mean.low)}, {format_number(10**mean.high)}] (geometric mean); larger in {larger} of {len(logs)} runs"
        )
        yield Finding(f"{_setting(one)}: {self.arm}", measured, verdict)


@dataclass(frozen=True)
class ThresholdCheck(Check):
    """A threshold of 1 on the ratio would accept some insertions and reject others."""

    arm: str

    def _asks(self) -> str:
        return f"{self.arm}, ratio at least 1"

    def _findings(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        result = results[self.arm]
        best = result.runs["ratios"].nan_to_num(-math.inf).amax(2)  # [runs, times]
        accepted = (best >= 1).double()
        mixed = 0 < accepted.mean().item() < 1
        parts = []
        for k, time in enumerate(result.settings.insert_at):
            median = best[:, k].median().item()
            words = f"median ratio {format_number(median)}" if math.isfinite(median) else "all merits zero"
            parts.append(f"after {time} epochs: {int(accepted[:, k].sum())} of {len(best)} runs, {words}")
        verdict = ONE_RUN if len(best) < 2 else CONFIRMED if mixed else NOT_CONFIRMED
        verdict = NOT_LEARNT if at_chance(result) else verdict
        yield Finding(f"{_setting(one)}: {self._asks()}", "; ".join(parts), verdict)


@dataclass(frozen=True)
class BestTime(Check):
    """The insertion time with the smallest mean loss lies among those named."""

    expected: tuple[int, ...]

    def _asks(self) -> str:
        return "best insertion time"

    def _findings(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        grown = {arm: r for arm, r in results.items() if r.settings.insert_at}
        means = {arm: r.final("train_loss").mean().item() for arm, r in grown.items()}
        best = min(means, key=lambda arm: means[arm])
        time = grown[best].settings.insert_at[0]
        losses = torch.stack([r.final("train_loss") for r in grown.values()])
        counts = torch.bincount(losses.argmin(0), minlength=len(grown)).tolist()
        spread = ", ".join(f"{r.settings.insert_at[0]}: {n}" for r, n in zip(grown.values(), counts, strict=True))
        verdict = ONE_RUN if losses.shape[1] < 2 else CONFIRMED if time in self.expected else NOT_CONFIRMED
        measured = f"best after {time} epochs (mean loss {format_number(means[best])}); best by run: {spread}"
        yield Finding(f"{_setting(one)}: best time among {list(self.expected)}", measured, verdict)


# ---- Checks that only the CNN experiments can answer: which norm separates, whether the same place is chosen each time.

SEPARATE = "operator"


@dataclass(frozen=True)
class Separation(Check):
    """Of the five norms, the operator norm tells the best place from the second best most clearly."""

    arm: str

    def _asks(self) -> str:
        return "five norms per place and run"

    def _findings(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        values = results[self.arm].runs["norms"][:, 0]
        values = values[:, ~values[0, :, 0].isnan()]  # [runs, places, norms]
        setting = f"{_setting(one)}: gap between the two best places over the spread of the runs"
        if len(values) < 2:
            yield Finding(setting, "needs the spread of several runs", ONE_RUN)
            return
        found = dict(zip(NORMS, separation(values).tolist(), strict=True))
        favourites = [int(place) for place in values.mean(0).argmax(0)]
        clearest = max(found, key=lambda name: found[name])
        parts = [
            f"{name} {format_number(found[name])} (place {place + 1})"
            for name, place in zip(NORMS, favourites, strict=True)
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

    def _findings(self, one: Plan, results: dict[str, Result]) -> Iterator[Finding]:
        grown = [result for result in results.values() if "place" in result.runs]
        places = torch.stack([result.runs["place"][:, 0] for result in grown])  # [times, runs]
        tallies = torch.bincount(places[places >= 0].flatten()).tolist()
        text = ", ".join(f"place {place + 1}: {count}" for place, count in enumerate(tallies))
        verdict = CONFIRMED if len(places.unique()) == 1 else NOT_CONFIRMED
        yield Finding(f"{_setting(one)}: {self._asks()}", f"chosen over times and runs: {text}", verdict)


@dataclass(frozen=True)
class CostRatios:
    """Grown over extended, mean over the runs. `chosen` follows from the insertions alone, without the looks."""

    flops: Interval  # by the paper's rule: a look costs three passes of the network with a layer more at every place
    computed: Interval  # as it is here: three passes of the network as it is, and a weight gradient at every place
    time: Interval
    steady: Interval  # time, with the median epoch of every stretch between two looks: not affected by a machine's busy moments
    chosen: Interval
    looking: Interval  # share of the looks in the time of the grown arm

    def __str__(self) -> str:
        return (
            f"FLOPs ratio {self.computed}; by the paper's rule, which counts a look as passes of a network extended everywhere, "
            f"{self.flops}; time ratio {self.time}, from median epochs {self.steady}; from the insertions alone {self.chosen}; "
            f"looking took {format_number(100 * self.looking.mean)} % of the time"
        )


def ratios(grown: Result, whole: Result) -> CostRatios:
    settings, facts = grown.settings, FACTS[grown.settings.data.name]
    trained, total = _training_flops(grown), whole.final("flops")
    ends = [cnn.cnn_flops(settings.network, facts, stages[-1]) for stages in _stages(grown)]
    parts = {
        "flops": grown.final("flops") / total,
        "computed": (trained + _look_flops(grown)) / total,
        "time": grown.final("seconds") / whole.final("seconds"),
        "steady": _steady(grown) / _steady(whole),
        "chosen": trained / (3 * settings.epochs * torch.tensor(ends, dtype=torch.float64, device="cpu")),
        "looking": grown.runs["look_seconds"].sum(1) / grown.final("seconds"),
    }
    return CostRatios(**{name: interval(values) for name, values in parts.items()})


def pair(plan: Plan) -> tuple[str, str] | None:
    """The arm that grows and the arm that has its network from the start, if the plan has such a pair."""
    for arm, settings in plan.arms.items():
        if settings.from_start:
            return plan.grown_arm(arm), arm
    return None


def _stages(result: Result) -> list[list[list[int]]]:
    """Convolutions per stage before each look and after the last one, run by run."""
    network = result.settings.network
    runs: list[list[int]] = result.runs["place"].tolist()
    return [[cnn.stages_after(network, places[:look]) for look in range(len(places) + 1)] for places in runs]


def _training_flops(result: Result) -> Tensor:
    """FLOPs per image of all training steps, looks not counted: [runs]."""
    settings, facts = result.settings, FACTS[result.settings.data.name]
    times = torch.tensor((0, *settings.insert_at, settings.epochs), device="cpu").diff()
    forward = [[cnn.cnn_flops(settings.network, facts, one) for one in stages] for stages in _stages(result)]
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
