"""A trial inside of a Lightning fit: its steps are those that the Trainer would take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sensli.growing.trials.trial import Trial
from sensli.integrations import trying
from sensli.integrations.trying import Update
from sensli.modules.random_state import kept_of_loader
from sensli.modules.samples import count_samples

# What a module may do differently at a step, and a trial does not do.
_HOOKS = ("optimizer_step", "optimizer_zero_grad", "backward", "lr_scheduler_step")


class Updates:
    """The training batches, one update at a time, from the beginning as often as they are asked for; the loader's state is kept."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[tuple[Tensor, Update]]:
        loader: Any = self.trainer.train_dataloader or ()
        with kept_of_loader(loader):
            batches = enumerate(loader)
            while found := list(itertools.islice(batches, self.trainer.accumulate_grad_batches)):
                moved = [(self.trainer.strategy.batch_to_device(batch), index) for index, batch in found]
                yield Update(moved).counted(sum(count_samples(batch) for batch, _ in moved))


def made(trial: Trial, trainer: Trainer, module: LightningModule) -> Trial:
    """The trial with the Trainer's step and batches."""

    def step(model: Any, optimizer: Any, batch: tuple[Tensor, Update]) -> float:
        ours, batches, losses = trainer.optimizers[0], batch[1].batches, list[float]()
        ours.zero_grad()
        for given in batches:
            # Processes share gradients with the last batch of an update, as in the Trainer's loop.
            alone = hasattr(model, "no_sync") and given is not batches[-1]
            with model.no_sync() if alone else nullcontext():
                output = model(*given)
                loss = output["loss"] if isinstance(output, dict) else output
                (loss / trainer.accumulate_grad_batches).backward()
            losses.append(float(loss.detach()))
        module.configure_gradient_clipping(ours, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        ours.step()
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler  # not one that follows a metric: `check_fit` refuses it
            if config.interval == "step":
                scheduler.step()
        return sum(losses) / len(losses)

    return trying.made(trial, module, Updates(trainer), step)


def check_fit(trainer: Trainer, module: LightningModule) -> None:
    """Refuse a fit whose steps cannot be taken outside of the Trainer's loop."""
    if len(trainer.optimizers) != 1:
        reason = f"there are {len(trainer.optimizers)} optimizers"
    elif getattr(trainer.precision_plugin, "scaler", None) is not None:
        reason = f"the loss is scaled (precision={trainer.precision!r})"
    elif any(is_overridden(name, module) for name in _HOOKS):
        reason = f"the module has its own {next(name for name in _HOOKS if is_overridden(name, module))}"
    elif any(each.interval == "step" and _watching(each) for each in trainer.lr_scheduler_configs):
        reason = "a scheduler that follows a metric, or steps less often, steps within epochs"
    else:
        return
    raise trying.refused(reason)


def _watching(config: Any) -> bool:
    return isinstance(config.scheduler, ReduceLROnPlateau) or config.frequency != 1
