"""`GrowthCallback` for the Trainer of Hugging Face: one entry in ``Trainer(callbacks=[...])``, with the Trainer's own loss and data.

Merits are measured by ``compute_loss`` on the batches of the training loader, so no example and no loss have to be given.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sensli.checkpoint.states import arrange, follow_groups, freeze, frozen_in, names_in
from sensli.errors import CheckpointError, SensliError, UnsupportedModel, brief_text
from sensli.growing.options import Trial
from sensli.integrations import callback, missing_library
from sensli.integrations.callback import GrowingCallback, LookFacts, Update, itself, standing_in
from sensli.modules import checks, random_state
from sensli.modules.engines.fsdp import reshard
from sensli.modules.random_state import kept_of_loader
from sensli.modules.running import count_samples, tensors, untouched
from sensli.modules.wrappers import bare, is_sharded, run_eagerly
from sensli.surgery.history import History
from sensli.surgery.optimizers import as_optimizers
from sensli.surgery.rewinding import rewind
from sensli.surgery.warmup import watch_steps
from sensli.text.commands import TRAINER_FILE
from sensli.text.files import write_bytes
from sensli.text.records import dumps as strict_json

try:
    from transformers import Trainer, TrainerCallback, __version__
except ImportError as error:
    raise missing_library("transformers", error) from error


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
        trigger: When to check, one of `sensli.triggers`. None takes that of the preset.
        preset: As in `sensli.Grower` (default: "auto").
        monitor: The name of the logged number that `triggers.Plateau` watches and the animation shows: ``"eval_loss"``, ``"loss"``.
        batches: The largest number of training batches to measure on. None uses all of them.
        watch: Decide by so many of the last updates before a check, as `sensli.Grower.watch` does, instead of measuring on batches. None
            measures.
        metrics: Whether to log (default: True).
        **options: Other arguments of `sensli.Grower`: ``tau``, ``norm``, ``select``, ``form``, ``where``, ``rates``, ...
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
        """Join a Trainer that was made without the callback; ``Trainer(callbacks=[...])`` does this itself.

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
            self._save_optimizer_and_scheduler, self._issue_warnings_after_load,
        )  # fmt: skip
        for method in around:
            if not hasattr(trainer, method.__name__):
                raise UnsupportedModel(
                    f"transformers {__version__} has no Trainer.{method.__name__}, which checkpoints of a growing model need. "
                    "Use a version this release of sensli was tested with (5.22)."
                )
        wrapped: list[Any] = [*around, *([] if self._steps_watched is None else [self._inner_training_loop])]
        for method in wrapped:
            # On this Trainer alone, around its own methods: a subclass may have overridden them.
            setattr(trainer, method.__name__, functools.partial(method, getattr(trainer, method.__name__)))
        self.trainer = trainer
        if not any(each is self for each in trainer.callback_handler.callbacks):
            trainer.add_callback(self)

    def _check(self, trainer: Trainer) -> None:
        check_trainer(trainer, self._monitor)
        if self.options.trial is not None:
            check_trial_loop(trainer)

    # --- the life of a training ---

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = calling_trainer(self)
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
        self._network, self._counted, self._waiting, self._facts = network, -1, False, LookFacts()
        self.options.trigger.load_state_dict(self._fresh)
        own = "example" in self._given
        self._example = self._given["example"] if own else example_of(trainer, train_dataloader)
        trial = self.options.trial and make_updates_trial(self.options.trial, trainer)
        self.grower = self._make_grower(
            trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, self._example, trial
        )
        self.grower.history = self._history
        if self._loaded is not None:
            self.grower.load_state_dict(self._loaded["grower"])
            self._history = self.grower.history
            freeze(network, self._loaded.get("frozen", ()))
            self._loaded = None
        with standing_in(network, loss_step(trainer)):
            self.grower.sites()  # a model without a place to grow should fail before it is trained

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_come(state)
        if self._steps_seen < 2:
            # Not only when the training begins: a callback after this one may make its average then.
            self._steps_seen += 1
            trainer = self._trainer
            self._look_for_averages(trainer.callback_handler.callbacks, trainer.model_wrapped, _CURE)
            self._check_averages(trainer.model_wrapped, as_optimizers(trainer.optimizer))

        self._open_watch(args, state, kwargs.get("train_dataloader"))

    def _open_watch(self, args: Any, state: Any, loader: Any) -> None:
        if self._steps_watched is None:
            return
        try:
            updates: float = math.ceil(len(loader) / args.gradient_accumulation_steps)
        except TypeError:
            updates = math.inf
        if self._is_watched(math.inf if updates == math.inf else updates - state.global_step % updates):
            assert self.grower is not None
            trainer, watch = self._trainer, self.grower.watch()
            network = bare(trainer.model_wrapped)
            with aside(trainer), standing_in(network, loss_step(trainer)):
                watch.prepare()
            self._watch = watch.__enter__()

    def _inner_training_loop(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return given(*args, **kwargs)
        except BaseException as error:
            self._close_watch(error)
            raise

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close_watch()
        # Here and not in on_epoch_end: a checkpoint of the last step is written in between, and must hold the growth.
        if _is_whole(state.epoch):
            late = self._monitor is not None and monitoring_time(args, self._monitor) == "epoch"
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
        batches = batches_of(trainer, loader, self._batches)
        looks = grower.history.record.decisions
        known = len(looks)
        if trial is not None:
            assert isinstance(trial.batches, TrainerUpdates)
            trial.batches.loader = loader
        with aside(trainer), standing_in(network, loss_step(trainer)):
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
        trainer = calling_trainer(self)
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
        write_growth_file(folder, self._state())
        with under_current_names(bare(self._trainer.model_wrapped), folder.name):
            return given(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, given: Any, output_dir: str) -> Any:
        network = bare(self._trainer.model_wrapped)
        if is_sharded(network):
            # Shards are written here, and where nothing else is written `_save` is not called.
            reshard(network)
            if self._trainer.args.should_save:
                write_growth_file(Path(output_dir), self._state())
        return given(output_dir)

    def _load_from_checkpoint(self, given: Any, resume_from_checkpoint: str, model: Any = None) -> Any:
        if not Path(resume_from_checkpoint).is_dir():
            return given(resume_from_checkpoint, model)  # which reports it
        state = read_growth_file(Path(resume_from_checkpoint))
        self._rewind(state)
        result = given(resume_from_checkpoint, model)
        self._loaded = state
        return result

    def _load_best_model(self, given: Any) -> Any:
        self._rewind(read_growth_file(Path(str(self._trainer.state.best_model_checkpoint))))
        return given()

    def _load_optimizer_and_scheduler(self, given: Any, checkpoint: str | None) -> Any:
        # The optimizer of a sharded model was there when the growths were repeated, and has followed; its state is saved by names.
        network = bare(self._trainer.model_wrapped)
        if checkpoint is None or is_sharded(network):
            with without_gradients(network, (self._loaded or {}).get("stateless", ())):
                return given(checkpoint)
        if self._loaded is not None and self._loaded["names"]:
            # The saved state is numbered in the order in which that optimizer followed the growths.
            optimizer, scheduler = self._trainer.optimizer, self._trainer.lr_scheduler
            follow_groups(self._history, optimizer, scheduler, self._loaded["names"], network)
            for each, names in zip(as_optimizers(optimizer), self._loaded["names"], strict=True):
                arrange(each, names, network)
        result = given(checkpoint)
        watch_steps(self._trainer.optimizer)
        return result

    def _issue_warnings_after_load(self, given: Any, load_result: Any) -> Any:
        network = bare(self._trainer.model_wrapped)
        homeless = homeless_keys(network, load_result.unexpected_keys)
        if homeless:
            raise CheckpointError(
                f"the checkpoint contains weights that this model does not have: {homeless[0]} ({len(homeless)} such). "
                f"Its {TRAINER_FILE} is missing or belongs to another model. Give the Trainer the model that growing began "
                "with, and the folder as it was saved."
            )
        lacking = not_loaded(network, load_result.missing_keys)
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
        state = {"grower": self.grower.state_dict(), "names": names, "frozen": frozen_in(network)}
        if is_sharded(network):
            held = {id(parameter) for each in self.grower.optimizers for parameter in each.state}
            state["stateless"] = [
                name for name, p in network.named_parameters() if id(p) not in held and p.requires_grad
            ]
        return state

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


# ---- What `GrowthCallback` needs of a Hugging Face Trainer: the Trainer itself, whether it can grow, and its loss on its
# own batches.


def calling_trainer(callback: object) -> Trainer | None:
    """The Trainer that is calling its callback: it hands them its parts but not itself, and the loss is one of its methods."""
    # By the frames, because nothing that a callback is given leads to the Trainer (arguments, state, control, model, optimizer, scheduler,
    # loaders), and other ways are worse: patching the class Trainer changes it for everybody, and a required attach() would be a second
    # step, forgotten until a resume. Found is only a Trainer whose own list holds this callback; attach() needs none of it.
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and any(each is callback for each in owner.callback_handler.callbacks):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def check_trainer(trainer: Trainer, monitor: str | None) -> None:
    """Refuse what the Trainer's design does not allow, before training begins."""
    args: Any = trainer.args
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    sizes = [getattr(parallel, name, 1) or 1 for name in ("tp_size", "cp_size", "sp_size")]
    for present, what in (
        (
            trainer.is_deepspeed_enabled,
            "DeepSpeed has moved the parameters into separate buffers that a new layer is not part of. Use plain torchrun",
        ),
        (
            is_sharded_otherwise(trainer),
            "fsdp= of version 1, or on XLA, keeps flat parameters that cannot include a new layer. Set fsdp_config={'fsdp_version': 2}, "
            "which uses fully_shard",
        ),
        (
            args.n_gpu > 1,
            f"one process drives {args.n_gpu} GPUs by DataParallel, which copies the model at every step. Use torchrun",
        ),
        (
            args.fp16,
            "fp16 needs a scaled loss, and merits are measured on the loss itself, where small gradients become zero. Use bf16=True",
        ),
        (
            args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"),
            "gradient checkpointing with use_reentrant=True gives gradients only through loss.backward(), which a measurement must not "
            "call. Set gradient_checkpointing_kwargs={'use_reentrant': False}",
        ),
        (
            trainer.is_model_parallel or max(sizes) > 1 or getattr(trainer, "is_distributed_loading_by_transformers", False),
            "the model is spread over several devices, and a new layer would not be. Keep it on one device per process",
        ),
        (
            "Peft" in type(bare(trainer.model_wrapped)).__name__,
            "checkpoints of a PEFT model hold the adapters only, so a new layer would be lost. Grow the model first, then add adapters",
        ),
    ):  # fmt: skip
        if present:
            raise UnsupportedModel(f"this Trainer cannot grow its model: {what}.")
    if monitor is not None:
        _check_monitor(args, monitor)


def is_sharded_otherwise(trainer: Trainer) -> bool:
    """Whether the Trainer shards its model by something else than `fully_shard`."""
    args: Any = trainer.args
    if not (trainer.is_fsdp_enabled or args.fsdp):
        return False
    given = getattr(args, "fsdp_plugin_args", None) or {}
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return bool(getattr(plugin, "fsdp_version", given.get("fsdp_version", 1)) != 2)


def monitoring_time(args: Any, monitor: str) -> str:
    """When the monitored number comes: "no", "steps" or "epoch"."""
    strategy = args.eval_strategy if monitor.startswith("eval_") else args.logging_strategy
    return str(getattr(strategy, "value", strategy))


def _check_monitor(args: Any, monitor: str) -> None:
    comes = monitoring_time(args, monitor)
    name = "eval_strategy" if monitor.startswith("eval_") else "logging_strategy"
    if comes == "no":
        raise SensliError(f"monitor={monitor!r} is never computed, because {name}='no'. Set {name}='epoch'.")
    if comes == "epoch" and getattr(args.save_strategy, "value", args.save_strategy) == "steps":
        raise SensliError(
            f"monitor={monitor!r} comes at the end of an epoch ({name}='epoch'), after the checkpoint of its last step "
            "(save_strategy='steps'), which would lack the growth. Set save_strategy='epoch' or 'no'."
        )


def not_loaded(network: nn.Module, missing: list[str]) -> list[str]:
    """Names of parameters that a checkpoint had nothing for; tied ones are saved under one of their names only."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in missing}
    return [name for name in missing if name in parameters and id(parameters[name]) not in loaded]


@contextmanager
def without_gradients(network: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Parameters that no optimizer had a state of when it was saved: torch misses it unless they ask for no gradient."""
    chosen = [parameter for name, parameter in network.named_parameters() if name in names]
    for parameter in chosen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(True)


@contextmanager
def under_current_names(network: nn.Module, folder: str) -> Iterator[None]:
    """Checkpoints are saved under the names that the parameters have.

    The library saves some models (ViT, Mixtral) under older names, which its Trainer passes over when it loads them again.
    """
    save: Any = getattr(network, "save_pretrained", None)
    if not folder.startswith("checkpoint-") or "save_original_format" not in inspect.signature(save or len).parameters:
        yield
        return
    network.__dict__["save_pretrained"] = functools.partial(save, save_original_format=False)
    try:
        yield
    finally:
        del network.__dict__["save_pretrained"]


def homeless_keys(network: nn.Module, unexpected: list[str]) -> list[str]:
    """Names in a checkpoint that the model has no place for, without those that its class says do not matter."""
    patterns = getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [name for name in unexpected if not any(re.search(pattern, name) for pattern in patterns)]


# --- the Trainer's own loss on its own batches ---


class Inputs:
    """A batch as the collator made it, which the measurement hands on without looking into it."""

    def __init__(self, inputs: Any, items: Any) -> None:
        self.inputs, self.items = inputs, items


def loss_step(trainer: Trainer) -> Callable[..., Any]:
    """A function for `standing_in`: the loss for a batch of the Trainer, and plain forward for all else."""

    def step(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or not isinstance(args[1], Inputs):
            # Without accelerate's autocast around it: sites are compared with a rebuilt model, which has none.
            return getattr(module, "_original_forward", module.forward)(*args, **kwargs)
        given = args[1]
        with trainer.compute_loss_context_manager():
            # A copy, because compute_loss may take the labels out.
            inputs = trainer._prepare_inputs(given.inputs)
            return trainer.compute_loss(module, inputs.copy(), num_items_in_batch=given.items)

    return step


def batches_of(trainer: Trainer, loader: Any, limit: int | None) -> Iterator[tuple[tuple[Tensor, Inputs], None]]:
    """The training batches, each with a tensor as long as its weight: of counted tokens where the Trainer counts them, else of samples."""
    set_epoch(loader, max(0, math.ceil(trainer.state.epoch or 0) - 1))
    for inputs in itertools.islice(loader, limit):
        items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        yield (_weight(inputs, items), Inputs(inputs, items)), None


def set_epoch(loader: Any, epoch: int) -> None:
    """Have the loader give its batches in the order of an epoch, counted from 0."""
    # A look takes the batches in the order of the epoch that ends. After a resume within it the Trainer iterates over another loader
    # and has told the epoch to that one alone.
    inner: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for each in (loader, inner):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def _weight(inputs: Any, items: Any) -> Tensor:
    if items is not None:
        return torch.empty(1, dtype=torch.int8, device="cpu").expand(int(items))
    for tensor in tensors(dict(inputs)):
        if tensor.dim() > 0:
            return tensor
    raise SensliError(f"a training batch contains no tensor, only {', '.join(map(str, inputs)) or 'nothing'}.")


def example_of(trainer: Trainer, loader: Any) -> dict[str, Any] | tuple[Any, ...]:
    """What the model is called with in training, seen by computing the loss of one batch."""
    network, calls = bare(trainer.model_wrapped), []
    hook = network.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        with aside(trainer), random_state.kept(), untouched(network), torch.no_grad(), run_eagerly():
            for (_, given), _ in batches_of(trainer, loader, 1):
                loss_step(trainer)(network, None, given)
                if not calls:
                    raise SensliError(
                        f"{type(trainer).__name__}.compute_loss did not call the model it was given, so what goes into it is unknown. Give "
                        "the callback example=, the keyword arguments of one call as a dict."
                    )
    finally:
        hook.remove()
    if not calls:
        raise SensliError("the training data contain no batch, so there is nothing to measure on.")
    args, kwargs = calls[0]
    kwargs = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
    named = dict(zip(inspect.signature(network.forward).parameters, args, strict=False))
    return {**named, **kwargs}


@contextmanager
def aside(trainer: Trainer) -> Iterator[None]:
    """For a look: in training mode, with losses of this process alone, and no random number missing afterwards."""
    network, args = bare(trainer.model_wrapped), trainer.args
    # Otherwise every batch would wait for the other processes, also for one that has failed; the sums are shared at the end.
    averaged, training = args.average_tokens_across_devices, network.training
    kept = random_state.capture()
    args.average_tokens_across_devices = False
    network.train()
    try:
        yield
    finally:
        args.average_tokens_across_devices = averaged
        network.train(training)
        random_state.restore(kept)


# ---- A trial inside of a training with the Hugging Face Trainer: its steps are those that the Trainer's loop would take.

# What a subclass may do otherwise at an update, which a trial would not do.
_LOOP = ("_inner_training_loop", "_run_epoch")
_INSIDE_OF_BACKWARD = ("lomo", "layerwise")  # optimizers that have no step of their own


def check_trial_loop(trainer: Trainer) -> None:
    """Refuse a training whose updates cannot be made outside of the Trainer's loop."""
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    for name in _LOOP:
        if getattr(type(trainer), name, None) is not getattr(Trainer, name, None):
            raise callback.refuse_trial(f"{type(trainer).__name__} has its own {name}")
    if any(kind in optimizer for kind in _INSIDE_OF_BACKWARD):
        raise callback.refuse_trial(f"the optimizer (optim={optimizer!r}) steps inside of the backward pass")


class TrainerUpdates:
    """The training batches of the next epoch, one update at a time, from the beginning as often as they are asked for."""

    def __init__(self, trainer: Trainer, as_trained: Any) -> None:
        self.trainer, self._as_trained = trainer, as_trained
        self.loader: Any = None  # the training loader, which a callback is given at every look

    def __iter__(self) -> Iterator[tuple[Tensor, Update]]:
        trainer = self.trainer
        with kept_of_loader(self.loader):
            set_epoch(self.loader, math.ceil(trainer.state.epoch or 0))
            batches = iter(self.loader)
            while True:
                with self._as_trained():
                    samples, items = trainer.get_batch_samples(
                        batches, trainer.args.gradient_accumulation_steps, trainer.args.device
                    )
                if not samples:
                    return
                yield Update(samples, items).counted(sum(count_samples(dict(inputs)) for inputs in samples))


def make_updates_trial(trial: Trial, given: Trainer) -> Trial:
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

    return callback.complete_trial(trial, network, TrainerUpdates(trainer, as_trained), step)


# ---- The file beside the weights in every folder that a growing Trainer saves: what `GrowthCallback` needs to resume.

FORMAT = 1


def write_growth_file(folder: Path, state: dict[str, Any]) -> None:
    """Write plain data; an earlier file is replaced only when the new one is complete."""
    write_bytes(folder / TRAINER_FILE, strict_json({"format": FORMAT, **state}).encode(), CheckpointError)


def read_growth_file(folder: Path) -> dict[str, Any] | None:
    """What `write_growth_file` wrote; None if the file is missing, or the model had not begun to grow."""
    file = folder / TRAINER_FILE
    if not file.is_file():
        return None
    try:
        state: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if state["format"] > FORMAT:
            raise CheckpointError(
                f"{file} has format {state['format']}, newer than {FORMAT}. Update sensli to read it."
            )
        if not isinstance(state["grower"], (dict, type(None))):
            raise TypeError(f"'grower' is {brief_text(state['grower'])}")
        return state if state["grower"] is not None else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged: {type(error).__name__}: {error}. Use an intact checkpoint."
        ) from error
