"""Checks that only the CNN experiments can answer: which norm separates, whether the same place is chosen each time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sensli.merits.norms import NORMS
from sensli.paper.plans.config import Plan
from sensli.paper.report.evidence import ONE_RUN, Check, Finding, named
from sensli.paper.report.statistics import CONFIRMED, NOT_CONFIRMED, number
from sensli.paper.running.store import Result

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
