"""How the parts of a checkpoint go into what the factories made: weights, shards, schedulers, optimizers by parameter names."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sensli.checkpoint import storage
from sensli.errors import CheckpointError, brief_text
from sensli.modules.engines.fsdp import reshard
from sensli.modules.running import distributed_like, empty_like, let_memory_through
from sensli.modules.wrappers import own_parameters
from sensli.surgery.history import Growth, current_names
from sensli.surgery.optimizers import as_list, as_optimizers, memberships, states_of, unwrap_optimizer
from sensli.surgery.rates import GROUP_RATES, as_schedulers, keep_groups
from sensli.surgery.warmup import watch_steps

# ---- Whether a saved state fits the optimizer or scheduler that it is loaded into, asked before anything is loaded.
#
# torch takes almost anything in `load_state_dict` and fails at the next step. What its own classes keep is known;
# others check theirs.

_NEWER = ("verbose", "default_min_lr")  # of schedulers: not in every version of torch, or not the same
_WAYS = ("foreach", "fused", "capturable", "differentiable")  # how to compute: what is kept does not depend on it
_LARGEST = 2**63
_REMEDY = "Build it as the saved one was built; if it was, use an intact checkpoint."


def check_optimizer_state(optimizer: Optimizer, saved: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Raise CheckpointError unless the state fits the optimizer, whose parameters are in the saved order already."""
    name = type(optimizer).__name__
    fine = isinstance(saved, Mapping) and {"state", "param_groups"} <= set(saved)
    _expect(fine, f"the state of {name} is not an optimizer state")
    groups, states = saved["param_groups"], saved["state"]
    fine = isinstance(groups, (list, tuple)) and len(groups) == len(optimizer.param_groups)
    _expect(fine and isinstance(states, Mapping), f"the state of {name} has other groups than the optimizer")
    first = 0
    for number, (group, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        place = f"group {number} of {name}"
        indices = list(range(first, first + len(ours["params"])))
        first += len(indices)
        its = group.get("params") if isinstance(group, Mapping) else None
        fine = isinstance(its, list) and its == indices and all(type(index) is int for index in its)
        _expect(fine, f"{place} has other parameters")
        _check_group(group, ours, place, strictly=_is_of_torch(optimizer))
        if _is_of_torch(optimizer):
            _check_moments(optimizer, group, states, {index: parameters[index] for index in indices})
    strangers = [index for index in states if index not in range(first)]
    _expect(not strangers, f"the state of {name} refers to parameters {strangers[:3]}, but there are {first}")


def _check_group(group: Mapping[str, Any], ours: Mapping[str, Any], place: str, *, strictly: bool) -> None:
    for key in group.keys() & ours.keys() - {"params", "param_names"}:
        value = group[key]
        if strictly:
            _check_alike(value, ours[key], f"{key!r} of {place}")
        if key in GROUP_RATES:
            fine = _is_number(value) and math.isfinite(value) and (value >= 0 or ours[key] < 0)
            _expect(fine, f"{key!r} of {place} is {brief_text(value)}, which is not a learning rate")
        if key in ("foreach", "fused"):
            _expect(value is None or isinstance(value, bool), f"{key!r} of {place} is {brief_text(value)}")


def _check_moments(
    optimizer: Optimizer, group: Mapping[str, Any], states: Mapping[int, Any], parameters: Mapping[int, nn.Parameter]
) -> None:
    """Each state holds what the optimizer keeps of such a parameter after a step, or nothing."""
    vectors = {parameter.ndim < 2 for parameter in parameters.values()}
    known = {few: _kept_entries(optimizer, group, few) for few in vectors}
    for index, parameter in parameters.items():
        kept = known[parameter.ndim < 2]
        if kept is None:
            continue
        state, place = states.get(index, {}), f"the state of parameter {index} in {type(optimizer).__name__}"
        _expect(isinstance(state, Mapping), f"{place} is a {type(state).__name__}")
        _expect(not state or kept.keys() <= state.keys(), f"{place} lacks {sorted(kept.keys() - state.keys())}")
        for key, value in state.items():
            fine = _is_moment(value, kept.get(key), parameter)
            _expect(fine, f"{key!r} in {place} is {brief_text(value)}, which does not fit {tuple(parameter.shape)}")


def _kept_entries(optimizer: Optimizer, group: Mapping[str, Any], few: bool) -> dict[str, str] | None:
    """What an optimizer of this class and with these settings keeps of a vector or a matrix: found by a step of a small one.

    Its constructor checks the settings on the way. None where a small one cannot be made or stepped, as the optimizer's own group shows.
    """
    for settings in (optimizer.param_groups[0], group):
        small = nn.Parameter(torch.zeros(2 if few else (2, 2), device="cpu"))
        small.grad = torch.zeros_like(small)
        known = inspect.signature(type(optimizer).__init__).parameters.keys() - {"self", "params", *_WAYS}
        try:
            trial = type(optimizer)([small], **{key: value for key, value in settings.items() if key in known})
            trial.step()
        except Exception as error:
            if settings is not group:
                return None
            name = type(optimizer).__name__
            raise CheckpointError(f"{name} refuses the saved settings: {error} {_REMEDY}") from error
    kept = {key: value for key, value in trial.state[small].items() if value is not None}
    sizes = {key: torch.as_tensor(value, device="cpu") for key, value in kept.items()}
    return {
        key: "number" if value.numel() == 1 else "whole" if value.shape == small.shape else "part"
        for key, value in sizes.items()
    }


def _is_moment(value: Any, kind: str | None, parameter: nn.Parameter) -> bool:
    if kind == "number":
        return _is_number(value)
    if not isinstance(value, Tensor):  # SGD keeps None until there is a momentum; of other entries nothing is known
        return value is None or (kind is None and _is_number(value))
    if value.is_complex() != parameter.is_complex() or not (value.is_floating_point() or value.is_complex()):
        return False
    if kind == "part" and value.ndim == parameter.ndim:  # Adafactor: rows and columns
        return all(size in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True))
    return value.shape == parameter.shape or (kind is None and value.numel() == 1)


