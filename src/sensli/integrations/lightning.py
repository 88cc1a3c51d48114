"""`GrowthCallback` for Lightning: one line in ``Trainer(callbacks=[...])``, with the user's own ``training_step``.

The sites are found and the merits measured by running ``training_step`` itself, so no example and no loss have to be given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sensli.checkpoint.states import arrange, follow_groups, freeze, frozen_in, names_in
from sensli.errors import SensliError, UnsupportedModel
from sensli.growing.grower import Grower
from sensli.growing.options import Trial
from sensli.growing.price import CheckPrice
from sensli.integrations import callback, missing_library
from sensli.integrations.callback import GrowingCallback, Update, standing_in
from sensli.modules import random_state
from sensli.modules.grown import count_growths
from sensli.modules.random_state import kept_of_loader
from sensli.modules.running import count_samples
from sensli.modules.wrappers import bare
from sensli.surgery.averaging import Averaged
from sensli.surgery.history import History
from sensli.surgery.rewinding import carried_history, rewind
from sensli.surgery.warmup import watch_steps

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise missing_library("lightning", error) from error


_WEIGHTS_ONLY = "sensli"  # where a checkpoint without the states of callbacks (save_weights_only) has the growths
_CURE = (
    "Average by EMAWeightAveraging or WeightAveraging of Lightning, or keep a torch.optim.swa_utils.AveragedModel of the module or of a "
    "part of it."
)


def grow_like(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Give a module the layers that the weights of a checkpoint belong to: insert those that it lacks, remove those that came later.

    One line in a module, ``def on_load_checkpoint(self, checkpoint): grow_like(self, checkpoint)``, lets ``load_from_checkpoint`` and a
    Trainer without the callback read checkpoints of a training that grew. A checkpoint of one that did not changes nothing.

    Args:
        module: The LightningModule, as it was before its first growth or grown.
        checkpoint: What Lightning hands to ``on_load_checkpoint``.

    Raises:
        HistoryError: If the growths do not fit the module. Nothing was changed.
    """
    _grow_like(module, checkpoint)


def _grow_like(module: LightningModule, checkpoint: dict[str, Any], averaged: Averaged = None) -> None:
    for state in (*checkpoint.get("callbacks", {}).values(), checkpoint.get(_WEIGHTS_ONLY)):
        if isinstance(state, dict) and isinstance(state.get("grower"), dict):
            rewind(module, carried_history(module), _history_of(state), averaged=averaged)
            return


