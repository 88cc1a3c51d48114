"""All that training changes, at one moment: taken by value, and put back in place, so that whoever holds a parameter still holds it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.growing.following import Followers
from sensli.modules import random_state
from sensli.modules.wrappers import around, bare
from sensli.surgery.state.optim import as_list

_PLAIN = (bool, int, float, str, type(None))
_MEMBERS = ("params", "param_names")  # of a group: which parameters it has follows from the growths


class Snapshot:
    """Values of a model, its averages, optimizers, schedulers and other objects with a state, and of the random states.

    Everything is known by its name or position: the values also fit the same model after the same growths were made again.
    """

    def __init__(self, model: nn.Module, followers: Followers, stateful: Sequence[Any] = ()) -> None:
        self._modes = [(wrapper, wrapper.training) for wrapper in around(model)[:-1]]
        self._roots: list[nn.Module] = [bare(model), *as_list(followers.averaged)]
        self._modules = [{path: _Module(module) for path, module in root.named_modules()} for root in self._roots]
        self._optimizers = [(each, _Optimizer(each)) for each in followers.optimizers]
        holders = [*as_list(followers.scheduler), *stateful]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in holders]
        self._random = random_state.capture()

    def restore(self) -> None:
        """Put all values back. The model must have the growths that it had."""
        for wrapper, mode in self._modes:
            wrapper.training = mode
        with torch.no_grad():
            for root, saved in zip(self._roots, self._modules, strict=True):
                for path, module in root.named_modules():
                    saved[path].restore(module)
            for optimizer, state in self._optimizers:
                state.restore(optimizer)
        for holder, values in self._states:
            holder.load_state_dict(copy.deepcopy(values))
        random_state.restore(self._random)


class _Module:
    """Parameters with their gradients, buffers, and plain attributes (the mode, counters) of one module, without those in it."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {
            name: (_clone(p), _clone(p.grad), p.requires_grad) for name, p in _present(module._parameters)
        }
        # A forward pass may bind the name to another tensor, so the tensor itself is kept too.
        self._buffers = {name: (buffer, _clone(buffer)) for name, buffer in module._buffers.items()}
        self._plain = _Plain(module)

    def restore(self, module: nn.Module) -> None:
        for name, parameter in _present(module._parameters):
            value, gradient, trains = self._parameters[name]
            parameter.copy_(value)
            if isinstance(parameter.grad, Tensor) and gradient is not None and _alike(parameter.grad, gradient):
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = _clone(gradient)
            parameter.requires_grad_(trains)
        for name, (buffer, values) in self._buffers.items():
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.copy_(values)
        self._plain.restore(module)


class _Optimizer:
    """Settings of the groups and states of the parameters of one optimizer, by position."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key not in _MEMBERS}
            for group in optimizer.param_groups
        ]
        known = list(_members(optimizer))
        self._states = [copy.deepcopy(optimizer.state[p]) if p in optimizer.state else None for p in known]
        # Some optimizers keep more than the states of parameters there.
        members = {id(parameter) for parameter in known}
        self._others = {key: copy.deepcopy(v) for key, v in optimizer.state.items() if id(key) not in members}
        self._plain = _Plain(optimizer)

    def restore(self, optimizer: Optimizer) -> None:
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            _put(group, saved, keep=_MEMBERS)
        known = list(_members(optimizer))
        for parameter, state in zip(known, self._states, strict=True):
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                _put(optimizer.state[parameter], state)
        members = {id(parameter) for parameter in known}
        for key in [key for key in optimizer.state if id(key) not in members]:
            del optimizer.state[key]
        optimizer.state.update(copy.deepcopy(self._others))
        self._plain.restore(optimizer)


class _Plain:
    """The attributes of an object that are plain numbers, strings or None."""

    def __init__(self, thing: object) -> None:
        self._names = set(vars(thing))
        self._values = dict(self._of(thing))

    @staticmethod
    def _of(thing: object) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in vars(thing).items() if isinstance(value, _PLAIN))

    def restore(self, thing: object) -> None:
        for name in [name for name, _ in self._of(thing) if name not in self._names]:
            del vars(thing)[name]
        vars(thing).update(self._values)


def _put(holder: MutableMapping[str, Any], saved: MutableMapping[str, Any], keep: Sequence[str] = ()) -> None:
    """Give a mapping its values back; tensors in place where they can be, because a captured graph reads these very tensors."""
    for key in [key for key in holder if key not in saved and key not in keep]:
        del holder[key]
    for key, value in saved.items():
        now = holder.get(key)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and _alike(now, value):
            now.copy_(value)
        else:
            holder[key] = copy.deepcopy(value)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _members(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _present(parameters: Any) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in parameters.items() if parameter is not None)


def _clone(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone()
