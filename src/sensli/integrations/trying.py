"""What the callbacks of different trainers share when they try growths: the trial with the trainer's own steps, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedModel
from sensli.growing.trials.trial import Trial
from sensli.integrations.looking import itself


class Update:
    """The batches of one update of a trainer: several where it accumulates gradients; and the number of items in them, if it is counted."""

    def __init__(self, batches: list[Any], items: Any = None) -> None:
        self.batches, self.items = batches, items

    def counted(self, samples: int) -> tuple[Tensor, Update]:
        """As a `Trial` takes it: its FLOPs are counted by the length of the first tensor."""
        return torch.empty(1, dtype=torch.int8, device="cpu").expand(samples), self


def check_trial(trial: Trial) -> None:
    """Refuse what the trainer decides."""
    for name in ("step", "batches"):
        if getattr(trial, name) is not None:
            raise UnsupportedModel(
                f"Trial({name}=) is not an option in GrowthCallback: a trial trains with the trainer's own training step, optimizer and "
                "training batches. Leave it out."
            )


def refused(reason: str) -> UnsupportedModel:
    """For a training whose steps cannot be taken outside of the trainer's loop."""
    return UnsupportedModel(
        f"trial= cannot be used in this training: {reason}, which the steps of a trial would not follow. Leave trial= out, or use "
        "sensli.Grower in your own loop, with Trial(step=)."
    )


def made(trial: Trial, module: nn.Module, batches: Iterable[Any], step: Callable[[Any, Any, Any], float]) -> Trial:
    """The trial with the trainer's step and batches; its metric is given the module with its own forward."""
    metric = trial.metric

    def measured(model: Any) -> Any:
        assert metric is not None
        with itself(module):
            return metric(module)

    return Trial(
        trial.steps, candidates=trial.candidates, batches=batches, step=step, last=trial.last, mode=trial.mode,
        metric=None if metric is None else measured, stateful=trial.stateful,
    )  # fmt: skip