class GrowthCallback(GrowingCallback, Callback):  # type: ignore[misc, unused-ignore]
    """Grows the LightningModule at the end of epochs on which the trigger fires; counts epochs from 1.

    Logs after each epoch ``sensli/growths``, ``sensli/parameters`` and ``sensli/flops``, and after a look ``sensli/merit`` and
    ``sensli/ratio`` of the best site.

    With ``trial=`` the steps of a trial run ``training_step`` on training batches, with the Trainer's optimizer, clipping and schedulers
    that step with it. The winner's steps have trained the module, but ``trainer.global_step`` counts those of the Trainer's loop alone.
    Callbacks and the module's hooks are not called for them, and nothing is logged.

    Averages follow: those of ``WeightAveraging``, ``EMAWeightAveraging`` and ``StochasticWeightAveraging``, and each `AveragedModel` that
    the module or a callback keeps. What a callback keeps in a way that cannot follow is refused before the first step.

    Args:
        trigger: When to check, one of `sensli.triggers`. None takes that of the preset.
        preset: As in `sensli.Grower` (default: "auto").
        monitor: The name of the logged metric that `triggers.Plateau` watches and the animation shows.
        batches: The largest number of training batches to measure on. None uses all of them.
        watch: Decide by so many of the last updates before a check, as `sensli.Grower.watch` does, instead of measuring on batches. None
            measures.
        metrics: Whether to log (default: True).
        **options: Other arguments of `sensli.Grower`: ``tau``, ``norm``, ``select``, ``form``, ``where``, ``rates``, ...
    """

    def _prepare(self) -> None:
        self._example: Any = None  # the first batch
        self._random: dict[str, Any] | None = None  # the random states in a checkpoint, until the training begins
        self._schedulers: list[Any] = []  # the Grower has this list itself: a callback may exchange a scheduler
        self._batches_seen = 0  # of a fit, before and after its first step

    @property
    def history(self) -> History:
        """All growths so far."""
        if self.grower is not None:
            return self.grower.history
        return _history_of(self._resumed) if self._resumed else History()

    @property
    def _resumed(self) -> dict[str, Any] | None:
        """The state that a checkpoint brought, if the model had begun to grow by then."""
        return self._loaded if self._loaded and self._loaded["grower"] else None

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
        if any(isinstance(each, ModelPruning) for each in _callbacks(trainer)):
            raise UnsupportedModel(
                "ModelPruning keeps masks and a list of the layers that it prunes, and neither follows a growth. Prune the module when "
                "it has grown, in a fit without GrowthCallback."
            )
        if stage == "fit":
            self._batches_seen = 0
            self._forget_averages()
        if stage == "fit" and self.grower is not None:
            # Of an earlier fit: this one has its own optimizers, and another module has no growths yet.
            state, self.grower = self.state_dict(), None
            self._loaded = state if len(_history_of(state)) == count_growths(pl_module) else None
        self._wrap(trainer, pl_module)

    def _wrap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hooks of the module that do what a callback's cannot: before the weights are loaded, and in checkpoints of weights alone."""
        load, save = (
            getattr(hook, "given", hook)  # set up again by every stage, and once is enough
            for hook in (pl_module.on_load_checkpoint, pl_module.on_save_checkpoint)
        )

        def grow_first(checkpoint: dict[str, Any]) -> None:
            self._look_for_averages([*_callbacks(trainer), pl_module], pl_module, _CURE)
            _grow_like(pl_module, checkpoint, self._averages)
            load(checkpoint)

        def save_growths(checkpoint: dict[str, Any]) -> None:
            if "callbacks" not in checkpoint and self.history:
                checkpoint[_WEIGHTS_ONLY] = {"grower": {"history": self.history.to_dict()}}
            save(checkpoint)

        grow_first.given, save_growths.given = load, save  # type: ignore[attr-defined]
        pl_module.on_load_checkpoint = grow_first  # type: ignore[method-assign, unused-ignore]
        pl_module.on_save_checkpoint = save_growths  # type: ignore[method-assign, unused-ignore]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.options.trial is not None:
            check_fit(trainer, pl_module)
        state = self._resumed
        if state is not None:
            # Before Lightning loads the optimizers' states by index: theirs is the order in which they followed the growth.
            finetunings = list(_finetuning(trainer))
            for finetuning in finetunings:
                finetuning.on_fit_start(trainer, pl_module)  # once, whichever comes first: it restores groups it added
            saved, found = sum(map(len, state["names"])), sum(len(each.param_groups) for each in trainer.optimizers)
            if not finetunings or found < saved:
                schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
                follow_groups(_history_of(state), trainer.optimizers, schedulers, state["names"], pl_module)
            for optimizer, names in zip(trainer.optimizers, state["names"], strict=True):
                arrange(optimizer, names, pl_module)
            freeze(pl_module, state.get("frozen", ()))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        watch_steps(trainer.optimizers)  # after Lightning has loaded their states
        self._early: CheckPrice | None = CheckPrice(None, trainer.optimizers)  # counts steps until there is a Grower

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Once after a resume. Each process draws its own numbers, and a checkpoint has those of the first one only.
        if self._random is not None and trainer.world_size == 1:
            random_state.restore(self._random)
            fetcher: Any = trainer.fit_loop._data_fetcher
            loaders = () if fetcher is None else fetcher.combined_loader.flattened
            if fetcher is not None and not any(hasattr(each, "state_dict") for each in loaders):
                # Lightning has begun the epoch's batches before: their order is drawn from the restored state
                iter(fetcher)
        self._random = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._example is None:
            self._example = batch
        if self._batches_seen < 2:
            self._batches_seen += 1
            self._look_for_averages([*_callbacks(trainer), pl_module], pl_module, _CURE)
            self._check_averages(pl_module, trainer.optimizers)
        update, inside = divmod(batch_idx, trainer.accumulate_grad_batches)
        updates: float = trainer.num_training_batches / trainer.accumulate_grad_batches
        left = updates if updates == math.inf else math.ceil(updates) - update
        if inside == 0 and not _is_over(trainer) and self._is_watched(left):
            self._open_watch(trainer, pl_module)

    def _open_watch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._schedulers[:] = [config.scheduler for config in trainer.lr_scheduler_configs]
        with _looking(pl_module), trainer.precision_plugin.train_step_context():
            watch = self._made(trainer, pl_module).watch(scaler=getattr(trainer.precision_plugin, "scaler", None))
            self._watch = watch.__enter__()
        pl_module.__dict__["training_step"] = _called(pl_module)

    def _close_watch(self, failed: BaseException | None = None) -> None:
        if self._watch is not None and self.grower is not None:
            bare(self.grower.model).__dict__.pop("training_step", None)
        super()._close_watch(failed)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._watch is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._watch.add_loss(loss)
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or batch_idx + 1 == trainer.num_training_batches:
            self._close_watch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close_watch(exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_watch(SensliError("the training has ended within an update"))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._example is None or _is_over(trainer):
            return  # an epoch without batches, or one of averaging alone
        self._look_for_averages([*_callbacks(trainer), pl_module], pl_module, _CURE)
        self._check_averages(pl_module, trainer.optimizers)
        self._schedulers[:] = [config.scheduler for config in trainer.lr_scheduler_configs]
        grower = self._made(trainer, pl_module)
        metric = self._metric(trainer)
        batches = _batches(trainer, self._batches)
        facts: dict[str, float] = {}
        with _looking(pl_module), trainer.precision_plugin.train_step_context():
            before = len(grower.history)
            self._step(batches, _loss, metric)
            if self._metrics:
                facts = self._facts.of(grower, (self._example, 0))
        if len(grower.history) > before:
            for finetuning in _finetuning(trainer):
                _tell(finetuning, trainer.optimizers, pl_module)
        if facts:
            pl_module.log_dict(facts)

    def _made(self, trainer: Trainer, pl_module: LightningModule) -> Grower:
        if self.grower is None:
            model: Any = trainer.strategy.model  # the wrapper, where there is one
            trial = self.options.trial and make_trial(self.options.trial, trainer, pl_module)
            self.grower = self._make_grower(model, trainer.optimizers, self._schedulers, (self._example, 0), trial)
            if self._resumed is not None:
                self.grower.load_state_dict(self._resumed["grower"])
            if self._early is not None:
                self.grower.add_steps(self._early.steps)
                self._early = None
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
            return {**(self._loaded or {"grower": None, "names": []}), "random": random_state.capture()}
        network, optimizers = bare(self.grower.model), self.grower.optimizers
        names = [names_in(each, network) for each in optimizers]
        return {
            "grower": self.grower.state_dict(),
            "names": names,
            "frozen": frozen_in(network),
            "random": random_state.capture(),  # Lightning does not save them
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded, self.grower = state_dict, None
        self._random = state_dict.get("random")


def _callbacks(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)


def _is_over(trainer: Trainer) -> bool:
    """Whether `StochasticWeightAveraging` has put the average into the module, and runs an epoch more for its batch norms."""
    averaging = [each for each in _callbacks(trainer) if isinstance(each, StochasticWeightAveraging)]
    return any(each._max_epochs != -1 and trainer.current_epoch > each.swa_end for each in averaging)


def _finetuning(trainer: Trainer) -> list[BaseFinetuning]:
    return [each for each in _callbacks(trainer) if isinstance(each, BaseFinetuning)]


def _tell(finetuning: BaseFinetuning, optimizers: list[Any], module: LightningModule) -> None:
    """Its record of the groups, by names, from which a resumed fit restores them: it notes new groups alone."""
    names: dict[Any, Any] = {parameter: name for name, parameter in module.named_parameters()}
    for index in finetuning._internal_optimizer_metadata:
        groups = optimizers[index].param_groups
        finetuning._internal_optimizer_metadata[index] = finetuning._apply_mapping_to_param_groups(groups, names)


def _history_of(state: dict[str, Any]) -> History:
    return History.from_dict(state["grower"]["history"])


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


def _looking(module: LightningModule) -> AbstractContextManager[None]:
    """Calling the module runs its training_step; what that logs meanwhile goes nowhere."""
    return standing_in(module, _training_step, log=_nothing, log_dict=_nothing)


def _called(module: LightningModule) -> Callable[..., Any]:
    """The module's training_step inside of a call of the module: the hooks there tell where a pass begins and ends."""
    own = module.training_step

    def step(*args: Any, **kwargs: Any) -> Any:
        with standing_in(module, lambda _, *given, **named: own(*given, **named)):
            return module(*args, **kwargs)

    step.__wrapped__ = own  # type: ignore[attr-defined]  # Lightning asks for the names of its arguments
    return step


# ---- A trial inside of a Lightning fit: its steps are those that the Trainer would take.

# What a module may do differently at a step, and a trial does not do.
_HOOKS = ("optimizer_step", "optimizer_zero_grad", "backward", "lr_scheduler_step")


class LightningUpdates:
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


def make_trial(trial: Trial, trainer: Trainer, module: LightningModule) -> Trial:
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

    return callback.complete_trial(trial, module, LightningUpdates(trainer), step)


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
    raise callback.refuse_trial(reason)


def _watching(config: Any) -> bool:
    return isinstance(config.scheduler, ReduceLROnPlateau) or config.frequency != 1
