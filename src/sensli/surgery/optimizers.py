"""The optimizer follows: groups for new parameters, and states of those that change their shape."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sensli.errors import OptimizerError
from sensli.modules import checks
from sensli.modules.running import sharded_like, tensors, whole_tensor
from sensli.moves.sites import New
from sensli.moves.stretching import Exchange, Fill, Resize, Stretch, given_back, is_copied, like_layout, with_copies

# ---- Which parts of an optimizer's state are copies or averages of the parameter itself: slow weights, a starting point,
# a master copy.
#
# New entries of such a state are the parameter's: zeros would pull new weights to zero at the next synchronisation.
# Those of a moment are zero.

_COPIES = {  # by name, in optimizers of torch, torch-optimizer, pytorch_optimizer, dadaptation, timm and others
    "ax", "backup_params", "lookahead_params", "lookahead_slow_buff", "mov_avg_param", "old_p", "p0", "param_avg", "prev_param",
    "slow_buffer", "slow_param", "slow_params", "swa_buffer", "x0", "x_k",
}  # fmt: skip
_COPIES_OF = {"AccSGD": {"momentum_buffer"}, "ScheduleFree": {"x", "y", "z"}}  # by a part of the name of the class
# What is made of gradients may happen to equal the parameter: the gradient of |w|^2 / 2 is w.
_MOMENT = re.compile("avg|mom|grad|sum|sq|var|hess|^[bdghmnrsuv]$")
# What is kept of entries that warm up (`surgery/warmup.py`): the growth that each came with, 0 for the old ones; and of these growths
# their numbers, the steps taken since, and the steps that a warm-up takes.
WARMING = ("warmup_growth", "warmup_ages")
_NEAR = 0.5  # of 200 optimizers, copies are within 0.13 after seven steps, and moments beyond 0.85


def is_copy(optimizer: Optimizer, key: str) -> bool | None:
    """Whether a state of this name is a copy of its parameter; None if only its values tell."""
    kind = type(optimizer)
    if key in WARMING:
        return False
    of_class = (part in name and key in keys for name in kinds(optimizer) for part, keys in _COPIES_OF.items())
    if key in _COPIES or any(of_class):
        return True
    return False if _MOMENT.search(key) or kind.__module__.startswith("torch.optim") else None


def is_near(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether states are nearer to their parameters than constants could be, over all (state, parameter) together.

    A constant parameter, such as the weight of a new norm, tells nothing: many states are constant too.
    """
    apart = spread = 0.0
    for state, parameter in pairs:
        value = parameter.detach().to(state)
        apart += float((state - value).abs().square().sum())
        spread += float((value - value.mean()).abs().square().sum())
    return apart < _NEAR**2 * spread


def first_copies(optimizer: Optimizer, states: Mapping[Any, Any], parameter: Tensor) -> dict[str, Tensor]:
    """What a wrapper with these states keeps of a new parameter, if it keeps copies of all others: some make them when they are built."""
    others = [states.get(each) or {} for group in optimizer.param_groups for each in group["params"]]
    keys = set.intersection(*map(set, others)) if others else set()
    return {key: parameter.detach().clone() for key in sorted(keys) if is_copy(optimizer, key)}


# ---- The optimizer follows an insertion: first a plan that checks everything, then the change.
#
# New parameters are appended to the *existing* group of their neighbour: a new group would break the many schedulers
# that keep one base rate per group. Membership of a parameter is `is`, never equality of values.

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
    # By the identity of an optimizer: what wrappers of it keep themselves.
    around: Mapping[int, Sequence[tuple[Any, States]]]

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
    for optimizer, its, parameter in memberships(known):
        holders.setdefault(id(parameter), []).append((optimizer, its))
    places = tuple((newcomer, *_place(newcomer, pairs, holders, chosen)) for newcomer in newcomers) if known else ()
    around = {id(unwrap_optimizer(given)): states_of(given)[:-1] for given in as_list(optimizers)}
    return Joining(places, tuple(its for _, its in pairs), dict(renames or {}), around)


