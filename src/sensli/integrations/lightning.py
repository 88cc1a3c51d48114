"""`GrowthCallback` for Lightning: one line in ``Trainer(callbacks=[...])``, with the user's own ``training_step``.

The sites are found and the merits measured by running ``training_step`` itself, so no example and no loss have to be given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sensli.errors import SensliError, UnsupportedModel
from sensli.growing.by_name import add_own_groups, arrange, freeze, frozen_in, names_in
from sensli.growing.grower import Grower
from sensli.integrations import missing
from sensli.integrations.callback import GrowingCallback
from sensli.integrations.looking import standing_in
from sensli.modules import random_state
from sensli.modules.marks import count_growths
from sensli.modules.wrappers import bare
from sensli.surgery.history.history import History
from sensli.surgery.replaying import replay

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise missing("lightning", error) from error


class GrowthCallback(GrowingCallback, Callback):  # type: ignore[misc, unused-ignore]
    """Grows the LightningModule at the end of epochs on which the trigger fires; counts epochs from 1.

    Logs after each epoch ``sensli/growths``, ``sensli/parameters`` and ``sensli/flops``, and after a look ``sensli/merit`` and
    ``sensli/ratio`` of the best site.

    Args:
        trigger: When to look, one of `sensli.growing.triggers`.
        monitor: The name of the logged metric that `triggers.Plateau` watches.
        batches: The largest number of training batches to measure on. None uses all of them.
        metrics: Whether to log (default: True).
        **options: Other arguments of `sensli.Grower`: ``tau``, ``norm``, ``select``, ``layer``, ``where``, ``lr_scale``, ...
    """

    def _prepare(self) -> None:
        self._example: Any = None  # the first batch

    @property
    def history(self) -> History:
        """All growths so far."""
        return self.grower.history if self.grower is not None else History()

    # --- the life of a fit ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not pl_module.automatic_optimization:
            raise UnsupportedModel(
                "this LightningModule steps its optimizers itself (automatic_optimization=False), so training_step cannot be run for a "
                "measurement. Call sensli.Grower in your own code instead."
            )
        # Lightning calls no callback before it starts the processes, so this is said in each of them, before the first batch.
        if any("MultiProcessing" in kind.__name__ for kind in type(trainer.strategy.launcher).__mro__):
            raise UnsupportedModel(
                "this strategy (ddp_spawn, ddp_fork, ddp_notebook) returns the trained weights to the module of the main process, which "
                "has not grown. Use strategy='ddp' in a script."
            )
        given = pl_module.on_load_checkpoint

        def grow_first(checkpoint: dict[str, Any]) -> None:
            # The callback's own hook comes after the weights; this one comes before them.
            state = checkpoint.get("callbacks", {}).get(self.state_key)
            if state and state["grower"] and not count_growths(pl_module):
                replay(pl_module, History.from_dict(state["grower"]["history"]))
            given(checkpoint)

        pl_module.on_load_checkpoint = grow_first  # type: ignore[method-assign, unused-ignore]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded and self._loaded["grower"]:
            # Before Lightning loads the optimizers' states by index: theirs is the order in which they followed the growth.
            history = History.from_dict(self._loaded["grower"]["history"])
            add_own_groups(history, trainer.optimizers, [each.scheduler for each in trainer.lr_scheduler_configs])
            for optimizer, names in zip(trainer.optimizers, self._loaded["names"], strict=True):
                arrange(optimizer, names, pl_module)
            freeze(pl_module, self._loaded.get("frozen", ()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._example is None:
            self._example = batch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._example is None:
            return  # an epoch without batches
        grower = self._made(trainer, pl_module)
        metric = self._metric(trainer)
        batches = _batches(trainer, self._batches)
        facts: dict[str, float] = {}
        # What training_step logs meanwhile goes nowhere.
        looking = standing_in(pl_module, _training_step, log=_nothing, log_dict=_nothing)
        with looking, trainer.precision_plugin.train_step_context():
            self._step(batches, _loss, metric)
            if self._metrics:
                facts = self._facts.of(grower, (self._example, 0))
        if facts:
            pl_module.log_dict(facts)

    def _made(self, trainer: Trainer, pl_module: LightningModule) -> Grower:
        if self.grower is None:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            model: Any = trainer.strategy.model  # the wrapper, where there is one
            self.grower = self._make_grower(model, trainer.optimizers, schedulers, (self._example, 0))
            if self._loaded and self._loaded["grower"]:
                self.grower.load_state_dict(self._loaded["grower"])
        return self.grower

    def _metric(self, trainer: Trainer) -> float | None:
        if self._monitor is None:
            return None
        if self._monitor not in trainer.callback_metrics:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise SensliError(f"monitor={self._monitor!r} was not logged in this epoch. Logged: {known}.")
        return float(trainer.callback_metrics[self._monitor])

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        if self.grower is None:
            return self._loaded or {"grower": None, "names": []}
        network, optimizers = bare(self.grower.model), self.grower.optimizers
        names = [names_in(each, network) for each in optimizers]
        return {"grower": self.grower.state_dict(), "names": names, "frozen": frozen_in(network)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict


def _batches(trainer: Trainer, limit: int | None) -> Iterator[Any]:
    # A generator, so that the loader's iterator, which draws a random number, is made inside of the measurement.
    loader: Any = trainer.train_dataloader or ()
    with random_state.kept_of_loader(loader):
        for index, batch in enumerate(itertools.islice(loader, limit)):
            yield (trainer.strategy.batch_to_device(batch), index), None


def _loss(output: Any, _: None) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output
    return loss


def _training_step(module: LightningModule, batch: Any, index: int) -> Any:
    return module.training_step(batch, index)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
