"""Checks that only the CNN experiments can answer: which norm separates, whether the same place is chosen each time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sensli.merits.norms import NORMS
from sensli.paper.evidence import ONE_RUN, Evidence, Finding, awaiting, named
from sensli.paper.statistics import CONFIRMED, NOT_CONFIRMED, number

SEPARATE = "operator"


@dataclass(frozen=True)
class Separation:
    """Of the five norms, the operator norm tells the best place from the second best most clearly."""

    experiment: str
    arm: str

    def weigh(self, evidence: Evidence) -> list[Finding]:
        findings = []
        for one, results in evidence.each(self.experiment):
            values = results[self.arm].runs["norms"][:, 0]
            values = values[:, ~values[0, :, 0].isnan()]  # [runs, places, norms]
            setting = f"{named(one)}: gap between the two best places over the spread of the runs"
            if len(values) < 2:
                findings.append(Finding(setting, "needs the spread of several runs", ONE_RUN))
                continue
            found = dict(zip(NORMS, separation(values).tolist(), strict=True))
            favourites = [int(place) for place in values.mean(0).argmax(0)]
            clearest = max(found, key=lambda name: found[name])
            parts = [
                f"{name} {number(found[name])} (place {place + 1})"
                for name, place in zip(NORMS, favourites, strict=True)
            ]
            verdict = CONFIRMED if clearest == SEPARATE else NOT_CONFIRMED
            findings.append(Finding(setting, f"{', '.join(parts)}; clearest: {clearest}", verdict))
        return findings or awaiting(self.experiment, "five norms per place and run")


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
class SamePlace:
    """Whatever the insertion time, the same place is chosen."""

    experiment: str

    def weigh(self, evidence: Evidence) -> list[Finding]:
        findings = []
        for one, results in evidence.each(self.experiment):
            grown = [result for result in results.values() if "place" in result.runs]
            places = torch.stack([result.runs["place"][:, 0] for result in grown])  # [times, runs]
            tallies = torch.bincount(places[places >= 0].flatten()).tolist()
            text = ", ".join(f"place {place + 1}: {count}" for place, count in enumerate(tallies))
            verdict = CONFIRMED if len(places.unique()) == 1 else NOT_CONFIRMED
            setting = f"{named(one)}: the same place at each insertion time"
            findings.append(Finding(setting, f"chosen over times and runs: {text}", verdict))
        return findings or awaiting(self.experiment, "the same place at each insertion time")