def check_able(optimizers: Iterable[Optimizer]) -> None:
    """Refuse the optimizers whose state cannot follow any growth."""
    for optimizer in optimizers:
        reasons = [_REFUSED[kind] for kind in kinds(optimizer) & _REFUSED.keys()]
        for key, value in optimizer.state.items():
            if not isinstance(key, Tensor) and any(each.numel() > 1 for each in tensors_in(value)):
                reasons.append(f"it keeps tensors under {key!r}, which belongs to no parameter")
        if reasons:
            raise OptimizerError(
                f"{class_name(optimizer)} cannot follow a growth: {reasons[0]}. Use another optimizer (AdamW, "
                "SGD, ...), or grow without optimizer= and rebuild it for the grown model."
            )


def check_optimizers(model: nn.Module, optimizers: Optimizers, group: int | Group | None = None) -> None:
    """Refuse optimizers that could never follow a growth of this model, before any training."""
    plan_joining(optimizers, (), group=group)
    if group is None:
        check_own(model, as_optimizers(optimizers))


def check_own(model: nn.Module, known: Sequence[Optimizer]) -> None:
    """Refuse optimizers of another model."""
    own = {id(parameter) for parameter in model.parameters()}
    if known and own.isdisjoint(id(parameter) for _, _, parameter in memberships(known)):
        names = ", ".join(map(class_name, known))
        raise OptimizerError(
            f"optimizer={names} contains no parameter of this {class_name(model)}, so it belongs to another model, or was built before the "
            "parameters were replaced. Build it over the parameters of the model that is to grow."
        )