def _check_alike(value: Any, like: Any, place: str) -> None:
    """Of the same kind as the value that a new optimizer or scheduler has there: a number, a truth value, a text, a list as long."""
    if like is None:
        fine = not isinstance(value, (list, tuple, Mapping))
    elif isinstance(like, bool):
        fine = value is None or isinstance(value, bool)
    elif _is_number(like):
        fine = _is_number(value) and not (type(like) is int and like >= 0 and not 0 <= value < _LARGEST)
    elif isinstance(like, (list, tuple)):
        fine = isinstance(value, (list, tuple)) and len(value) == len(like)
    else:
        fine = all(isinstance(value, kind) for kind in (str, Mapping) if isinstance(like, kind))
    _expect(fine, f"{place} is {brief_text(value)}, where a new one has {brief_text(like)}")
    if isinstance(like, (list, tuple)):
        for index, (part, its) in enumerate(zip(value, like, strict=True)):
            _check_alike(part, its, f"{place}[{index}]")
    elif isinstance(like, Mapping):
        for key in like.keys() & value.keys():
            _check_alike(value[key], like[key], f"{place}[{key!r}]")


def _is_number(value: Any) -> bool:
    """Whether it is one number, which torch may keep in a tensor."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def _is_of_torch(thing: Any) -> bool:
    return type(thing).__module__.startswith("torch.optim")


def _expect(fine: bool, what: str) -> None:
    if not fine:
        raise CheckpointError(f"{what}. {_REMEDY}")


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


def load_weights(network: nn.Module, content: Mapping[str, Any], path: Any) -> None:
    """Weights, modes and what is frozen; what lies in shards comes later."""
    evaluating, frozen = set(content["evaluating"]), set(content["frozen"])
    modules, parameters = dict(network.named_modules()), dict(network.named_parameters())
    for name in sorted((evaluating - modules.keys()) | (frozen - parameters.keys())):
        raise CheckpointError(f"{path} tells of {name!r}, which this {type(network).__name__} does not have.")
    own = network.state_dict()
    weights = {
        # What lies in shards comes later, straight into the shards; here only its name and shape have to fit.
        name: own[name] if storage.is_missing(value) and name in own and own[name].shape == value.shape else value
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
    asked, others = content["optimizers"][: len(optimizers)], content["optimizers"][len(optimizers) :]
    parameters, weights = dict(network.named_parameters()), network.state_dict()
    read: dict[str, Tensor] = {}

    def target(key: str, saved: Tensor, name: str, entry: str | None) -> Tensor:
        if storage.is_missing(saved):
            its_own = entry is None and name in weights
            read[key] = weights[name] if its_own else empty_like(saved, parameters.get(name))
        return read.get(key, saved)

    wanted = storage.replace_tensors({**content, "optimizers": asked}, target)
    storage.read_shards(path, content, read)
    return {**wanted, "optimizers": [*wanted["optimizers"], *others]}


def pair_saved(what: str, made: Any, saved: list[Any]) -> list[tuple[Any, Any]]:
    """What a factory made, if it was asked for, each with its saved state; as many must have been saved."""
    found = as_list(made)
    if found and len(found) != len(saved):
        raise CheckpointError(
            f"make_{what} gave {len(found)}, but the checkpoint holds {len(saved)}. Save and load the same {what}s, in the same order."
        )
    return list(zip(found, saved, strict=False))


def load_scheduler(scheduler: Any, saved: Any) -> None:
    """The state of one scheduler, which must be like the one that it has now."""
    name = type(scheduler).__name__
    _expect(isinstance(saved, Mapping), f"the state of {name} is a {type(saved).__name__}")
    if _is_of_torch(scheduler):
        ours = {key: value for key, value in scheduler.state_dict().items() if key not in _NEWER}
        for key in ours.keys() & saved.keys():
            _check_alike(saved[key], ours[key], f"{key!r} of {name}")
        missing = sorted(key for key in ours if key not in saved and not key.startswith("_"))
        _expect(not missing, f"the state of {name} lacks {missing}")
        if "total_steps" in ours and "last_epoch" in saved:
            steps, total = saved["last_epoch"], saved["total_steps"]
            _expect(type(total) is int and steps < total, f"{name} has taken {steps} of {brief_text(total)} steps")
    with loading(f"the state of {name}"):
        scheduler.load_state_dict(saved)


# ---- The state of an optimizer by the names of its parameters: a rebuilt one holds them in another order than one that
# followed.

_AROUND = re.compile(r"around(\d+):(.*)")  # which wrapper, and the name of what it keeps
_Names: TypeAlias = Sequence[Sequence[str]]  # of the parameters of an optimizer, group by group


def names_in(optimizer: Optimizer, network: nn.Module) -> list[list[str]]:
    """The names of the parameters in each group, in their order."""
    known = {id(parameter): name for name, parameter in network.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise CheckpointError(
                    f"group {index} of {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not part "
                    "of the model, so it has no name to be found by again. Make it a parameter of the model."
                )
    return [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


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
    history: Sequence[Growth], optimizer: Any, scheduler: Any, names: Iterable[_Names], network: nn.Module
) -> None:
    """Give rebuilt optimizers, and their schedulers, the groups that the saved ones had, whose ``names`` these are; `arrange` fills them.

    A factory that makes a group for each parameter or layer makes some for new ones too, which had joined their neighbours' groups:
    these go. Layers with a separate rate (`own_rate`) get theirs.
    """
    trains = {id(p) for p in own_parameters(network)}  # averages in the model have new layers too, by other names
    new = {*current_names(history), *(name for name, p in network.named_parameters() if id(p) not in trains)}
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


def arrange(optimizer: Optimizer, names: _Names, network: nn.Module) -> None:
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
    held = {id(p) for _, _, p in memberships([optimizer])}
    wanted = {name for group in names for name in group}
    unknown = sorted(wanted - parameters.keys())
    missing = sorted(name for name in wanted & parameters.keys() if id(parameters[name]) not in held)
    # What is new in an average inside the model: an optimizer over all parameters is made with it, one that follows has not got it.
    own = {id(p) for p in own_parameters(network)}
    new = sorted(name for name, p in parameters.items() if id(p) in held & own and name not in wanted)
    wrong = {"is not in the model": unknown, "is not in the new optimizer": missing, "was not saved": new}
    for what, which in wrong.items():
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
    optimizer = unwrap_optimizer(given)
    ordered, state = [parameter for _, _, parameter in memberships([optimizer])], optimizer.state_dict()
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
    optimizer = unwrap_optimizer(given)
    arrange(optimizer, saved["names"], network)
    ordered = [parameter for _, _, parameter in memberships([optimizer])]
    state, around = _split_wrapped(saved["state"])
    check_optimizer_state(optimizer, state, ordered)
    _load_around(given, around, ordered)
    with loading(f"the state of {type(optimizer).__name__}"):
        for index, its in state["state"].items():
            for key, value in its.items():
                if isinstance(value, Tensor):  # sharded as its parameter is
                    its[key] = distributed_like(value, ordered[index])
        made = [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        watch_steps(optimizer)
        for group, known in zip(optimizer.param_groups, made, strict=True):
            if known.keys() - group.keys():
                raise KeyError(*sorted(known.keys() - group.keys()))
            for key, value in known.items():  # a rate that is a tensor goes where make_optimizer had it
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key] = group[key].to(value.device)
    # torch casts a state to the type of its parameter, and what it keeps in float32 (NAdam's mu_product, ASGD's eta) is another number then
    names = [name for group in saved["names"] for name in group]
    for index, its in state["state"].items():
        parameter = ordered[index]
        if getattr(weights.get(names[index]), "dtype", None) != parameter.dtype:
            continue  # the model has another precision than the saved one, and its optimizer follows it
        now = optimizer.state[parameter]
        for key, value in its.items():
            if isinstance(value, Tensor) and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device)


def _split_wrapped(saved: Any) -> tuple[Any, dict[tuple[int, int, str], Any]]:
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
            if isinstance(value, Tensor):
                value = distributed_like(value, parameter).to(parameter.device)
            wrappers[number].setdefault(parameter, {})[key] = value
