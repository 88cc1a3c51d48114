"""What growing cost, compared with the grown network from the start, run by run: FLOPs, time, and the share of looking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sensli.paper.data import FACTS
from sensli.paper.engines import convnets
from sensli.paper.plans.config import Plan
from sensli.paper.report.statistics import Interval, interval, number
from sensli.paper.running.store import Result


@dataclass(frozen=True)
class Ratios:
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


def ratios(grown: Result, whole: Result) -> Ratios:
    flops = grown.final("flops") / whole.final("flops")
    computed = (_training_flops(grown) + _look_flops(grown)) / whole.final("flops")
    time = grown.final("seconds") / whole.final("seconds")
    steady = _steady(grown) / _steady(whole)
    parts = (flops, computed, time, steady, chosen(grown), looking(grown))
    return Ratios(*(interval(values) for values in parts))


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
    ends = [convnets.forward_flops(settings.network, facts, stages[-1]) for stages in _stages(result)]
    return _training_flops(result) / (3 * settings.epochs * torch.tensor(ends, dtype=torch.float64, device="cpu"))


def _stages(result: Result) -> list[list[list[int]]]:
    """Convolutions per stage before each look and after the last one, run by run."""
    network = result.settings.network
    runs: list[list[int]] = result.runs["place"].tolist()
    return [[convnets.grown(network, places[:look]) for look in range(len(places) + 1)] for places in runs]


def _training_flops(result: Result) -> Tensor:
    """FLOPs per image of all training steps, looks not counted: [runs]."""
    settings, facts = result.settings, FACTS[result.settings.data.name]
    times = torch.tensor((0, *settings.insert_at, settings.epochs), device="cpu").diff()
    forward = [[convnets.forward_flops(settings.network, facts, one) for one in stages] for stages in _stages(result)]
    return 3 * (torch.tensor(forward, dtype=torch.float64, device="cpu") * times).sum(1)


def _look_flops(result: Result) -> Tensor:
    """FLOPs per image of all looks, with the share of the images that each one needed: [runs]."""
    network, facts = result.settings.network, FACTS[result.settings.data.name]
    looks = [[convnets.look_flops(network, facts, one) for one in stages[:-1]] for stages in _stages(result)]
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
