"""A warm-up of what is new alone: after a growth the updates of new entries begin small, and those of old ones are as they were.

The optimizer keeps of a parameter which entries are new, and how many steps they have taken, as it keeps moments. So all that follows
moments follows this too: resizing, shards, trials, `undo`. During a step it is taken out, so that the optimizer finds what it would find
without. So does whoever loads its `state_dict()`, where it is with the groups.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import CheckpointError, OptimizerError
from sensli.modules import checks
from sensli.modules.running import distributed_like, sharded_like
from sensli.moves.stretching import Resize
from sensli.surgery.optimizers import WARMING, Joining, Optimizers, as_optimizers, class_name, is_copy, memberships

_GROWTH, _AGES = WARMING
SAVED = "sensli_warmup"  # in the groups of a saved state: the same by the position of the parameter
# Growths are told apart by small numbers, in the type of the parameter: bfloat16 counts to 256.
_NUMBERS = 250
_SELF = ""  # where values of a parameter and of its copies are kept together: the parameter's own


_AUTO = "auto"
_SHARE, _MOST = 4, 200  # of "auto": of the steps so far it is this part, and not more than so many


def check_warmup(steps: int | str | None, *, auto: bool = False) -> Any:
    """The number of steps, or "auto" where there is a training; one that means nothing is refused."""
    if steps is None or (auto and isinstance(steps, str) and steps == _AUTO):
        return steps
    if auto and isinstance(steps, str):
        checks.refuse("warmup", "a whole number of at least 2 (for example 200), 'auto' or None", steps, OptimizerError)
    return checks.whole("warmup", steps, 200, least=2, error=OptimizerError)


def steps_of_warmup(warmup: int | str | None, optimizers: Optimizers) -> int | None:
    """How many steps a growth warms up for now.

    With "auto" that depends on the optimizers. Under Adam and its relatives the second moments of new entries begin at zero, while the
    count of steps goes on, so that their updates are too large at first; the more so, the more steps there have been.
    """
    if not isinstance(warmup, str):
        return warmup
    known = as_optimizers(optimizers)
    if not all(map(has_step_hooks, known)):
        return None
    counts = [state.get("step") for each in known if "betas" in each.defaults for state in each.state.values()]
    taken = [int(n) for n in counts if (n.numel() == 1 if isinstance(n, Tensor) else isinstance(n, (int, float)))]
    steps = min(max(taken, default=0) // _SHARE, _MOST)
    return steps if steps >= 2 else None


def check_step_hooks(optimizers: Optimizers, warmup: int | str | None) -> None:
    """Refuse optimizers that tell nobody of their steps."""
    for optimizer in as_optimizers(optimizers) if isinstance(warmup, int) else ():
        if not has_step_hooks(optimizer):
            raise OptimizerError(
                f"warmup must be None with {class_name(optimizer)}, got {warmup}: it has no hooks around its steps, because it does not "
                "call the constructor of torch.optim.Optimizer. Leave it out, or use another optimizer (AdamW, SGD, ...)."
            )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer tells of its steps: some do not call the constructor of torch's class."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


@dataclass(frozen=True, eq=False)
class Newborn:
    """What of the parameters is new; nothing has changed before `apply`."""

    warmup: int
    joining: Joining
    resized: Sequence[tuple[Optimizer, Resize]]
    _new: list[Tensor] = field(default_factory=list)  # of each resized one: 1 where an entry is new

    def build(self) -> None:
        """Before the parameters change; with sharded models all ranks come here."""
        for _, each in self.resized:
            old = torch.zeros(each.old_shape, dtype=each.tensor.dtype, device=each.tensor.device)
            self._new.append(sharded_like(each.stretched(old, 1.0, range(old.dim())), each.tensor))

    @torch.no_grad()
    def apply(self, number: int) -> None:
        """After the growth of this number, when the states have followed: from now on what is new warms up."""
        for newcomer, optimizer, _ in self.joining.places:
            self._note(optimizer, newcomer.parameter, torch.ones_like(newcomer.parameter, requires_grad=False), number)
        for (optimizer, each), new in zip(self.resized, self._new, strict=True):
            self._note(optimizer, each.tensor, new, number)
        watch_steps([*(optimizer for _, optimizer, _ in self.joining.places), *(its for its, _ in self.resized)])

    def _note(self, optimizer: Optimizer, parameter: Tensor, new: Tensor, number: int) -> None:
        state = optimizer.state.setdefault(parameter, {})
        own = _mark_of(number)
        added = new * own
        state[_GROWTH] = state[_GROWTH] + added if _GROWTH in state else added
        state[_AGES] = [*_drop_mark(state.get(_AGES, ()), own), [own, 0, self.warmup]]


def plan_warmup(optimizers: Optimizers, warmup: int, joining: Joining, resized: Sequence[Resize]) -> Newborn:
    """What will be new: all of the newcomers, and the new entries of parameters that change."""
    check_step_hooks(optimizers, warmup)
    known = {id(each.tensor): each for each in resized if each.is_parameter and _adds(each)}
    pairs = [(optimizer, known[id(p)]) for optimizer, _, p in memberships(as_optimizers(optimizers)) if id(p) in known]
    return Newborn(warmup, joining, pairs)


def forget_growth(optimizers: Optimizers, number: int) -> None:
    """After a growth was taken back: its entries are gone, and nothing is kept of them."""
    for optimizer in as_optimizers(optimizers):
        for parameter, state in _newborn_states(optimizer):
            ages = _drop_mark(state[_AGES], _mark_of(number))
            if ages:
                state[_AGES] = ages
                continue
            for key in WARMING:
                del state[key]
            if not state:
                del optimizer.state[parameter]
    watch_steps(optimizers)


def _adds(each: Resize) -> bool:
    """Whether entries come, and not only go."""
    return any(stretch.fresh > 0 and stretch.change >= 0 for stretch in each.stretches)


def _mark_of(number: int) -> int:
    return 1 + (number - 1) % _NUMBERS


def _drop_mark(ages: Sequence[list[int]], number: int) -> list[list[int]]:
    return [each for each in ages if each[0] != number]


def _newborn_states(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """The parameters with entries that warm up, and their states."""
    found = [(p, optimizer.state[p]) for _, _, p in memberships([optimizer]) if p in optimizer.state]
    return ((p, state) for p, state in found if _GROWTH in state)


def _fits(state: Any, parameter: Tensor) -> bool:
    """Whether what a saved state tells of a warm-up can be true of this parameter."""
    growth, ages = (state.get(key) for key in WARMING) if isinstance(state, Mapping) else (None, None)
    if not isinstance(growth, Tensor) or growth.shape != parameter.shape or not isinstance(ages, list) or not ages:
        return False
    whole = all(isinstance(each, list) and [type(number) for number in each] == [int] * 3 for each in ages)
    return whole and all(0 < own <= _NUMBERS and 0 <= age < steps - 1 for own, age, steps in ages)


def watch_steps(optimizers: Optimizers) -> None:
    """Hang the hooks on optimizers that keep something of a warm-up, as after loading a state; take them from the others."""
    for optimizer in as_optimizers(optimizers):
        hooks = _hooks_of(optimizer)
        if hooks is not None:
            hooks.put_back()
        _note_loaded(optimizer)
        warming = any(True for _ in _newborn_states(optimizer))
        if warming and hooks is None:
            _Hooks(optimizer)
        elif hooks is not None and not warming:
            hooks.remove()


def _note_loaded(optimizer: Optimizer) -> None:
    """What was saved of a warm-up goes from the groups back to the states."""
    for group in optimizer.param_groups:
        for index, noted in group.pop(SAVED, {}).items():
            parameter = group["params"][index]
            if not _fits(noted, parameter):
                raise CheckpointError(
                    f"the saved state of {class_name(optimizer)} tells of a warm-up that does not fit its parameter of shape "
                    f"{tuple(parameter.shape)}. Load the state that was saved with this model."
                )
            growth = distributed_like(noted[_GROWTH], parameter).to(parameter.device)
            optimizer.state.setdefault(parameter, {}).update({_GROWTH: growth, _AGES: noted[_AGES]})


def watch_loaded(optimizers: Optimizers) -> None:
    """Whenever these optimizers load a state, hang the hooks that it needs."""
    for optimizer in as_optimizers(optimizers):
        optimizer.register_load_state_dict_post_hook(watch_steps)


def _hooks_of(optimizer: Optimizer) -> _Hooks | None:
    known = getattr(optimizer, "_optimizer_step_pre_hooks", {})  # some have none
    owners = (getattr(hook, "__self__", None) for hook in known.values())
    return next((owner for owner in owners if isinstance(owner, _Hooks)), None)


@dataclass
class _Held:
    """One parameter during a step: what was taken from its state, and values from before, of it and of its copies in the state."""

    parameter: nn.Parameter
    noted: dict[str, Any]
    before: dict[str, Tensor]


class _Hooks:
    """Before a step and after it, on one optimizer, as long as something warms up."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._held: list[_Held] = []
        self._state: Any = None  # the states that it was taken from: loading makes others
        self._frame: FrameType | None = None  # of the step that is under way
        # Last before a step and first after it: whoever else has hooks there sees the values that the training goes on with.
        self._pre = optimizer.register_step_pre_hook(self._begin)
        self._post = optimizer.register_step_post_hook(self._end)
        self._saving = optimizer.register_state_dict_post_hook(self._save)
        self._before = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
        self._after = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
        self._after.move_to_end(self._post.id, last=False)

    def remove(self) -> None:
        """When no step is under way."""
        for handle in (self._pre, self._post, self._saving):
            handle.remove()

    def put_back(self) -> None:
        """After a step that has failed: the states as they were before it."""
        if self._state is self._optimizer.state:
            for each in self._held:
                self._state.setdefault(each.parameter, {}).update(each.noted)
        self._held, self._state, self._frame = [], None, None

    def _save(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """What is noted goes to the groups of a saved state: some optimizers do not load states that they have not made."""
        if self._frame is None or not _is_running(self._frame):
            self.put_back()
        _note_loaded(optimizer)
        states, groups = dict(saved["state"]), [dict(group) for group in saved["param_groups"]]
        for group, packed in zip(optimizer.param_groups, groups, strict=True):
            for index, (parameter, number) in enumerate(zip(group["params"], packed["params"], strict=True)):
                state = optimizer.state.get(parameter, {})
                if _GROWTH in state:
                    packed.setdefault(SAVED, {})[index] = {key: state[key] for key in WARMING}
                    states[number] = {key: value for key, value in state.items() if key not in WARMING}
                    if not states[number]:
                        del states[number]
        return {**saved, "state": states, "param_groups": groups}

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        frame = sys._getframe(1)
        if self._frame is not None and _is_running(self._frame):
            return  # the step of a class that calls the step of its parent
        self.put_back()
        _note_loaded(optimizer)
        found = list(_newborn_states(optimizer))
        if not found:
            self._remove_from(self._before, self._pre.id)
            return
        self._frame, self._state = frame, optimizer.state
        for parameter, state in found:
            noted = {key: state.pop(key) for key in WARMING}
            values: dict[str, Any] = {_SELF: parameter, **state}
            before = {
                key: _local(value).clone()
                for key, value in values.items()
                if key == _SELF
                or (isinstance(value, Tensor) and value.shape == parameter.shape and is_copy(optimizer, key))
            }
            if not state:  # many optimizers make a state where they find none
                del optimizer.state[parameter]
            self._held.append(_Held(parameter, noted, before))

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._frame is None or sys._getframe(1) is not self._frame:
            return
        skipped = getattr(optimizer, "found_inf", None)  # of a scaler, for optimizers that skip the step themselves
        if skipped is None or not bool(skipped):
            for each in self._held:
                _step(optimizer, each)
            self._held = [each for each in self._held if each.noted]
        self.put_back()
        self._before.move_to_end(self._pre.id)
        if not any(True for _ in _newborn_states(optimizer)):
            self._remove_from(self._after, self._post.id)

    def _remove_from(self, running: OrderedDict[int, Any], own: int) -> None:
        """While torch goes through these hooks only the last of them may be taken out; otherwise the next step does it."""
        if next(reversed(running)) == own:
            self.remove()


@torch.no_grad()
def _step(optimizer: Optimizer, held: _Held) -> None:
    """Of what the step has changed the new entries go a part of the way; they are a step older then."""
    growth = held.noted[_GROWTH]
    news = [(_local(growth) == own, (age + 1) / steps) for own, age, steps in held.noted[_AGES]]
    for key, before in held.before.items():
        value = held.parameter if key == _SELF else optimizer.state[held.parameter].get(key)
        if isinstance(value, Tensor) and _local(value).shape == before.shape:
            now = _local(value)
            parts = [(new, (now - before).mul_(share).add_(before)) for new, share in news]
            for new, part in parts:
                torch.where(new, part, now, out=now)
    ages = [[own, age + 1, steps] for own, age, steps in held.noted[_AGES]]
    left = [each for each in ages if each[1] + 1 < each[2]]
    for own, _, _ in ages:
        if left and all(own != each[0] for each in left):
            growth = growth * (growth != own)
    held.noted = {_GROWTH: growth, _AGES: left} if left else {}


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def _is_running(frame: FrameType) -> bool:
    """Whether a call is still under way, in this thread."""
    now: FrameType | None = sys._getframe(1)
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None
