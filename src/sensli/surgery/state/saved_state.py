"""Whether a saved state fits the optimizer or scheduler that it is loaded into, asked before anything is loaded.

torch takes almost anything in `load_state_dict` and fails at the next step. What its own classes keep is known; others check theirs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import CheckpointError, brief
from sensli.surgery.state.rates import GROUP_RATES

_NEWER = ("verbose", "default_min_lr")  # of schedulers: not in every version of torch, or not the same
_WAYS = ("foreach", "fused", "capturable", "differentiable")  # how to compute: what is kept does not depend on it
_LARGEST = 2**63
_REMEDY = "Build it as the saved one was built; if it was, use an intact checkpoint."


def check_optimizer_state(optimizer: Optimizer, saved: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Raise CheckpointError unless the state fits the optimizer, whose parameters are in the saved order already."""
    name = type(optimizer).__name__
    _expect(
        isinstance(saved, Mapping) and {"state", "param_groups"} <= set(saved),
        f"the state of {name} is not an optimizer state",
    )
    groups, states = saved["param_groups"], saved["state"]
    fine = isinstance(groups, (list, tuple)) and len(groups) == len(optimizer.param_groups)
    _expect(fine and isinstance(states, Mapping), f"the state of {name} has other groups than the optimizer")
    first = 0
    for number, (group, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        place = f"group {number} of {name}"
        indices = list(range(first, first + len(ours["params"])))
        first += len(indices)
        _expect(
            isinstance(group, Mapping) and _are_these(group.get("params"), indices), f"{place} has other parameters"
        )
        _check_group(group, ours, place, strictly=_is_of_torch(optimizer))
        if _is_of_torch(optimizer):
            _check_moments(optimizer, group, states, {index: parameters[index] for index in indices})
    strangers = [index for index in states if index not in range(first)]
    _expect(not strangers, f"the state of {name} refers to parameters {strangers[:3]}, but there are {first}")


def check_scheduler_state(scheduler: Any, saved: Any) -> None:
    """Raise CheckpointError unless the state is like the one that the scheduler has now."""
    name = type(scheduler).__name__
    _expect(isinstance(saved, Mapping), f"the state of {name} is a {type(saved).__name__}")
    if not _is_of_torch(scheduler):
        return
    ours = {key: value for key, value in scheduler.state_dict().items() if key not in _NEWER}
    for key in ours.keys() & saved.keys():
        _check_alike(saved[key], ours[key], f"{key!r} of {name}")
    missing = sorted(key for key in ours if key not in saved and not key.startswith("_"))
    _expect(not missing, f"the state of {name} lacks {missing}")
    if "total_steps" in ours and "last_epoch" in saved:
        steps, total = saved["last_epoch"], saved["total_steps"]
        _expect(type(total) is int and steps < total, f"{name} has taken {steps} of {brief(total)} steps")


def _check_group(group: Mapping[str, Any], ours: Mapping[str, Any], place: str, *, strictly: bool) -> None:
    for key in group.keys() & ours.keys() - {"params", "param_names"}:
        value = group[key]
        if strictly:
            _check_alike(value, ours[key], f"{key!r} of {place}")
        if key in GROUP_RATES:
            fine = _is_number(value) and math.isfinite(value) and (value >= 0 or ours[key] < 0)
            _expect(fine, f"{key!r} of {place} is {brief(value)}, which is not a learning rate")
        if key in ("foreach", "fused"):
            _expect(value is None or isinstance(value, bool), f"{key!r} of {place} is {brief(value)}")


def _check_moments(
    optimizer: Optimizer, group: Mapping[str, Any], states: Mapping[int, Any], parameters: Mapping[int, nn.Parameter]
) -> None:
    """Each state holds what the optimizer keeps of such a parameter after a step, or nothing."""
    known = {few: _kept(optimizer, group, few) for few in {parameter.ndim < 2 for parameter in parameters.values()}}
    for index, parameter in parameters.items():
        kept = known[parameter.ndim < 2]
        if kept is None:
            continue
        state, place = states.get(index, {}), f"the state of parameter {index} in {type(optimizer).__name__}"
        _expect(isinstance(state, Mapping), f"{place} is a {type(state).__name__}")
        _expect(not state or kept.keys() <= state.keys(), f"{place} lacks {sorted(kept.keys() - state.keys())}")
        for key, value in state.items():
            fine = _is_moment(value, kept.get(key), parameter)
            _expect(fine, f"{key!r} in {place} is {brief(value)}, which does not fit {tuple(parameter.shape)}")


def _kept(optimizer: Optimizer, group: Mapping[str, Any], few: bool) -> dict[str, str] | None:
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
            raise CheckpointError(
                f"{type(optimizer).__name__} refuses the saved settings: {error} {_REMEDY}"
            ) from error
    sizes = {
        key: torch.as_tensor(value, device="cpu") for key, value in trial.state[small].items() if value is not None
    }
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
    elif isinstance(like, str):
        fine = isinstance(value, str)
    elif isinstance(like, (list, tuple)):
        fine = isinstance(value, (list, tuple)) and len(value) == len(like)
    else:
        fine = isinstance(value, Mapping) or not isinstance(like, Mapping)
    _expect(fine, f"{place} is {brief(value)}, where a new one has {brief(like)}")
    if isinstance(like, (list, tuple)):
        for index, (part, its) in enumerate(zip(value, like, strict=True)):
            _check_alike(part, its, f"{place}[{index}]")
    elif isinstance(like, Mapping):
        for key in like.keys() & value.keys():
            _check_alike(value[key], like[key], f"{place}[{key!r}]")


def _are_these(values: Any, indices: list[int]) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values) and values == indices


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
