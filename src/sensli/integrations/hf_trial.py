"""A trial inside of a training with the Hugging Face Trainer: its steps are those that the Trainer's loop would take."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from transformers import Trainer

from sensli.growing.trials.trial import Trial
from sensli.integrations import hf_trainer, trying
from sensli.integrations.looking import itself
from sensli.integrations.trying import Update
from sensli.modules.random_state import kept_of_loader
from sensli.modules.samples import count_samples
from sensli.modules.wrappers import bare

# What a subclass may do otherwise at an update, which a trial would not do.
_LOOP = ("_inner_training_loop", "_run_epoch")
_INSIDE_OF_BACKWARD = ("lomo", "layerwise")  # optimizers that have no step of their own


def check(trainer: Trainer) -> None:
    """Refuse a training whose updates cannot be made outside of the Trainer's loop."""
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    for name in _LOOP:
        if getattr(type(trainer), name, None) is not getattr(Trainer, name, None):
            raise trying.refused(f"{type(trainer).__name__} has its own {name}")
    if any(kind in optimizer for kind in _INSIDE_OF_BACKWARD):
        raise trying.refused(f"the optimizer (optim={optimizer!r}) steps inside of the backward pass")


class Updates:
    """The training batches of the next epoch, one update at a time, from the beginning as often as they are asked for."""

    def __init__(self, trainer: Trainer, as_trained: Any) -> None:
        self.trainer, self._as_trained = trainer, as_trained
        self.loader: Any = None  # the training loader, which a callback is given at every look

    def __iter__(self) -> Iterator[tuple[Tensor, Update]]:
        trainer = self.trainer
        with kept_of_loader(self.loader):
            hf_trainer.set_epoch(self.loader, math.ceil(trainer.state.epoch or 0))
            batches = iter(self.loader)
            while True:
                with self._as_trained():
                    samples, items = trainer.get_batch_samples(
                        batches, trainer.args.gradient_accumulation_steps, trainer.args.device
                    )
                if not samples:
                    return
                yield Update(samples, items).counted(sum(count_samples(dict(inputs)) for inputs in samples))


def made(trial: Trial, given: Trainer) -> Trial:
    """The trial with the Trainer's updates: accumulation, precision and clipping are its own.

    The schedule stays where it is: it is made for the updates of the Trainer's own loop, and would end before them.
    """
    trainer: Any = given
    args, accelerator, network = trainer.args, trainer.accelerator, bare(trainer.model_wrapped)
    averaged = args.average_tokens_across_devices

    @contextmanager
    def as_trained() -> Iterator[None]:
        # For a look tokens are counted on this process alone.
        now, args.average_tokens_across_devices = args.average_tokens_across_devices, averaged
        try:
            yield
        finally:
            args.average_tokens_across_devices = now

    def step(model: Any, optimizer: Any, batch: tuple[Tensor, Update]) -> float:
        samples, items = batch[1].batches, batch[1].items
        trainer.current_gradient_accumulation_steps = len(samples)
        total = 0.0
        with itself(network), as_trained():
            for index, inputs in enumerate(samples):
                last = index == len(samples) - 1
                accelerator.gradient_state._set_sync_gradients(last)
                with nullcontext() if last else accelerator.no_sync(model=model):
                    # A copy, because the step may take the labels out, and all networks of a trial are given the same batches.
                    total += float(trainer.training_step(model, copy.copy(inputs), items))
            if args.max_grad_norm:
                trainer._clip_grad_norm(model)
            trainer.optimizer.step()
            model.zero_grad()
        return total

    return trying.made(trial, network, Updates(trainer, as_trained), step)
