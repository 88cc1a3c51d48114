"""How things are before a change, so that a change that fails leaves no trace.

Kept are references, not values: which modules, tensors and numbers each thing holds, and which memory its tensors have. What gives a tensor
another shape gives it other memory, so the old values are still there. What writes into the memory of a tensor, as a step of training
does, is beyond this.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_CONTAINERS = (dict, list, set, deque, weakref.WeakKeyDictionary)
_OWN = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, _CONTAINERS))  # of every module
_MISSING = object()


class Before:
    """What modules, optimizers and other objects hold now. `put_back` gives it back to them, as often as it is called."""

    def __init__(self, *things: Any) -> None:
        self._known: dict[int, Any] = {}  # the things themselves: as long as they live, their numbers are theirs
        self._parts: list[_Part] = []
        for thing in things:
            self.add(thing)

    def add(self, thing: Any) -> None:
        """Keep a module with all modules in it, an optimizer, a list, dict or set, or the attributes of another object."""
        if isinstance(thing, nn.Module):
            for module in thing.modules():
                self._add_module(module)
        elif isinstance(thing, Optimizer):
            self._add_optimizer(thing)
        elif isinstance(thing, _CONTAINERS):
            if self._is_new(thing):
                self._parts.append(_Content(thing))
        elif self._is_new(thing):
            self._add_attributes(thing)

    def add_attribute(self, holder: Any, name: str) -> None:
        """Keep one attribute of an object of any class."""
        if id(holder) not in self._known:  # otherwise all of its attributes are kept
            self._parts.append(_Attribute(holder, name))

    def put_back(self) -> bool:
        """Make everything as it was; whether anything was different. What fails stops nothing else, and is raised at the end."""
        found: list[bool] = []
        with ExitStack() as steps:
            # The stack goes on after a step that has failed. It begins with the last one, and with the newest part: of an attribute that
            # was kept twice the first value counts.
            for part in self._parts:
                steps.callback(_note, found, part)
        return any(found)

    def _is_new(self, thing: Any) -> bool:
        new = id(thing) not in self._known
        self._known[id(thing)] = thing
        return new

    def _add_module(self, module: nn.Module) -> None:
        if not self._is_new(module):
            return
        # A gradient must fit its tensor, and a tensor its module: what is added first is put back last.
        own = vars(module)
        self._parts.append(_Object(module, own))
        for name in _OWN:
            content = own.get(name)
            if content is not None:
                self._parts.append(_Content(content))
        for holder in (module._parameters, module._buffers):
            for tensor in holder.values():
                if tensor is not None and self._is_new(tensor):
                    self._parts.append(_Tensor(tensor))

    def _add_attributes(self, thing: Any) -> None:
        own = getattr(thing, "__dict__", {})
        self._parts.append(_Object(thing, own))
        for value in own.values():
            if isinstance(value, _CONTAINERS):
                self.add(value)

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        if not self._is_new(optimizer):
            return
        self._add_attributes(optimizer)
        for group in optimizer.param_groups:
            self.add(group)
            for value in group.values():
                if isinstance(value, list):
                    self.add(value)
                elif isinstance(value, Tensor):  # a rate, which is written in place
                    self._parts.append(_Value(value))
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self.add(state)


def _note(found: list[bool], part: _Part) -> None:
    found.append(part.put_back())


class _Part:
    """One thing that is kept."""

    __slots__ = ()

    def put_back(self) -> bool:
        """Make it as it was; whether it was different."""
        raise NotImplementedError


class _Content(_Part):
    """What a list, a set or a mapping holds, in its order."""

    __slots__ = ("_content", "_holder")

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._content = (dict if hasattr(holder, "keys") else list)(holder) if holder else None

    def put_back(self) -> bool:
        holder, content = self._holder, self._content
        if len(holder) == (0 if content is None else len(content)) and _same(holder, content or ()):
            return False
        holder.clear()
        if content is not None:
            (holder.extend if hasattr(holder, "extend") else holder.update)(content)
        return True


def _same(one: Any, other: Any) -> bool:
    """Whether two of one length hold the same objects in the same order."""
    if hasattr(one, "keys"):
        return all(a is b or a == b for a, b in zip(one, other, strict=True)) and all(
            a is b for a, b in zip(one.values(), other.values() if other else (), strict=True)
        )
    return all(a is b for a, b in zip(one, other, strict=True))


class _Object(_Part):
    """The class of an object and its own attributes."""

    __slots__ = ("_class", "_content", "_thing")

    def __init__(self, thing: Any, own: dict[str, Any]) -> None:
        self._thing, self._class, self._content = thing, type(thing), dict(own)

    def put_back(self) -> bool:
        thing = self._thing
        other = type(thing) is not self._class
        if other:
            thing.__class__ = self._class
        own, content = getattr(thing, "__dict__", {}), self._content
        new = [name for name in own if name not in content]
        for name in new:
            del own[name]
        changed = {name: value for name, value in content.items() if own.get(name, _MISSING) is not value}
        own.update(changed)
        return bool(other or new or changed)


class _Attribute(_Part):
    """One attribute of an object that may keep it where it likes."""

    __slots__ = ("_holder", "_name", "_value")

    def __init__(self, holder: Any, name: str) -> None:
        self._holder, self._name, self._value = holder, name, getattr(holder, name, _MISSING)

    def put_back(self) -> bool:
        if getattr(self._holder, self._name, _MISSING) is self._value:
            return False
        if self._value is _MISSING:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._value)
        return True


class _Value(_Part):
    """The value of a small tensor that is written in place."""

    __slots__ = ("_tensor", "_value")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._value = tensor, tensor.detach().clone()

    def put_back(self) -> bool:
        if torch.equal(self._tensor, self._value):
            return False
        with torch.no_grad():
            self._tensor.copy_(self._value)
        return True


class _Tensor(_Part):
    """The memory and the shape of a tensor, whole or sharded, its gradient, and whether it trains."""

    __slots__ = ("_data", "_gradient", "_parts", "_tensor", "_trains")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data, self._trains = tensor, tensor.data, tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._parts = (tensor._local_tensor, tensor._spec) if hasattr(tensor, "full_tensor") else ()  # type: ignore[attr-defined]

    def put_back(self) -> bool:
        tensor, data = self._tensor, self._data
        other = not self._is_same()
        if other:
            tensor.grad = None
            tensor.data = data
            if self._parts:
                tensor._local_tensor, tensor._spec = self._parts  # type: ignore[attr-defined]
        if tensor.is_leaf and (tensor.grad is not self._gradient or tensor.requires_grad != self._trains):
            tensor.requires_grad_(self._trains)
            tensor.grad = self._gradient
            other = True
        return other

    def _is_same(self) -> bool:
        tensor, data = self._tensor, self._data
        if self._parts:
            return tensor._local_tensor is self._parts[0] and tensor._spec is self._parts[1]  # type: ignore[attr-defined]
        if (tensor.dtype, tensor.shape, tensor.stride()) != (data.dtype, data.shape, data.stride()):
            return False
        try:
            return tensor.data_ptr() == data.data_ptr()
        except RuntimeError:  # a class of tensors that has no memory of its own
            return False
