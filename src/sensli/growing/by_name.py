"""The state of an optimizer by the names of its parameters: a rebuilt one holds them in another order than one that followed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sensli.errors import CheckpointError
from sensli.growing.restoring import loading
from sensli.modules.engines.fsdp import distributed_like
from sensli.surgery.history.growth import Growth
from sensli.surgery.state.saved_state import check_optimizer_state


def names_in(optimizer: Optimizer, network: nn.Module) -> list[list[str]]:
    """The names of the parameters in each group, in their order."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {index} of {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not part "
                    "of the model, so it has no name to be found by again. Make it a parameter of the model."
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def frozen_in(network: nn.Module) -> list[str]:
    """The names of the parameters that do not train."""
    return [name for name, parameter in network.named_parameters() if not parameter.requires_grad]


def freeze(network: nn.Module, names: Iterable[str]) -> None:
    """The parameters of these names do not train from now on."""
    parameters = dict(network.named_parameters())
    for name in names:
        if name in parameters:
            parameters[name].requires_grad_(False)


def add_own_groups(history: Iterable[Growth], optimizer: Any, scheduler: Any) -> None:
    """Give rebuilt optimizers, and their schedulers, the groups of layers that have a separate rate (`own_rate`)."""
    for growth in history:
        if growth.own_rate is not None:
            growth.own_rate.add(optimizer, scheduler)


def arrange(optimizer: Optimizer, names: Sequence[Sequence[str]], network: nn.Module) -> None:
    """Bring the optimizer's groups into the saved order, parameter by parameter and by name, so that a saved state fits.

    Groups that the factory filled otherwise (a rule by name may put a new layer elsewhere than its neighbour) become as they were.
    """
    parameters = dict(network.named_parameters())
    groups = optimizer.param_groups
    if len(groups) != len(names):
        raise CheckpointError(
            f"make_optimizer built a {type(optimizer).__name__} with {len(groups)} groups, but {len(names)} were saved. "
            "Build the optimizer as the saved one was built."
        )
    held = {id(p) for group in groups for p in group["params"]}
    wanted = {name for group in names for name in group}
    unknown = sorted(wanted - parameters.keys())
    missing = sorted(name for name in wanted & parameters.keys() if id(parameters[name]) not in held)
    new = sorted(name for name, p in parameters.items() if id(p) in held and name not in wanted)
    for what, which in (
        ("is not in the model", unknown),
        ("is not in the new optimizer", missing),
        ("was not saved", new),
    ):
        if which:
            raise CheckpointError(
                f"the optimizer does not fit the saved one: {which[0]} {what} ({len(which)} such). "
                "make_optimizer must take the same parameters as the optimizer that was saved."
            )
    for group, its_names in zip(groups, names, strict=True):
        group["params"] = [parameters[name] for name in its_names]
        if "param_names" in group:
            group["param_names"] = list(its_names)


def load_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], network: nn.Module, weights: Mapping[str, Any]
) -> None:
    """Load the state of an optimizer by the names of its parameters; ``weights`` are the saved ones."""
    arrange(optimizer, saved["names"], network)
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check_optimizer_state(optimizer, saved["state"], ordered)
    state = dict(saved["state"])
    with loading(f"the state of {type(optimizer).__name__}"):
        state["state"] = {index: _spread(its, ordered[index]) for index, its in state["state"].items()}
        keys = [set(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, known in zip(optimizer.param_groups, keys, strict=True):
            if known - set(group):
                raise KeyError(*sorted(known - set(group)))
    # torch casts a state to the type of its parameter, and what it keeps in float32 (NAdam's mu_product, ASGD's eta) is another number then
    names = [name for group in saved["names"] for name in group]
    for index, its in state["state"].items():
        parameter = ordered[index]
        if getattr(weights.get(names[index]), "dtype", None) != parameter.dtype:
            continue  # the model has another precision than the saved one, and its optimizer follows it
        now = optimizer.state[parameter]
        for key, value in its.items():
            if isinstance(value, torch.Tensor) and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device)


def _spread(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The state of one parameter, sharded as the parameter is."""
    return {key: distributed_like(v, parameter) if isinstance(v, torch.Tensor) else v for key, v in state.items()}
