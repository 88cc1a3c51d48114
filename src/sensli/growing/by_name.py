"""The state of an optimizer by the names of its parameters: a rebuilt one holds them in another order than one that followed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sensli.errors import CheckpointError
from sensli.growing.restoring import loading
from sensli.modules.engines.fsdp import distributed_like
from sensli.modules.wrappers import own_parameters
from sensli.surgery.history.growth import Growth, names_of_today
from sensli.surgery.state.optim import as_list, as_optimizers, states_of, unwrapped
from sensli.surgery.state.own_rate import keep_groups
from sensli.surgery.state.rates import as_schedulers
from sensli.surgery.state.saved_state import check_optimizer_state

_AROUND = re.compile(r"around(\d+):(.*)")  # which wrapper, and the name of what it keeps


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


def follow_groups(
    history: Sequence[Growth],
    optimizer: Any,
    scheduler: Any,
    names: Iterable[Sequence[Sequence[str]]],
    network: nn.Module,
) -> None:
    """Give rebuilt optimizers, and their schedulers, the groups that the saved ones had, whose ``names`` these are; `arrange` fills them.

    A factory that makes a group for each parameter or layer makes some for new ones too, which had joined their neighbours' groups:
    these go. Layers with a separate rate (`own_rate`) get theirs.
    """
    trains = {id(p) for p in own_parameters(network)}  # averages in the model have new layers too, by other names
    new = {*names_of_today(history), *(name for name, p in network.named_parameters() if id(p) not in trains)}
    own = {place for growth in history if growth.own_rate is not None for place in growth.own_rate.groups}
    for number, (each, saved) in enumerate(zip(as_optimizers(optimizer), names, strict=False)):
        _drop_new(each, scheduler, [set(its) for i, its in enumerate(saved) if (number, i) not in own], new, network)
    for growth in history:
        if growth.own_rate is not None:
            growth.own_rate.add(optimizer, scheduler)


def _drop_new(
    optimizer: Optimizer, scheduler: Any, saved: Sequence[set[str]], new: set[str], network: nn.Module
) -> None:
    """Take out the groups of new parameters alone that are more than were saved; another group holds their parameters meanwhile."""
    groups = optimizer.param_groups
    known = {id(parameter): name for name, parameter in network.named_parameters()}
    held = [{known.get(id(parameter), "") for parameter in group["params"]} for group in groups]
    free, kept = list(range(len(groups))), list[int]()
    for its in saved if len(groups) > len(saved) else ():
        kept.append(max(free, key=lambda index: (len(held[index] & its - new), len(held[index] & its))))
        free.remove(kept[-1])
    if not kept or any(held[index] - new for index in free):
        return  # as many, or others: `arrange` says so
    for index in free:
        groups[kept[0]]["params"] += groups[index]["params"]
    drivers = [each for each in as_list(scheduler) if isinstance(each, LRScheduler) or hasattr(each, "scheduler")]
    keep_groups(optimizer, as_schedulers(drivers), kept)


def arrange(optimizer: Optimizer, names: Sequence[Sequence[str]], network: nn.Module) -> None:
    """Bring the optimizer's groups into the saved order, parameter by parameter and by name, so that a saved state fits.

    Groups that the factory filled otherwise (a rule by name may put a new layer elsewhere than its neighbour) become as they were.
    """
    parameters = dict(network.named_parameters())
    groups = optimizer.param_groups
    if len(groups) != len(names):
        raise CheckpointError(
            f"make_optimizer built a {type(optimizer).__name__} with {len(groups)} groups, but {len(names)} were saved. "
            "Build the optimizer as the saved one was built; only groups of new layers may be more."
        )
    held = {id(p) for group in groups for p in group["params"]}
    wanted = {name for group in names for name in group}
    unknown = sorted(wanted - parameters.keys())
    missing = sorted(name for name in wanted & parameters.keys() if id(parameters[name]) not in held)
    # What is new in an average inside the model: an optimizer over all parameters is made with it, one that follows has not got it.
    own = {id(p) for p in own_parameters(network)}
    new = sorted(name for name, p in parameters.items() if id(p) in held & own and name not in wanted)
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


def saved_optimizer(given: Any, network: nn.Module) -> dict[str, Any]:
    """The state of an optimizer by the names of its parameters, with what a wrapper around it (a Lookahead) keeps of them itself."""
    optimizer = unwrapped(given)
    ordered, state = _ordered(optimizer), optimizer.state_dict()
    around = states_of(given)[:-1]
    if any(states for _, states in around):
        states = {index: dict(its) for index, its in state["state"].items()}
        for number, (_, its_own) in enumerate(around):
            for index, parameter in enumerate(ordered):
                for key, value in its_own.get(parameter, {}).items():
                    states.setdefault(index, {})[f"around{number}:{key}"] = value
        state = {**state, "state": states}
    return {"names": names_in(optimizer, network), "state": state}


def load_optimizer(given: Any, saved: Mapping[str, Any], network: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load the state of an optimizer by the names of its parameters; ``weights`` are the saved ones."""
    optimizer = unwrapped(given)
    arrange(optimizer, saved["names"], network)
    ordered = _ordered(optimizer)
    state, around = _parted(saved["state"])
    check_optimizer_state(optimizer, state, ordered)
    _load_around(given, around, ordered)
    with loading(f"the state of {type(optimizer).__name__}"):
        state["state"] = {index: _spread(its, ordered[index]) for index, its in state["state"].items()}
        made = [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, known in zip(optimizer.param_groups, made, strict=True):
            if known.keys() - group.keys():
                raise KeyError(*sorted(known.keys() - group.keys()))
            for key, value in known.items():  # a rate that is a tensor goes where make_optimizer had it
                if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
                    group[key] = group[key].to(value.device)
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


def _ordered(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parted(saved: Any) -> tuple[Any, dict[tuple[int, int, str], Any]]:
    """A saved state without what wrappers kept, and that by the wrapper, the parameter and the name."""
    around: dict[tuple[int, int, str], Any] = {}
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return saved, around  # which is refused
    states: dict[Any, Any] = {}
    for index, its in saved["state"].items():
        own = dict(its) if isinstance(its, Mapping) else its
        for key in list(own) if isinstance(own, dict) else ():
            if found := _AROUND.fullmatch(str(key)):
                around[int(found[1]), index, found[2]] = own.pop(key)
        if own or not its:
            states[index] = own
    return {**saved, "state": states}, around


def _load_around(given: Any, saved: Mapping[tuple[int, int, str], Any], ordered: Sequence[nn.Parameter]) -> None:
    """What wrappers keep of the parameters, into those of the rebuilt optimizer."""
    wrappers = [states for _, states in states_of(given)[:-1]]
    for number, _, key in saved:
        if number >= len(wrappers):
            raise CheckpointError(
                f"the checkpoint has what a wrapper around the optimizer kept ({key!r}), but make_optimizer built a "
                f"{type(given).__name__} without one. Build the optimizer as the saved one was built."
            )
    with loading(f"the state of {type(given).__name__}"):
        for (number, index, key), value in saved.items():
            parameter = ordered[index]
            if isinstance(value, torch.Tensor):
                value = distributed_like(value, parameter).to(parameter.device)
            wrappers[number].setdefault(parameter, {})[key] = value


def _spread(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The state of one parameter, sharded as the parameter is."""
    return {key: distributed_like(v, parameter) if isinstance(v, torch.Tensor) else v for key, v in state.items()}
