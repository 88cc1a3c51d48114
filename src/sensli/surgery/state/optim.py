"""The optimizer follows an insertion: first a plan that checks everything, then the change.

New parameters are appended to the *existing* group of their neighbour: a new group would break the many schedulers
that keep one base rate per group. Membership of a parameter is `is`, never equality of values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sensli.errors import OptimizerError
from sensli.modules import checks
from sensli.modules.running import tensors
from sensli.moves.move import New
from sensli.surgery.state.copies import first_copies

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None
Group: TypeAlias = dict[str, Any]
States: TypeAlias = MutableMapping[Any, Any]

# By class name: it covers subclasses, and classes that an older or smaller build of torch lacks.
_REFUSED = {
    "LBFGS": "it keeps its memory in one flat vector over all parameters, which cannot get more entries",
    "SparseAdam": "it takes sparse gradients only, and those of new parameters are dense",
    "ZeroRedundancyOptimizer": "it has divided the parameters among the processes and steps separate groups",
}
_GROUP = "an entry of optimizer.param_groups itself, or its index (for example 0)"
_MATRICES_ONLY = {"Muon"}  # looks at shapes in its constructor only, so a wrong one would fail at the next step


@dataclass(frozen=True, eq=False)
class Joining:
    """Which newcomer joins which group; nothing has changed before `apply`."""

    places: tuple[tuple[New, Optimizer, Group], ...]
    groups: tuple[Group, ...]
    renames: Mapping[str, str]
    around: Mapping[
        int, Sequence[tuple[Any, States]]
    ]  # by the identity of an optimizer: what wrappers of it keep themselves

    def apply(self) -> None:
        _rename(self.groups, self.renames)
        for newcomer, optimizer, group in self.places:
            state = _first_state(optimizer, group, newcomer.parameter)
            if state:
                optimizer.state[newcomer.parameter] = state
            for wrapper, states in self.around.get(id(optimizer), ()):
                if copies := first_copies(wrapper, states, newcomer.parameter):
                    states[newcomer.parameter] = copies
            group["params"].append(newcomer.parameter)
            if "param_names" in group:
                group["param_names"].append(newcomer.name)


def plan_joining(
    optimizers: Optimizers,
    newcomers: Iterable[New],
    *,
    group: int | Group | None = None,
    renames: Mapping[str, str] | None = None,
) -> Joining:
    """Find the group of every newcomer: that of its first neighbour that is in any, else `group`.

    Where that group's optimizer cannot take the shape (Muon and a bias), the next neighbour's counts, then `group`,
    then the one group of the other optimizers, if there is just one. renames: old to new names of parameters, for
    groups that carry `param_names`.
    """
    known = as_optimizers(optimizers)
    check_able(known)
    pairs = [(optimizer, its) for optimizer in known for its in optimizer.param_groups]
    chosen = _chosen_group(known, group)
    # by the identity of a parameter: a scan for each would take long
    holders: dict[int, list[tuple[Optimizer, Group]]] = {}
    for pair in pairs:
        for parameter in pair[1]["params"]:
            holders.setdefault(id(parameter), []).append(pair)
    places = tuple((newcomer, *_place(newcomer, pairs, holders, chosen)) for newcomer in newcomers) if known else ()
    around = {id(unwrapped(given)): states_of(given)[:-1] for given in as_list(optimizers)}
    return Joining(places, tuple(its for _, its in pairs), dict(renames or {}), around)


def check_able(optimizers: Iterable[Optimizer]) -> None:
    """Refuse the optimizers whose state cannot follow any growth."""
    for optimizer in optimizers:
        for kind in kinds(optimizer) & _REFUSED.keys():
            raise OptimizerError(
                f"{called(optimizer)} cannot follow a growth: {_REFUSED[kind]}. Use another optimizer (AdamW, "
                "SGD, ...), or grow without optimizer= and rebuild it for the grown model."
            )
        for key, value in optimizer.state.items():
            if not isinstance(key, Tensor) and any(each.numel() > 1 for each in tensors_in(value)):
                raise OptimizerError(
                    f"{called(optimizer)} cannot follow a growth: it keeps tensors under {key!r}, which belongs to no parameter. Use "
                    "another optimizer (AdamW, SGD, ...), or grow without optimizer= and rebuild it for the grown model."
                )


def check_optimizers(model: nn.Module, optimizers: Optimizers, group: int | Group | None = None) -> None:
    """Refuse optimizers that could never follow a growth of this model, before any training."""
    plan_joining(optimizers, (), group=group)
    if group is None:
        check_own(model, as_optimizers(optimizers))


def check_own(model: nn.Module, known: Sequence[Optimizer]) -> None:
    """Refuse optimizers of another model."""
    own = {id(parameter) for parameter in model.parameters()}
    held = (id(parameter) for optimizer in known for its in optimizer.param_groups for parameter in its["params"])
    if known and own.isdisjoint(held):
        names = ", ".join(map(called, known))
        raise OptimizerError(
            f"optimizer={names} contains no parameter of this {called(model)}, so it belongs to another model, or was built before the "
            "parameters were replaced. Build it over the parameters of the model that is to grow."
        )


def leave(
    optimizers: Optimizers, parameters: Iterable[nn.Parameter], *, renames: Mapping[str, str] | None = None
) -> None:
    """Take the parameters, their names and their state out again, the inverse of `Joining.apply`.

    renames: new to old names, where the growth had renamed. A parameter that is in no group is passed over.
    """
    known, gone = as_optimizers(optimizers), list(parameters)
    for given, optimizer in zip(as_list(optimizers), known, strict=True):
        for group in optimizer.param_groups:
            for i in reversed(range(len(group["params"]))):
                if any(group["params"][i] is each for each in gone):
                    del group["params"][i]
                    if "param_names" in group:
                        del group["param_names"][i]
        for _, states in states_of(given):
            for parameter in gone:
                states.pop(parameter, None)
        _rename(optimizer.param_groups, renames or {})


def as_optimizers(given: Optimizers) -> tuple[Optimizer, ...]:
    """One optimizer, several, or none, as a tuple, each without a wrapper of Lightning or accelerate."""
    return tuple(unwrapped(each) for each in as_list(given))


def check_needed(optimizers: Optimizers, **asked: bool) -> None:
    """Refuse options that would have no effect without an optimizer."""
    for name in (name for name, given in asked.items() if given and not as_optimizers(optimizers)):
        raise OptimizerError(f"{name}= needs optimizer=: rates and groups belong to the optimizer, and none was given.")


def check_group(group: int | Group) -> int | Group:
    """A number or a group; whether an optimizer has it is seen when there is one."""
    if isinstance(group, dict):
        return group
    return checks.integer("group", group, _GROUP, lambda index: index >= 0, OptimizerError)


def unwrapped(given: Any) -> Optimizer:
    # Look inside first: the wrappers pass for instances of Optimizer themselves.
    inner = _inside(given)
    if inner is not None:
        return unwrapped(inner)
    return checks.instance(
        "optimizer", given, Optimizer, "a torch.optim.Optimizer or a list of them", error=OptimizerError
    )


def states_of(given: Any) -> list[tuple[Any, States]]:
    """What an optimizer keeps of each parameter, and before it what wrappers around it keep themselves (a Lookahead, SAM)."""
    inner = _inside(given)
    if inner is None:
        return [(given, given.state)]
    found, own = states_of(inner), getattr(given, "state", None)
    if isinstance(own, MutableMapping) and all(own is not states for _, states in found):
        return [(given, own), *found]
    return found


def _inside(given: Any) -> Any:
    """What a wrapper of Lightning or accelerate, a Lookahead or SAM is around; None if it is no wrapper."""
    if isinstance(given, LRScheduler):  # holds an optimizer, but is not a wrapper of it
        return None
    for name in ("optimizer", "_optimizer", "base_optimizer", "_base_optimizer"):
        inner = getattr(given, name, None)
        if inner is not given and hasattr(inner, "param_groups"):
            return inner
    return None


def as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def tensors_in(value: Any, deep: int = 4) -> Iterator[Tensor]:
    """All tensors that a value of a state holds, also in queues and in attributes of objects."""
    if isinstance(value, (deque, set, frozenset)):
        value = list(value)
    if isinstance(value, (list, tuple, Mapping)) and deep:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part, deep - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, (Tensor, type)) and deep:
        yield from tensors_in(vars(value), deep - 1)
    else:
        yield from tensors(value)


def called(thing: object) -> str:
    return type(thing).__name__


def kinds(optimizer: Optimizer) -> set[str]:
    """The names of an optimizer's classes."""
    return {cls.__name__ for cls in type(optimizer).__mro__}


