"""One step of training in a trial: the user's own, or a plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sensli.errors import MeasurementError
from sensli.growing.following import Followers
from sensli.growing.trials.trial import EXTRAS, Trial, named
from sensli.merits.backward import LossFunction, scalar_loss, split
from sensli.modules import checks
from sensli.modules.running import device_of, run, to_device
from sensli.modules.wrappers import bare


class Steps:
    """Takes steps with what the Grower was given, and tells the loss of each."""

    def __init__(self, trial: Trial, model: nn.Module, followers: Followers, loss_fn: LossFunction | None) -> None:
        self._trial, self._model, self._followers, self._loss_fn = trial, model, followers, loss_fn
        self._extras = {} if trial.step is None else {n: getattr(followers, n) for n in named(trial.step, EXTRAS)}
        if trial.step is None and not model.training:
            model.train()  # a loop that has just evaluated would do so before its next step

    def __call__(self, batch: Any, index: int) -> float:
        # What autocast has cast of the weights it keeps until its context ends, which may be around all of the trial.
        torch.clear_autocast_cache()
        if self._trial.step is None:
            return self._plain(batch, index)
        loss = self._trial.step(self._model, self._followers.optimizer, batch, **self._extras)
        if self._trial.metric is not None:
            return 0.0  # nobody asks for it
        return checks.number("what step(model, optimizer, batch) returns", loss, "the loss of the batch, a number")

    def _plain(self, batch: Any, index: int) -> float:
        own = None if self._loss_fn is None else bare(self._model)  # without a loss all keys of a batch go to the model
        given, target = split(batch, index, own)
        device = device_of(self._model)
        for optimizer in self._followers.optimizers:
            optimizer.zero_grad()
        output = run(self._model, to_device(given, device))
        loss = scalar_loss(output, to_device(target, device), self._loss_fn, index)
        if not loss.requires_grad:
            raise MeasurementError(
                f"the loss of batch {index} of the trial has no gradient, so no step can be taken. Check that loss_fn uses the model's "
                "output and that nothing detaches it."
            )
        loss.backward()
        for optimizer in self._followers.optimizers:
            optimizer.step()
        return float(loss.detach())