def leave_groups(
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
    return tuple(unwrap_optimizer(each) for each in as_list(given))


def memberships(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, Group, nn.Parameter]]:
    """Which optimizer has which parameter in which group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter


def check_needed(optimizers: Optimizers, **asked: bool) -> None:
    """Refuse options that would have no effect without an optimizer."""
    for name in (name for name, given in asked.items() if given and not as_optimizers(optimizers)):
        raise OptimizerError(f"{name}= needs optimizer=: rates and groups belong to the optimizer, and none was given.")


def check_group(group: int | Group) -> int | Group:
    """A number or a group; whether an optimizer has it is seen when there is one."""
    if isinstance(group, dict):
        return group
    return checks.integer("group", group, _GROUP, lambda index: index >= 0, OptimizerError)


def unwrap_optimizer(given: Any) -> Optimizer:
    # Look inside first: the wrappers pass for instances of Optimizer themselves.
    inner = _inside(given)
    if inner is not None:
        return unwrap_optimizer(inner)
    what = "a torch.optim.Optimizer or a list of them"
    return checks.instance("optimizer", given, Optimizer, what, error=OptimizerError)


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


def class_name(thing: object) -> str:
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
            if any(its is group for its in optimizer.param_groups):
                return optimizer, group
        raise OptimizerError(
            f"group must be {_GROUP}, got a dict that is not a group of {', '.join(map(class_name, known))}. "
            "A copy of a group is a different group."
        )
    if len(known) > 1:
        raise OptimizerError(
            f"group={group} does not say which of the {len(known)} optimizers is meant. Pass the group itself, as in "
            f"group=optimizer.param_groups[{group}]."
        )
    groups = known[0].param_groups
    if group >= len(groups):
        last = len(groups) - 1
        count = f"{last + 1} parameter groups (0 to {last})" if last else "1 parameter group (0)"
        raise OptimizerError(f"group={group} is out of range: {class_name(known[0])} has {count}.")
    return known[0], groups[group]


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
            f"{newcomer.name} of shape {tuple(parameter.shape)} cannot join {class_name(candidates[0][0])}, which takes "
            f"matrices only, and there are {len(able)} other groups to choose from. Pass the one it should join as "
            "group=, as in group=adamw.param_groups[0], and its optimizer in optimizer=[...]."
        )
    beside = f" {newcomer.beside}" if newcomer.beside else ""
    names = ", ".join(dict.fromkeys(class_name(optimizer) for optimizer, _ in pairs))
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


# ---- The optimizer follows parameters whose entries change: first a plan that checks everything, then room is made, then
# the change.
#
# A state gets the entries that it would have if those of the parameter had been there from the start and had never
# had a gradient: zeros for most of them. Counts of steps stay, old entries keep their values, and those that go are
# remembered, so that `plan_shrinking` gives all of them back to the bit.

# The axis over which a factored state was averaged, by its name: in torch, and in the Adafactor of transformers, which drops the axis.
_AVERAGED = {"row_var": -1, "col_var": -2, "exp_avg_sq_row": -1, "exp_avg_sq_col": -2}
_GRADIENT = "gradient"  # what a parameter calls its lost entries


@dataclass(eq=False)
class _Change:
    """One tensor of a state, and what comes in its place."""

    optimizer: Optimizer
    state: MutableMapping[str, Any]
    key: str
    of: Resize
    along: Collection[int]  # the axes of the parameter that it has
    fill: complex | Fill
    back: bool
    copy: bool | None  # whether it is one of the parameter; None: its values tell
    value: Tensor | None = None  # before `build`: none yet
    before: Tensor | None = None  # of a copy: what the parameter itself becomes by the same way
    lost: tuple[Tensor, ...] = ()

    def build(self) -> None:
        held = whole_tensor(self.state[self.key])
        axis = _dropped_axis(self.key, held, self.of.new_shape)
        full = held if axis is None else held.unsqueeze(axis)
        known = self.of.lost.get((id(self.state), self.key))
        if not self.copy:
            self.lost = () if self.back else self.of.taken(full, self.along)
            new = self._changed(full, self.along, self.fill if known is None else known)
        elif self.back and known is not None:
            new = known[0]
        else:
            self.lost = () if self.back else (full,)
            new, self.before = self._changed(full), self._changed(whole_tensor(self.of.tensor).detach())
        new = like_layout(new, full)
        self.value = sharded_like(new if axis is None else new.squeeze(axis), self.state[self.key])

    def _changed(
        self, tensor: Tensor, along: Collection[int] | None = None, fill: complex | Fill | Sequence[Tensor] = 0.0
    ) -> Tensor:
        """A tensor of the parameter's shape, or with some of its axes, after the change or on the way back."""
        if self.copy and is_copied(self.of):
            return (given_back if self.back else with_copies)(self.of, tensor)
        if self.back:
            return self.of.shrunk(tensor, along, fill)
        assert not isinstance(fill, Sequence)
        return self.of.stretched(tensor, fill, along)

    def apply(self) -> None:
        assert self.value is not None
        if self.before is not None:
            # What the parameter got besides, its new entries and what a method moved, its copy gets too.
            value, now = whole_tensor(self.value), whole_tensor(self.of.tensor).detach()
            moved = torch.where(now == self.before, value, value + (now - self.before).to(value))
            self.value = sharded_like(like_layout(moved, value), self.value)
        if self.lost:
            self.of.lost[id(self.state), self.key] = self.lost
        self.state[self.key] = self.value


@dataclass(eq=False)
class _Gradient:
    """What a parameter has gathered so far, before and after: the edit drops it, because it has the old shape."""

    of: Resize
    back: bool
    new: Tensor | None = None  # before `build`, or without a gradient: none
    lost: tuple[Tensor, ...] = ()

    def build(self) -> None:
        old = self.of.tensor.grad
        if old is None:
            return
        dense = whole_tensor(old).to_dense()  # that of an embedding may be sparse
        if self.back:
            new = self.of.shrunk(dense, back=self.of.lost.get(_GRADIENT, 0.0))
        else:
            new, self.lost = self.of.stretched(dense), self.of.taken(dense)
        self.new = sharded_like(like_layout(new, dense), old)

    def apply(self) -> None:
        if self.lost:
            self.of.lost[_GRADIENT] = self.lost
        self.of.tensor.grad = self.new