def _fits(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 or not kinds(optimizer) & _MATRICES_ONLY


def _chosen_group(known: Sequence[Optimizer], group: int | Group | None) -> tuple[Optimizer, Group] | None:
    if group is None or not known:
        return None
    group = check_group(group)
    if isinstance(group, dict):
        for optimizer in known:
            for its in optimizer.param_groups:
                if its is group:
                    return optimizer, its
        raise OptimizerError(
            f"group must be {_GROUP}, got a dict that is not a group of {', '.join(map(called, known))}. "
            "A copy of a group is a different group."
        )
    if len(known) > 1:
        raise OptimizerError(
            f"group={group} does not say which of the {len(known)} optimizers is meant. Pass the group itself, as in "
            f"group=optimizer.param_groups[{group}]."
        )
    groups = known[0].param_groups
    if group >= len(groups):
        raise OptimizerError(f"group={group} is out of range: {called(known[0])} has {_counted(len(groups))}.")
    return known[0], groups[group]


def _counted(groups: int) -> str:
    return "1 parameter group (0)" if groups == 1 else f"{groups} parameter groups (0 to {groups - 1})"


def _place(
    newcomer: New,
    pairs: Sequence[tuple[Optimizer, Group]],
    holders: Mapping[int, Sequence[tuple[Optimizer, Group]]],
    chosen: tuple[Optimizer, Group] | None,
) -> tuple[Optimizer, Group]:
    parameter = newcomer.parameter
    if id(parameter) in holders:
        raise OptimizerError(
            f"{newcomer.name} is in the optimizer already and would be stepped twice. Remove it from its group first, "
            "or insert without optimizer=."
        )
    near = [pair for neighbour in newcomer.relatives for pair in holders.get(id(neighbour), ())]
    able = [pair for pair in pairs if _fits(pair[0], parameter)]
    candidates = [*near, *([chosen] if chosen else []), *(able if near and len(able) == 1 else [])]
    for optimizer, group in candidates:
        if _fits(optimizer, parameter):
            return optimizer, group
    if candidates:
        raise OptimizerError(
            f"{newcomer.name} of shape {tuple(parameter.shape)} cannot join {called(candidates[0][0])}, which takes "
            f"matrices only, and there are {len(able)} other groups to choose from. Pass the one it should join as "
            "group=, as in group=adamw.param_groups[0], and its optimizer in optimizer=[...]."
        )
    beside = f" {newcomer.beside}" if newcomer.beside else ""
    names = ", ".join(dict.fromkeys(called(optimizer) for optimizer, _ in pairs))
    raise OptimizerError(
        f"{newcomer.name} has no group to join: no parameter of its neighbour{beside} is in {names}, so its learning "
        "rate and decay are unknown. Pass group= (an index into optimizer.param_groups, or the group itself), or add "
        "the neighbour's parameters to the optimizer."
    )


def _rename(groups: Iterable[Group], renames: Mapping[str, str]) -> None:
    for group in groups:
        if "param_names" in group:
            group["param_names"][:] = [renames.get(name, name) for name in group["param_names"]]


def _first_state(optimizer: Optimizer, group: Group, parameter: nn.Parameter) -> dict[str, Any] | None:
    """The state that an optimizer does not make by itself at the newcomer's first step; most make all of theirs."""
    if isinstance(optimizer, Adagrad):
        # Made in the constructor (not every version of torch makes up for it later), so let a constructor make it.
        start = optimizer.defaults["initial_accumulator_value"]
        twin = Adagrad([{"params": [parameter], "fused": group.get("fused")}], initial_accumulator_value=start)
        return dict(twin.state[parameter])
    if isinstance(optimizer, SGD) and group.get("fused") and group["momentum"] != 0:
        # The fused kernel wants momentum buffers for all of a group or for none. Zeros give the step that no buffer
        # would give, except that they are subject to dampening.
        others = (optimizer.state.get(each, {}).get("momentum_buffer") for each in group["params"])
        if any(buffer is not None for buffer in others):
            return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}
    return None
