"""A trial at a look: each network trains on the model itself, from the same state, and everything is put back before the next one.

Nothing is copied but values: the user's step gets the user's own model and optimizer, wrappers included, and whoever holds a parameter
still holds it afterwards. When the winner is known, the Grower makes its growth once more, and the values that it ended with go in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from sensli.errors import MeasurementError
from sensli.growing.following import Followers
from sensli.growing.options import Options
from sensli.growing.trials.snapshot import Snapshot
from sensli.growing.trials.steps import Steps
from sensli.growing.trials.trial import Trial
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit
from sensli.modules import checks, random_state
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Together
from sensli.modules.samples import count_samples
from sensli.surgery.history.history import History
from sensli.surgery.history.tried import NO_GROWTH, Arm, Tried

PASSES = 3  # a backward pass costs about two forward passes


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: the growth that won, if any, and the values that its network ended with."""

    tried: Tried
    winner: Merit | None
    _end: Snapshot

    def take_over(self) -> None:
        """Give the model, which has the winner's growth by now, and all that follows it the values that the winner ended with."""
        self._end.restore()


@dataclass(frozen=True)
class Trying:
    """One trial of a Grower: the model, what follows it, and how to try."""

    trial: Trial
    model: nn.Module
    followers: Followers
    history: History
    options: Options
    flops: int  # of the model as it is, per sample
    together: Together

    def run(
        self, candidates: Sequence[Merit], batches: Iterable[Any], loss_fn: LossFunction | None, change: AllOrNothing
    ) -> Outcome:
        """Train every network and put everything back. What to do if this step fails, now or later, is told to the ``change``."""
        source = batches if self.trial.batches is None else self.trial.batches
        change.on_failure(partial(random_state.restore, random_state.capture()))
        change.on_failure(random_state.capture_of_loader(source))
        drawn = _drawn(source, self.trial.steps)
        start = self._snapshot()
        # First which tensors there are, then their values.
        change.on_failure(start.restore)
        kept = self.followers.keep(change, self.model, self.history)
        flops = [self.flops]
        flops += [flops[0] + merit.site.flops for merit in candidates]
        # Those of the first process for all: examples may differ.
        steps = self.together.agree([_equal_steps(len(drawn), flops[0], each) for each in flops], last=False)[0]
        compared = max(1, math.floor(self.trial.last * min(steps)))
        arms, best = list[Arm](), None
        for merit, number, each in zip((None, *candidates), steps, flops, strict=True):
            if merit is not None:
                # Only tried: when it was says nothing, and is not kept.
                self.followers.insert(self.model, merit, self.history, self.options, when={}, first=True)
            losses = self._train(drawn[-number:], loss_fn)
            end = self._snapshot()  # before the metric, which is only asked
            spent = PASSES * each * sum(map(count_samples, drawn[-number:]))
            arms.append(self._arm(merit, losses[-compared:], number, spent))
            if best is None or self._better(arms[-1], arms[best[0]]):
                best = len(arms) - 1, merit, end
            kept.put_back()
            start.restore()
        assert best is not None
        score = "mean loss" if self.trial.metric is None else "metric"
        return Outcome(Tried(tuple(arms), best[0], score), best[1], best[2])

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.model, self.followers, self.trial.stateful)

    def _train(self, batches: Sequence[Any], loss_fn: LossFunction | None) -> list[float]:
        """Train on the batches, in the modes that the model has in training; it gets those back that it had."""
        modes = [(module, module.training) for module in self.model.modules()]
        step = Steps(self.trial, self.model, self.followers, loss_fn)
        losses = [step(batch, index) for index, batch in enumerate(batches)]
        for module, mode in modes:  # one by one: a model's own train() may do more
            module.training = mode
        return losses

    def _arm(self, merit: Merit | None, losses: Sequence[float], steps: int, flops: int) -> Arm:
        """The score of a network, the mean over all processes, and what it cost."""
        if self.trial.metric is None:
            score = sum(losses) / len(losses)
        else:
            score = checks.number("what metric(model) returns", self.trial.metric(self.model))
        told = self.together.agree((score, flops), last=False)
        mean = sum(score for score, _ in told) / len(told)
        name = NO_GROWTH if merit is None else str(merit.site)
        return Arm(name, steps, sum(flops for _, flops in told), mean if math.isfinite(mean) else None)

    def _better(self, arm: Arm, than: Arm) -> bool:
        """Whether a network is better than another one; equal is not better."""
        if arm.score is None or than.score is None:
            return arm.score is not None
        larger = self.trial.metric is not None and self.trial.mode == "max"
        return arm.score > than.score if larger else arm.score < than.score


def _equal_steps(steps: int, flops: int, larger: int) -> int:
    """How many steps of a larger network cost at most what so many of the model cost; at least one."""
    return max(1, steps * flops // max(larger, 1)) if larger > flops else steps


def _drawn(batches: Iterable[Any], steps: int) -> list[Any]:
    """So many batches, from the beginning again when they end."""
    found: list[Any] = []
    while len(found) < steps:
        before = len(found)
        found += itertools.islice(batches, steps - before)
        if len(found) == before:
            raise MeasurementError(
                f"the batches of the trial ended after {before} of {steps} steps and cannot be taken again. Give a DataLoader or a list as "
                "Trial(batches=), or an iterator that does not end."
            )
    return found