@dataclass(frozen=True, eq=False)
class Resizing:
    """What becomes of the states and gradients of resized parameters; nothing has changed before `apply`."""

    states: Sequence[_Change]
    gradients: Sequence[_Gradient]

    @property
    def _all(self) -> list[_Change | _Gradient]:
        return [*self.states, *self.gradients]

    def build(self) -> None:
        """Make room, before the parameters change; with sharded models all ranks come here."""
        _tell_copies(self.states)
        for each in self._all:
            each.build()

    def apply(self) -> None:
        """After the parameters have changed."""
        for each in self._all:
            each.apply()

    def settle(self) -> None:
        """After all ranks have agreed: DistributedDataParallel has to be rebuilt from here on."""
        for each in self.gradients:
            if each.of.new_shape != each.of.old_shape:
                _new_accumulator(each.of.tensor)


def plan_resizing(optimizers: Optimizers, resized: Sequence[Resize]) -> Resizing:
    """What the optimizers keep of each parameter with the parameter's new shape. Refuses what it does not understand."""
    known, parameters = as_optimizers(optimizers), {id(each.tensor): each for each in resized if each.is_parameter}
    check_able(known)
    if known and parameters and not any(id(parameter) in parameters for _, _, parameter in memberships(known)):
        names = ", ".join(each.name for each in list(parameters.values())[:2])
        raise OptimizerError(
            f"none of the parameters that would get new entries ({names}, ...) is in {', '.join(map(class_name, known))}, so nothing "
            "would train them. Add them to the optimizer, or grow without optimizer=."
        )
    return _plan(optimizers, resized, back=False)


def plan_shrinking(optimizers: Optimizers, resized: Sequence[Resize]) -> Resizing:
    """The way back: of all states the old entries. A state that did not follow has no others, and stays."""
    return _plan(optimizers, resized, back=True)


def _plan(optimizers: Optimizers, resized: Sequence[Resize], *, back: bool) -> Resizing:
    parameters, changes = {id(each.tensor): each for each in resized if each.is_parameter}, list[_Change]()
    for given in as_list(optimizers):
        held = [(group, parameters[id(p)]) for _, group, p in memberships(as_optimizers(given)) if id(p) in parameters]
        for (group, each), (optimizer, states) in product(held, states_of(given)):
            state = states.get(each.tensor, {})
            shape = each.new_shape if back else each.old_shape
            for key, value in state.items():
                along = _along(optimizer, each, key, value, back=back)
                if along:
                    copy = tuple(value.shape) == shape and is_copy(optimizer, key)
                    fill = _fill(optimizer, group, key, value)
                    changes.append(_Change(optimizer, state, key, each, along, fill, back, copy))
    return Resizing(changes, [_Gradient(each, back) for each in parameters.values()])


def _tell_copies(changes: Iterable[_Change]) -> None:
    """Which states of unknown names are copies of their parameters: by all of one name, because one alone may be near by chance."""
    unknown: dict[tuple[int, str], list[_Change]] = {}
    for change in changes:
        if change.copy is None:
            unknown.setdefault((id(change.optimizer), change.key), []).append(change)
    for alike in unknown.values():
        near = is_near((whole_tensor(each.state[each.key]), whole_tensor(each.of.tensor)) for each in alike)
        for each in alike:
            each.copy = near


def _along(optimizer: Optimizer, each: Resize, key: str, value: Any, *, back: bool) -> Collection[int]:
    """The axes along which one entry of a state changes with its parameter; none if it stays."""
    shape, other = (each.new_shape, each.old_shape) if back else (each.old_shape, each.new_shape)
    if not isinstance(value, Tensor):
        if any(each.numel() > 1 for each in tensors_in(value)):
            _refuse(optimizer, each, f"{key!r} is a {class_name(value)} of tensors")
        return ()  # a number of steps, or nothing yet
    along = _axes(key, value, shape)
    if along is None:
        if back and _axes(key, value, other) is not None:
            return ()
        _refuse(optimizer, each, f"{key!r} has the shape {tuple(value.shape)} and the type {value.dtype}")
    return along


