"""What the `GrowthCallback` of every trainer begins with: its arguments, checked when it is made, and the Grower made of them later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch import nn

from sensli.growing.grower import Grower
from sensli.growing.options import Options
from sensli.growing.trials.trial import Trial
from sensli.growing.trigger import Trigger
from sensli.integrations.averages import kept_by
from sensli.integrations.looking import Facts
from sensli.integrations.trying import check_trial
from sensli.merits.backward import LossFunction
from sensli.modules import checks
from sensli.surgery.averaging import as_list, check_alike
from sensli.surgery.handmade import Copies

_OF_THE_TRAINER = ("model", "optimizer", "scheduler", "unit")  # a trainer's callback counts epochs
_OF_THE_MODEL = ("example", "averaged")  # options of a Grower that are not among `Options`


class GrowingCallback:
    """The constructor of the callbacks. Wrong arguments are refused here, not after the first epoch."""

    _metric_name = "val_loss"  # what a metric is called with this trainer

    def __init__(
        self,
        trigger: Trigger,
        *,
        monitor: str | None = None,
        batches: int | None = None,
        metrics: bool = True,
        **options: Any,
    ) -> None:
        if monitor is not None:
            checks.instance("monitor", monitor, str, "the name of a metric (for example 'val_loss')")
        self._monitor = monitor
        self._batches = None if batches is None else checks.whole("batches", batches, 10)
        self._metrics = checks.flag("metrics", metrics)
        _check_names(options)
        self._given = {name: options.pop(name) for name in _OF_THE_MODEL if name in options}
        if "example" in self._given:
            checks.example("example", self._given["example"])
        self.options = Options(trigger=trigger, **options)
        if trigger.needs_metric and monitor is None:
            raise ValueError(
                f"monitor must be the name of a metric (for example {self._metric_name!r}) with trigger={trigger!r}, which watches one. "
                "Got None."
            )
        if self.options.trial is not None:
            check_trial(self.options.trial)
        self.grower: Grower | None = None  # made when there is a batch
        # Those that are given and those that other callbacks keep. The Grower has this list itself: one may come later.
        self._averages = as_list(self._given.pop("averaged", None))
        self._given_averages = tuple(self._averages)
        self._copies: Copies | None = None  # those that the model had before its first step
        self._loaded: dict[str, Any] | None = None  # the state from a checkpoint, until the grower has it
        self._facts = Facts()
        self._prepare()

    def _prepare(self) -> None:
        """Set what only this trainer's callback has."""

    def _make_grower(
        self, model: nn.Module, optimizer: Any, scheduler: Any, example: Any, trial: Trial | None = None
    ) -> Grower:
        """The Grower for what the trainer has by now; an example of the user's own comes first."""
        given = {"example": example, **self._given, **vars(self.options), "trial": trial}
        return Grower(model, optimizer, scheduler=scheduler, averaged=self._averages, **given)

    def _forget_averages(self) -> None:
        """Those of another training."""
        self._averages[:] = self._given_averages
        self._copies = None

    def _look_for_averages(self, callbacks: Iterable[Any], model: nn.Module, cure: str) -> None:
        """What the other callbacks of the trainer keep of the model follows too, or is refused."""
        others = (each for each in callbacks if each is not self)
        for average in kept_by(others, model, cure):
            if not any(average is each for each in self._averages):
                self._averages.append(average)

    def _check_averages(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        """Before the first step and after it: all that follows belongs to the model, and the model has no average made by hand."""
        if self._copies is None:
            check_alike(model, self._averages)
            self._copies = Copies(model)
        elif self.grower is None or not self.grower.history:
            self._copies.check(optimizers)

    def _step(self, batches: Iterable[Any], loss_fn: LossFunction, metric: float | None) -> None:
        """One call of the Grower; its record learns what the metric is called."""
        assert self.grower is not None
        self.grower.history.record.metric = self._monitor
        self.grower.step(batches, loss_fn, metric=metric)


def _check_names(options: dict[str, Any]) -> None:
    known = [*_OF_THE_MODEL, *(each.name for each in fields(Options) if each.name not in ("trigger", *_OF_THE_TRAINER))]
    for name in options:
        if name in _OF_THE_TRAINER:
            raise TypeError(f"{name}= belongs to the trainer: leave it out, the callback takes it from there.")
        if name not in known:
            raise TypeError(f"{name}= is not an option of GrowthCallback. Its options are {', '.join(sorted(known))}.")
