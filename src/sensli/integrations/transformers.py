"""`GrowthCallback` for the Trainer of Hugging Face: one entry in ``Trainer(callbacks=[...])``, with the Trainer's own loss and data.

Merits are measured by ``compute_loss`` on the batches of the training loader, so no example and no loss have to be given.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sensli.errors import CheckpointError, SensliError, UnsupportedModel
from sensli.growing.by_name import arrange, follow_groups, freeze, frozen_in, names_in
from sensli.integrations import missing
from sensli.integrations.callback import GrowingCallback
from sensli.integrations.looking import Facts, standing_in
from sensli.modules import checks, random_state
from sensli.modules.wrappers import bare
from sensli.surgery.history.history import History
from sensli.surgery.rewinding import rewind
from sensli.surgery.state.optim import as_optimizers
from sensli.text.names import TRAINER_FILE

try:
    from transformers import Trainer, TrainerCallback, __version__

    from sensli.integrations import hf_folder, hf_trainer, hf_trial
except ImportError as error:
    raise missing("transformers", error) from error


_CURE = "Let the callback keep a torch.optim.swa_utils.AveragedModel of the model instead: it follows."


class GrowthCallback(GrowingCallback, TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Grows the Trainer's model at the end of epochs on which the trigger fires; every ``train()`` counts its epochs from 1.

    Logs after each epoch ``sensli/growths``, ``sensli/parameters`` and ``sensli/flops``, and after a look ``sensli/merit`` and
    ``sensli/ratio`` of the best site. Checkpoints contain the file ``sensli.json``, from which ``resume_from_checkpoint`` grows
    the small model again.

    With ``trial=`` a step of a trial is one update of the Trainer, with its own training step, accumulation, precision, clipping and
    optimizer, on batches of the next epoch. The winner's updates have trained the model, but ``global_step`` and the schedule count those
    of the Trainer's loop alone. Other callbacks are not called for them, and nothing is logged.

    An `AveragedModel` in ``averaged=``, or one that another callback keeps, follows. What a callback keeps in a way that cannot follow
    is refused before the first step.

    Args:
        trigger: When to look, one of `sensli.triggers`.
        monitor: The name of the logged number that `triggers.Plateau` watches and the animation shows: ``"eval_loss"``, ``"loss"``.
        batches: The largest number of training batches to measure on. None uses all of them.
        metrics: Whether to log (default: True).
        **options: Other arguments of `sensli.Grower`: ``tau``, ``norm``, ``select``, ``layer``, ``where``, ``lr_scale``, ...
    """

    _metric_name = "eval_loss"

    def _prepare(self) -> None:
        self._fresh = self.options.trigger.state_dict()
        self.trainer: Trainer | None = None
        self._history = History()
        self._network: nn.Module | None = None  # whose growths the history tells of
        self._counted = -1  # the step at which an epoch was counted last
        self._waiting = False  # for the monitored number
        self._steps_seen = 0  # of a training, before and after its first step

    @property
    def history(self) -> History:
        """All growths of the model so far."""
        return self._history

    def attach(self, trainer: Trainer) -> None:
        """Join a Trainer. ``Trainer(callbacks=[...])`` does this itself; call it after ``trainer.add_callback(...)`` to resume.

        Args:
            trainer: The Trainer.

        Raises:
            SensliError: If the callback belongs to another Trainer already.
            UnsupportedModel: If the Trainer cannot grow its model, with the reason.
        """
        checks.instance("trainer", trainer, Trainer, "a transformers.Trainer")
        if self.trainer is trainer:
            return
        if self.trainer is not None:
            raise SensliError(
                "this GrowthCallback belongs to another Trainer already. Make a new one for this Trainer."
            )
        self._check(trainer)
        around = (
            self._load_from_checkpoint, self._load_best_model, self._load_optimizer_and_scheduler, self._save,
            self._issue_warnings_after_load,
        )  # fmt: skip
        for method in around:
            if not hasattr(trainer, method.__name__):
                raise UnsupportedModel(
                    f"transformers {__version__} has no Trainer.{method.__name__}, which checkpoints of a growing model need. "
                    "Use a version this release of sensli was tested with (5.22)."
                )
        for method in around:
            # On this Trainer alone, around its own methods: a subclass may have overridden them.
            setattr(trainer, method.__name__, functools.partial(method, getattr(trainer, method.__name__)))
        self.trainer = trainer

    def _check(self, trainer: Trainer) -> None:
        hf_trainer.check(trainer, self._monitor)
        if self.options.trial is not None:
            hf_trial.check(trainer)

    # --- the life of a training ---

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = hf_trainer.calling_trainer(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if self.trainer is None:
            self._attach_late(state)
        trainer = self._trainer
        self._check(trainer)  # once more: the arguments may have been changed since
        network = bare(trainer.model_wrapped)
        self._steps_seen, self._copies = 0, None
        if self._network is not network:
            self._forget_averages()
        self._look_for_averages(trainer.callback_handler.callbacks, network, _CURE)
        # Growths stay with their model; another model (model_init=) starts without any.
        self._history = History(self._history if self._network is network else ())
        self._network, self._counted, self._waiting, self._facts = network, -1, False, Facts()
        self.options.trigger.load_state_dict(self._fresh)
        own = "example" in self._given
        self._example = self._given["example"] if own else hf_trainer.example_of(trainer, train_dataloader)
        trial = self.options.trial and hf_trial.made(self.options.trial, trainer)
        self.grower = self._make_grower(
            trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, self._example, trial
        )
        self.grower.history = self._history
        if self._loaded is not None:
            self.grower.load_state_dict(self._loaded["grower"])
            self._history = self.grower.history
            freeze(network, self._loaded.get("frozen", ()))
            self._loaded = None
        with standing_in(network, hf_trainer.loss_step(trainer)):
            self.grower.sites()  # a model without a place to grow should fail before it is trained

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._has_come(state)
        if self._steps_seen < 2:
            # Not only when the training begins: a callback after this one may make its average then.
            self._steps_seen += 1
            trainer = self._trainer
            self._look_for_averages(trainer.callback_handler.callbacks, trainer.model_wrapped, _CURE)
            self._check_averages(trainer.model_wrapped, as_optimizers(trainer.optimizer))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Here and not in on_epoch_end: a checkpoint of the last step is written in between, and must hold the growth.
        if _is_whole(state.epoch):
            late = self._monitor is not None and hf_trainer.monitored(args, self._monitor) == "epoch"
            if not late:
                self._epoch_over(state, control, kwargs["train_dataloader"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # An epoch that the end of the training cut off does not count: a resumed run may complete it.
        if _is_whole(state.epoch) or not control.should_training_stop:
            self._epoch_over(state, control, kwargs["train_dataloader"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._waiting and self._monitor in (logs or ()):
            self._waiting = False
            self._look(kwargs["train_dataloader"], control, float(logs[self._monitor]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._has_come(state)

    def _epoch_over(self, state: Any, control: Any, loader: Any) -> None:
        if self._counted == state.global_step:
            return
        self._counted = state.global_step
        if self._monitor is None:
            self._look(loader, control, None)
        elif control.should_evaluate if self._monitor.startswith("eval_") else control.should_log:
            self._waiting = True  # it is logged after this, and before a checkpoint is written
        else:
            self._look(loader, control, self._last_logged(state))

    def _look(self, loader: Any, control: Any, metric: float | None) -> None:
        trainer, grower = self._trainer, self.grower
        assert grower is not None
        network, facts, trial = bare(grower.model), {}, grower.options.trial
        self._look_for_averages(trainer.callback_handler.callbacks, network, _CURE)
        self._check_averages(network, as_optimizers(trainer.optimizer))
        batches = hf_trainer.batches_of(trainer, loader, self._batches)
        looks = grower.history.record.looks
        known = len(looks)
        if trial is not None:
            assert isinstance(trial.batches, hf_trial.Updates)
            trial.batches.loader = loader
        with hf_trainer.aside(trainer), standing_in(network, hf_trainer.loss_step(trainer)):
            self._step(batches, _loss, metric)
            trained = random_state.capture()
            if self._metrics:
                facts = self._facts.of(grower, self._example)
        if any(
            look.tried for look in looks[known:]
        ):  # the winner's updates were training, and have drawn their numbers
            random_state.restore(trained)
        if facts:
            log = control.should_log
            trainer.log(facts)
            control.should_log = log  # otherwise the Trainer would take its own numbers for logged too

    def _last_logged(self, state: Any) -> float:
        for logs in reversed(state.log_history):
            if self._monitor in logs:
                return float(logs[self._monitor])
        known = ", ".join(sorted({name for logs in state.log_history for name in logs})) or "none"
        raise SensliError(f"monitor={self._monitor!r} was not logged before it was needed. Logged so far: {known}.")

    def _has_come(self, state: Any) -> None:
        if self._waiting:
            self._waiting = False
            self._last_logged(state)  # raises if it was never logged

    def _attach_late(self, state: Any) -> None:
        trainer = hf_trainer.calling_trainer(self)
        if trainer is None:
            raise SensliError("this GrowthCallback has no Trainer. Call growth.attach(trainer) before trainer.train().")
        if state.global_step > 0:
            raise SensliError(
                "this GrowthCallback was added too late: the weights of the checkpoint were loaded before it could grow the model. Give it "
                "to Trainer(callbacks=[...]), or call growth.attach(trainer) before trainer.train(resume_from_checkpoint=...)."
            )
        self.attach(trainer)

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    # --- checkpoints: these wrap methods of the Trainer and have their names ---

    def _save(self, given: Any, output_dir: str | None = None, state_dict: Any = None) -> Any:
        folder = Path(output_dir or str(self._trainer.args.output_dir))
        # Before the weights: a run that is killed in between leaves no grown weights without their history.
        hf_folder.write(folder, self._state())
        with hf_trainer.names_of_today(bare(self._trainer.model_wrapped), folder.name):
            return given(output_dir, state_dict)

    def _load_from_checkpoint(self, given: Any, resume_from_checkpoint: str, model: Any = None) -> Any:
        if not Path(resume_from_checkpoint).is_dir():
            return given(resume_from_checkpoint, model)  # which reports it
        state = hf_folder.read(Path(resume_from_checkpoint))
        self._rewind(state)
        result = given(resume_from_checkpoint, model)
        self._loaded = state
        return result

    def _load_best_model(self, given: Any) -> Any:
        self._rewind(hf_folder.read(Path(str(self._trainer.state.best_model_checkpoint))))
        return given()

    def _load_optimizer_and_scheduler(self, given: Any, checkpoint: str | None) -> Any:
        if checkpoint is not None and self._loaded is not None and self._loaded["names"]:
            # The saved state is numbered in the order in which that optimizer followed the growths.
            network = bare(self._trainer.model_wrapped)
            optimizer, scheduler = self._trainer.optimizer, self._trainer.lr_scheduler
            follow_groups(self._history, optimizer, scheduler, self._loaded["names"], network)
            for each, names in zip(as_optimizers(optimizer), self._loaded["names"], strict=True):
                arrange(each, names, network)
        return given(checkpoint)

    def _issue_warnings_after_load(self, given: Any, load_result: Any) -> Any:
        network = bare(self._trainer.model_wrapped)
        homeless = hf_trainer.homeless(network, load_result.unexpected_keys)
        if homeless:
            raise CheckpointError(
                f"the checkpoint contains weights that this model does not have: {homeless[0]} ({len(homeless)} such). "
                f"Its {TRAINER_FILE} is missing or belongs to another model. Give the Trainer the model that growing began "
                "with, and the folder as it was saved."
            )
        lacking = hf_trainer.not_loaded(network, load_result.missing_keys)
        if self._history and lacking:
            raise CheckpointError(
                f"the model has weights that the checkpoint lacks: {lacking[0]} ({len(lacking)} such). Give the Trainer the small model "
                f"that growing began with, not a grown one: the layers in {TRAINER_FILE} are inserted again."
            )
        return given(load_result)

    def _state(self) -> dict[str, Any]:
        network = bare(self._trainer.model_wrapped)
        if self.grower is None or self._network is not network:
            return self._loaded or {"grower": None, "names": []}
        optimizers = self.grower.optimizers if self._history else ()
        names = [names_in(each, network) for each in optimizers]
        return {"grower": self.grower.state_dict(), "names": names, "frozen": frozen_in(network)}

    def _rewind(self, state: dict[str, Any] | None) -> None:
        """Give the model the layers that the weights to be loaded belong to."""
        trainer = self._trainer
        network = bare(trainer.model_wrapped)
        if self._network is not network:
            self._network, self._history = network, History()
            self._forget_averages()
        wanted = History.from_dict(state["grower"]["history"]) if state is not None else History()
        self._look_for_averages(trainer.callback_handler.callbacks, network, _CURE)
        rewind(
            trainer.model_wrapped, self._history, wanted, optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler,
            averaged=self._averages,
        )  # fmt: skip


def _is_whole(epoch: float | None) -> bool:
    return epoch is not None and epoch == int(epoch)


def _loss(loss: Any, _: None) -> Tensor:
    found: Tensor = loss[0] if isinstance(loss, tuple) else loss
    return found