def _dropped_axis(key: str, value: Tensor, shape: tuple[int, ...]) -> int | None:
    """The axis of its parameter that a factored state was averaged over, if it has no such axis."""
    axis = _AVERAGED.get(key)
    return axis if value.dim() == len(shape) - 1 else None


def _axes(key: str, value: Tensor, shape: tuple[int, ...]) -> Collection[int] | None:
    """The axes of the parameter that a tensor of its state has: none if it is a single number; None if that is not known."""
    if key in _AVERAGED:
        dropped = _dropped_axis(key, value, shape)
        value = value if dropped is None else value.unsqueeze(dropped)
        axes = [dim for dim in range(len(shape)) if dim != _AVERAGED[key] % len(shape)]
        return axes if tuple(value.shape) == tuple(n if d in axes else 1 for d, n in enumerate(shape)) else None
    if key == "step":
        return () if value.numel() == 1 else None
    if tuple(value.shape) == shape:
        # Where a state is kept in whole numbers they stand for others, by a rule that is not known here.
        return range(len(shape)) if value.is_floating_point() or value.is_complex() else None
    if value.numel() == 1:
        return ()
    if value.dim() == len(shape) and all(size in (1, whole) for size, whole in zip(value.shape, shape, strict=True)):
        return [dim for dim, size in enumerate(value.shape) if size != 1]
    return None


def _fill(optimizer: Optimizer, group: Group, key: str, value: Tensor) -> complex | Fill:
    """The new entries of a state."""
    kind, number = kinds(optimizer), 0.0
    if "Adafactor" in kind and key in (*_AVERAGED, "variance"):
        # It limits the step of a whole tensor, so entries that seem to have no variance would stop all the others.
        return _mean
    if "Adagrad" in kind and key == "sum":
        number = group["initial_accumulator_value"]
    if "Rprop" in kind and key == "step_size":
        number = float(group["lr"])
    return complex(number, number) if value.is_complex() else number


def _mean(stretch: Stretch | Exchange, tensor: Tensor) -> Tensor:
    """The mean of the entries that stay along an axis."""
    shape = list(tensor.shape)
    shape[stretch.dim] = stretch.fresh
    left = tensor if stretch.change < 0 else stretch.left(tensor)
    return (left if left.numel() else tensor).mean(stretch.dim, keepdim=True).expand(shape)


def _new_accumulator(parameter: Tensor) -> None:
    """Let autograd take notice of the new shape, which it does not by itself as long as a graph with the old one is alive."""
    if hasattr(parameter, "full_tensor"):
        return  # a sharded parameter takes part in no graph: the whole ones, made for each pass, do
    if parameter.requires_grad:
        with torch.inference_mode(False), torch.enable_grad():
            node: Any = parameter.view_as(parameter).grad_fn
        node.next_functions[0][0].register_prehook(partial(_check_gradient, parameter))
    value = parameter.data
    # A change of the type makes torch forget the node that belongs to the old shape; hooks on the parameter stay.
    parameter.data = value.new_empty(0, dtype=torch.float32 if value.dtype != torch.float32 else torch.float16)
    parameter.data = value


def _check_gradient(parameter: Tensor, gradients: tuple[Tensor | None, ...]) -> None:
    """Of a graph from before a change of the shape: torch would store a gradient that does not fit."""
    if gradients[0] is not None and gradients[0].shape != parameter.shape:
        raise RuntimeError(
            "backward() reached a parameter that has got another shape since the forward pass, because the model has grown. Grow between "
            "two steps, or run the forward pass again."
        )


def _refuse(optimizer: Optimizer, each: Resize, what: str) -> NoReturn:
    raise OptimizerError(
        f"{class_name(optimizer)} cannot follow {each.name} from {each.old_shape} to {each.new_shape}: in its state {what}, which is "
        "neither one value per entry, row or column nor a single number, so what belongs to the new entries is unknown. Use an optimizer "
        "of torch (AdamW, SGD, ...), or grow without optimizer= and rebuild it for the grown model."
    )
