"""How the parts of a checkpoint go into what the factories made: weights, shards, schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sensli.errors import CheckpointError
from sensli.growing import shards
from sensli.modules.engines.fsdp import empty_like, reshard
from sensli.modules.failing import let_memory_through
from sensli.surgery.state.saved_state import check_scheduler_state


@contextmanager
def loading(what: str) -> Iterator[None]:
    """What a part of somebody else's raises for a state that it does not know, in words."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        let_memory_through(error)
        raise CheckpointError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}. Build it as it was when the checkpoint was saved; if it is, use an "
            "intact checkpoint."
        ) from error


def load_model(network: nn.Module, content: Mapping[str, Any], path: Any) -> None:
    """Weights, modes and what is frozen; what lies in shards comes later."""
    evaluating, frozen = set(content["evaluating"]), set(content["frozen"])
    modules, parameters = dict(network.named_modules()), dict(network.named_parameters())
    for name in sorted((evaluating - modules.keys()) | (frozen - parameters.keys())):
        raise CheckpointError(f"{path} tells of {name!r}, which this {type(network).__name__} does not have.")
    own = network.state_dict()
    weights = {
        # What lies in shards comes later, straight into the shards; here only its name and shape have to fit.
        name: own[name] if shards.is_missing(value) and name in own and own[name].shape == value.shape else value
        for name, value in content["model"].items()
    }
    try:
        network.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        let_memory_through(error)
        raise CheckpointError(
            f"the weights in {path} do not fit the {type(network).__name__} that make_model built: {error} "
            "The factory must build the network that growing began with."
        ) from error
    for name, module in network.named_modules():
        module.training = name not in evaluating
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in frozen)


def with_shards(
    path: Any, content: dict[str, Any], network: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """The content with what lies in shards read: weights into the model itself, states of optimizers into tensors like its parameters."""
    if "shards" not in content:
        return content
    reshard(network)
    # Keys are of sharded tensors only; of an optimizer that is not asked for nothing is read.
    wanted = {**content, "optimizers": content["optimizers"][: len(optimizers)]}
    parameters, weights = dict(network.named_parameters()), network.state_dict()
    owners = {
        shards.key_of_state(number, name, entry): parameters[name]
        for number, saved in enumerate(wanted["optimizers"])
        for index, name in enumerate(name for group in saved["names"] for name in group)
        for entry in saved["state"]["state"].get(index, ())
        if name in parameters
    }
    targets = {shards.key_of_weight(name): value for name, value in weights.items()}
    read: dict[str, torch.Tensor] = {}

    def target(key: str, saved: torch.Tensor) -> torch.Tensor:
        if shards.is_missing(saved):
            read[key] = targets[key] if key in targets else empty_like(saved, owners.get(key))
        return read.get(key, saved)

    wanted = shards.replaced(wanted, target)
    shards.read(path, content, read)
    return {
        **content,
        "model": wanted["model"],
        "optimizers": [*wanted["optimizers"], *content["optimizers"][len(optimizers) :]],
    }


def load_each(what: str, made: Iterable[Any], saved: list[Any], load: Callable[[Any, Any], None]) -> None:
    """Load as many as were made, if any were; as many must have been saved."""
    made = list(made)
    if not made:
        return  # not asked for
    if len(made) != len(saved):
        raise CheckpointError(
            f"make_{what} gave {len(made)}, but the checkpoint holds {len(saved)}. Save and load the same {what}s, in the same order."
        )
    for each, state in zip(made, saved, strict=True):
        load(each, state)


def load_scheduler(scheduler: Any, saved: Any) -> None:
    """The state of one scheduler."""
    check_scheduler_state(scheduler, saved)
    with loading(f"the state of {type(scheduler).__name__}"):
        scheduler.load_state_dict(saved)
