"""All or nothing: a change of a model and of all that follows it is made entirely, or everything is as it was.

`grow`, `undo` and whatever is made of them open an `AllOrNothing` and let it keep what they are about to change. If anything is raised
inside, an error or Ctrl-C, everything is put back. They may be nested: a step of a Grower that fails after its first growth takes that
back too.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from operator import itemgetter
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.modules.engines import fsdp
from sensli.modules.engines.distributed import ddps, is_known, process_group, rebuild
from sensli.modules.wrappers import forget_compiled, is_sharded, wrappers_around

# ---- How things are before a change, so that a change that fails leaves no trace.
#
# Kept are references, not values: which modules, tensors and numbers each thing holds, and which memory its tensors
# have. What gives a tensor another shape gives it other memory, so the old values are still there. What writes into
# the memory of a tensor, as a step of training does, is beyond this.


_CONTAINERS = (dict, list, set, deque, weakref.WeakKeyDictionary)
_OWN = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, _CONTAINERS))  # of every module
_own = itemgetter(*_OWN)
_MISSING = object()


class Before:
    """What modules, optimizers and other objects hold now. `put_back` gives it back to them, as often as it is called."""

    def __init__(self, *things: Any) -> None:
        self._known: dict[int, Any] = {}  # the things themselves: as long as they live, their numbers are theirs
        # One entry for each thing that is kept: what puts it back, and what that takes. There may be thousands, so they are plain.
        self._kept: list[tuple[Callable[..., bool], tuple[Any, ...]]] = []
        for thing in things:
            self.add(thing)

    def add(self, thing: Any, name: str | None = None) -> None:
        """Keep a module with all modules in it, an optimizer, a list, dict or set, or the attributes of another object, or only one."""
        if name is not None:
            if id(thing) not in self._known:  # otherwise all of its attributes are kept
                self._kept.append((_set, (thing, name, getattr(thing, name, _MISSING))))
        elif isinstance(thing, nn.Module):
            for module in thing.modules():
                self._add_module(module)
        elif self._is_new(thing):
            if isinstance(thing, _CONTAINERS):
                self._kept.append((_fill, (thing, _content(thing))))
                return
            own = getattr(thing, "__dict__", {})
            self._kept.append((_restore, (thing, type(thing), dict(own), {})))
            for value in own.values():
                if isinstance(value, _CONTAINERS):
                    self.add(value)
            if isinstance(thing, Optimizer):
                self._add_states(thing)

    def put_back(self) -> bool:
        """Make everything as it was; whether anything was different. What fails stops nothing else, and is raised at the end."""
        found: list[bool] = []
        with ExitStack() as steps:
            # The stack goes on after a step that has failed. It begins with the newest: of what was kept twice the first state counts.
            for back, given in self._kept:
                steps.callback(_note, found, back, given)
        return any(found)

    def _is_new(self, thing: Any) -> bool:
        number = id(thing)
        if number in self._known:
            return False
        self._known[number] = thing
        return True

    def _add_module(self, module: nn.Module) -> None:
        if not self._is_new(module):
            return
        own = vars(module)
        # What is not held is empty.
        held = {name: _content(holder) for name, holder in zip(_OWN, _own(own), strict=True) if holder}
        self._kept.append((_restore, (module, type(module), dict(own), held)))
        for name in ("_parameters", "_buffers"):
            for tensor in held.get(name, {}).values():
                if tensor is not None and self._is_new(tensor):
                    gradient = tensor.grad if tensor.is_leaf else None
                    parts = (tensor._local_tensor, tensor._spec) if hasattr(type(tensor), "full_tensor") else None
                    self._kept.append((_point, (tensor, tensor.data, gradient, tensor.requires_grad, parts)))

    def _add_states(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            self.add(group)
            for value in group.values():
                if isinstance(value, list):
                    self.add(value)
                elif isinstance(value, Tensor):  # a rate, which is written in place
                    self._kept.append((_write, (value, value.detach().clone())))
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self.add(state)


def _note(found: list[bool], back: Callable[..., bool], given: tuple[Any, ...]) -> None:
    found.append(back(*given))


def _content(holder: Any) -> Any:
    """What a list, a set or a mapping holds, in its order."""
    return dict(holder) if hasattr(holder, "keys") else list(holder)


def _fill(holder: Any, content: Any) -> bool:
    """A list, a set or a mapping holds its content again; whether it was another."""
    if _objects(holder) == _objects(content):
        return False
    holder.clear()
    (holder.extend if hasattr(holder, "extend") else holder.update)(content)
    return True


def _objects(content: Any) -> list[Any]:
    """Keys, which may be equal, and the numbers of the objects themselves."""
    return [(key, id(value)) for key, value in content.items()] if hasattr(content, "keys") else [*map(id, content)]


def _restore(thing: Any, kind: type, attributes: dict[str, Any], held: dict[str, Any]) -> bool:
    """An object has its class and its own attributes again, and a module what its dictionaries held."""
    other = type(thing) is not kind
    if other:
        thing.__class__ = kind
    own = getattr(thing, "__dict__", {})
    for name in [name for name in own if name not in attributes]:
        del own[name]
        other = True
    for name, value in attributes.items():
        if own.get(name, _MISSING) is not value:
            own[name] = value
            other = True
    for name in _OWN if isinstance(thing, nn.Module) else ():
        if (own[name] or name in held) and _fill(own[name], held.get(name, ())):
            other = True
    return other


def _set(holder: Any, name: str, value: Any) -> bool:
    """An attribute of an object that may keep it where it likes."""
    if getattr(holder, name, _MISSING) is value:
        return False
    if value is _MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)
    return True


def _write(tensor: Tensor, value: Tensor) -> bool:
    """A small tensor that is written in place."""
    if torch.equal(tensor, value):
        return False
    with torch.no_grad():
        tensor.copy_(value)
    return True


def _point(tensor: Tensor, data: Tensor, gradient: Tensor | None, trains: bool, parts: Any) -> bool:
    """A tensor, whole or sharded, has its memory and shape again, and its gradient."""
    other = not _is_at(tensor, data, parts)
    if other:
        tensor.grad = None
        tensor.data = data
        if parts is not None:
            tensor._local_tensor, tensor._spec = parts  # type: ignore[attr-defined]
    if tensor.is_leaf and (tensor.grad is not gradient or tensor.requires_grad != trains):
        tensor.requires_grad_(trains)
        tensor.grad = gradient
        other = True
    return other


def _is_at(tensor: Tensor, data: Tensor, parts: Any) -> bool:
    if parts is not None:
        return tensor._local_tensor is parts[0] and tensor._spec is parts[1]  # type: ignore[attr-defined]
    if (tensor.dtype, tensor.shape, tensor.stride()) != (data.dtype, data.shape, data.stride()):
        return False
    try:
        return tensor.data_ptr() == data.data_ptr()
    except RuntimeError:  # a class of tensors that has no memory of its own
        return False


# ---- Ctrl-C waits while something is being changed.


class Waiting:
    """Inside of it a first Ctrl-C waits for the end, and a second one does not, so that what hangs can be stopped.

    Only the main thread gets signals; elsewhere, or where Python does not handle Ctrl-C, nothing happens. May be nested.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # whose turn it is at the end
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Waiting:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self) -> None:
        """From now on Ctrl-C waits; nothing happens if it does already."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), Waiting):
                self._handler = handler
                with suppress(ValueError):  # of an interpreter inside of another one, which gets no signals
                    signal.signal(signal.SIGINT, self._note)

    def end(self) -> None:
        """From now on it does not, and one that has waited comes now; nothing happens if none was to wait."""
        if self._handler is not None and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self._handler)
        handler, came = self._handler, self._came
        self._handler = self._came = None
        if handler is not None and came is not None:
            handler(*came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None and self._handler is not None:
            self._handler(number, frame)
        self._came = number, frame


class _Open(threading.local):
    """The changes under way in this thread, the outermost first."""

    def __init__(self) -> None:
        self.changes: list[AllOrNothing] = []


_OPEN = _Open()


def about_to_change(thing: Any, name: str | None = None) -> None:
    """Told before something is changed that is no module, optimizer or scheduler: changes that are under way keep it, or one attribute."""
    for change in _OPEN.changes:
        for kept in change.kept:
            kept.before.add(thing, name)


class AllOrNothing:
    """What is done inside is done entirely, or what it keeps is as it was."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self._ways_back: list[Callable[[BaseException], object]] = []
        self._waiting = Waiting()

    def __enter__(self) -> AllOrNothing:
        _OPEN.changes.append(self)
        return self

    def keep(self, model: nn.Module, *others: Any) -> Kept:
        """From now on: the model, its wrappers, and what follows it. What is kept can be put back at other times too."""
        kept = Kept(model, *others)
        self.kept.append(kept)
        self._ways_back.append(kept.put_back)
        return kept

    def on_failure(self, way_back: Callable[[], object]) -> None:
        """What to do if something is raised, before what was kept earlier is put back."""
        self._ways_back.append(lambda error: way_back())

    def wait(self) -> None:
        """Ctrl-C waits from now on: what follows takes no time, and had better be done."""
        self._waiting.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as last:  # what is to be done, the last one first; it goes on after one that has failed
            last.callback(self._waiting.end)
            self._waiting.begin()
            last.callback(_OPEN.changes.remove, self)
            if error is not None:
                for way_back in self._ways_back:
                    last.callback(way_back, error)


class Kept:
    """A model and what follows it at one moment."""

    def __init__(self, model: nn.Module, *others: Any) -> None:
        self._model = model
        self.before = Before(wrappers_around(model)[-1], *others)
        self._reducers = [(each, each.reducer) for each in ddps(model)]

    def put_back(self, error: BaseException | None = None) -> None:
        """Make everything as it was, and let the wrappers follow. With several processes all come here, unless one of them has an error
        that the others do not know of."""
        changed, sharded = self.before.put_back(), is_sharded(self._model)
        if changed:
            forget_compiled(self._model)
            if sharded:
                own = wrappers_around(self._model)[-1]
                fsdp.follow_shapes(own)
                fsdp.look_again(own)
        alone = process_group(self._model, sharded=sharded) is None
        for wrapper, reducer in self._reducers:
            # With several processes only when a growth was over on all of them, and all take it back: they rebuild together.
            rebuilt = wrapper.reducer is not reducer
            if (rebuilt or changed) if alone else rebuilt and (error is None or is_known(error)):
                rebuild(wrapper)
