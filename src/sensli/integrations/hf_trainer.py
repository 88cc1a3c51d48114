"""What `GrowthCallback` needs of a Hugging Face Trainer: the Trainer itself, whether it can grow, and its loss on its own batches."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from sensli.errors import SensliError, UnsupportedModel
from sensli.modules import random_state
from sensli.modules.running import tensors, untouched
from sensli.modules.wrappers import bare, eager


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


def check(trainer: Trainer, monitor: str | None) -> None:
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
            trainer.is_fsdp_enabled or args.fsdp,
            "with fsdp= weights are loaded and optimizers built after sharding, when a checkpoint's layers can no longer be inserted. Use "
            "plain torchrun; or fully_shard and sensli.Grower in your own loop",
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


def monitored(args: Any, monitor: str) -> str:
    """When the monitored number comes: "no", "steps" or "epoch"."""
    strategy = args.eval_strategy if monitor.startswith("eval_") else args.logging_strategy
    return str(getattr(strategy, "value", strategy))


def _check_monitor(args: Any, monitor: str) -> None:
    comes = monitored(args, monitor)
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
def names_of_today(network: nn.Module, folder: str) -> Iterator[None]:
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


def homeless(network: nn.Module, unexpected: list[str]) -> list[str]:
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
        with aside(trainer), random_state.kept(), untouched(network), torch.no_grad(), eager():
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
