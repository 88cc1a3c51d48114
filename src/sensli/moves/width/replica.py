"""What candidates for new units would give to those that read them, in a pass of the unmodified model.

After the forward pass its code runs once more, on a copy without gradients: layers that make units of a measured width make the
candidates instead, from the input that they had in the pass itself; all other layers with weights give back what they gave. So whatever
the model does between two layers is done to the candidates too, and hardly anything is computed twice.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules import random_state
from sensli.modules.copies import copied_block, hold_buffers, made_by, without_saving
from sensli.modules.engines.fsdp import reshard, unsharded_copy
from sensli.modules.grown import WideAttention, holder_of
from sensli.modules.running import autocast_of_now, first_tensor, let_memory_through, map_tensors, tensors, whole_tensor
from sensli.modules.wrappers import is_sharded
from sensli.moves.point import is_transformed
from sensli.moves.roles import ConvRole, Role, map_of, role_of
from sensli.moves.stretching import Stretch, like_layout
from sensli.moves.width.width import Axis, Entries, Size, Width, fill_entries

# ---- Hooks of the user that change what passes a module: they change what candidates for new units give, too.
#
# Which hooks do is seen in the pass itself. Only those run on the copy as well: the others record, count or print,
# and what they see there would not be what the model did.


_KINDS = ("_forward_pre_hooks", "_forward_hooks")
_GLOBAL = "of all modules"
_KNOWN = ("torch", "sensli", "transformers")  # parts of how modules work, or of a measurement

Key = tuple[int, str, int]  # the id of a module, the kind of a hook, its number there


class UserHooks:
    """The hooks of one model, while it is measured."""

    def __init__(self) -> None:
        self.changing: set[Key] = set()  # those that have changed something in the pass
        self._lent: list[tuple[nn.Module, weakref.ref[Tensor]]] = []  # what such hooks were given of the copy

    @contextmanager
    def seen(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """See which hooks change something as long as the context lasts."""
        put_back: list[tuple[Any, int, Any, Any]] = []
        tables = [(getattr(module, kind), kind) for module in modules for kind in _KINDS]
        for hooks, kind in (*tables, (torch.nn.modules.module._global_forward_hooks, _GLOBAL)):
            for key, hook in list(hooks.items()) if hooks else ():
                if made_by(hook) not in _KNOWN:
                    hooks[key] = seeing = _Seeing(hook, kind, key, self.changing)
                    put_back.append((hooks, key, hook, seeing))
        try:
            yield
        finally:
            for hooks, key, hook, seeing in put_back:
                if hooks.get(key) is seeing:  # nobody has removed it
                    hooks[key] = hook

    def install(self, mine: nn.Module, its: nn.Module, *, after: bool) -> None:
        """Have a part of the copy run the hooks of its original that change something; ``after``: those on what it gives, too."""
        for kind in _KINDS if after else _KINDS[:1]:
            own, hooks = getattr(mine, kind), getattr(its, kind)
            if not any(isinstance(hook, _Seeing) for hook in hooks.values()):
                continue
            kept = dict(own)
            own.clear()
            for key, hook in hooks.items():  # in their order
                if isinstance(hook, _Seeing):
                    own[key] = self._lending(hook.hook, (id(its), kind, key), its)
                    if key in getattr(its, f"{kind}_with_kwargs"):
                        getattr(mine, f"{kind}_with_kwargs")[key] = True
                elif key in kept:
                    own[key] = kept[key]

    def changes_all(self, module: nn.Module) -> bool:
        """Whether a hook of all modules has changed what this one gave."""
        return any(number == id(module) and kind == _GLOBAL for number, kind, _ in self.changing)

    def check(self) -> None:
        """Refuse a hook that has kept what it was given of the copy: the loss may read it, and takes it for what the model did."""
        lent, self._lent = self._lent, []
        for module, value in lent:
            if value() is not None:
                raise MeasurementError(
                    f"a forward hook on a {type(module).__name__} changes values and keeps them, so it cannot run with candidates for new "
                    "units. Keep them in a hook that returns None, or measure only layers (what='layers')."
                )

    def _lending(self, hook: Callable[..., Any], key: Key, its: nn.Module) -> Callable[..., Any]:
        def lent(value: Tensor) -> Tensor:
            alias = value.view_as(value)
            self._lent.append((its, weakref.ref(alias)))
            return alias

        def run(module: nn.Module, *given: Any) -> Any:
            return hook(module, *(map_tensors(each, lent) for each in given)) if key in self.changing else None

        return run


class _Seeing:
    """A hook of the user, called as it was; remembered if it changes what passes."""

    def __init__(self, hook: Callable[..., Any], kind: str, key: int, changing: set[Key]) -> None:
        self.hook, self._kind, self._key, self._changing = hook, kind, key, changing

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        before = _versions(given)
        result = self.hook(module, *given)
        known = {number for number, _ in before}
        if _versions(given) != before or (
            result is not None and any(id(each) not in known for each in tensors(result))
        ):
            self._changing.add((id(module), self._kind, self._key))
        return result


def _versions(given: Any) -> list[tuple[int, int]]:
    return [(id(each), 0 if torch.is_inference(each) else each._version) for each in tensors(given)]


_WAITING = 16  # calls without gradients that a checkpoint may make once more: others would keep all of them


Read = dict[tuple[int, str], list[Tensor]]  # by the asker's id and the reader: what candidates gave it, call by call


@dataclass(frozen=True)
class ReaderCall:
    """One call of a reader in a pass; without a pass where something else than the model has called it."""

    path: str
    read: Read | None
    number: int

    def read_by(self, asker: Any) -> Tensor:
        """What the candidates of the asker gave to be read there."""
        if self.read is None:
            raise MeasurementError(
                f"'{self.path}' was called outside of a pass of the model, by loss_fn for example, so what new units would give it to read "
                "is not known. Call the model itself, or measure only layers (what='layers')."
            )
        return self.read[id(asker), self.path][self.number]


@dataclass
class Passed:
    """What a pass of the model has left for the candidates to run beside it."""

    args: Any
    kwargs: Any
    drawn: dict[str, Any]  # the random states with which it began
    calls: dict[str, list[tuple[Tensor, Tensor, int]]]  # inputs and outputs of layers, and the versions of the outputs
    blind: list[tuple[ReaderCall, Tensor]]
    changing: set[Key]  # hooks of the user
    read: Read  # to be filled
    autocast: Callable[[], AbstractContextManager[None]]


class _Rows:
    """The rows of all candidates that one layer makes: put together once, or where they are not held as they are, whenever it runs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: dict[str, list[tuple[Entries, int, Axis]]] = {"weight": [], "bias": []}
        self._made: tuple[Tensor, Tensor | None] | None = None

    def add(self, candidates: Entries, index: int, axis: Axis) -> None:
        self._parts["bias" if axis.name == "bias" else "weight"].append((candidates, index, axis))

    def made(self) -> tuple[Tensor, Tensor | None]:
        """Their weight and bias."""
        if self._made is not None:
            return self._made
        weight, bias = (self._together(name) for name in self._parts)
        assert weight is not None
        if all(entries.is_held for entries, _, _ in self._parts["weight"]):
            self._made = weight, bias
        return weight, bias

    def _together(self, name: str) -> Tensor | None:
        found = [(entries.along(index, axis), axis) for entries, index, axis in self._parts[name]]
        parts = [(value, axis) for value, axis in found if value is not None]
        if not parts:
            return None
        (first, axis), rest = parts[0], [value for value, _ in parts[1:]]
        return like_layout(torch.cat([first, *rest], axis.dim) if rest else first, getattr(self._module, axis.name))


class Replica:
    """The copy of one model for all widths that are measured in it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._widths: list[tuple[Any, Width, Entries | float]] = []  # who asks, and the candidates
        # By the paths of when watching began: what is measured beside widths may put blocks into the model, which moves paths.
        self._modules: dict[str, nn.Module] = {}
        self._givers: dict[str, nn.Module] = {}  # layers that make units: the module whose call gives what they make
        self._copy: nn.Module | None = None
        self._made = False  # whether the copy runs the candidates
        self._takes_gradients = False  # whether the model's code does, as far as it is known
        self._readers: tuple[str, ...] = ()
        self._pairs: list[tuple[nn.Module, nn.Module]] = []  # parts of the copy and of the model
        self._sharded = False
        self._changed: set[tuple[str, str]] = set()  # tensors of the copy that are not the model's
        # inputs and outputs of layers in the pass that was made last, and the versions of the outputs
        self._calls: dict[str, list[tuple[Tensor, Tensor, int]]] = {}
        self._again: Counter[str] = Counter()  # how often the copy has called them
        self._given_back: list[Tensor] = []  # by the layer of the copy that is being called
        self._random: dict[str, Any] = {}  # the random states with which that pass began
        # of layers whose units are zero: those, and what rows multiply
        self._zeros: dict[str, tuple[Tensor, Tensor]] = {}
        self._hooks = UserHooks()
        self._depth = 0  # of calls of the model in progress: what stands in for its forward may call the model itself
        self.read: Read = {}  # of the pass in progress, or of the last one
        self._began = -1  # the backward pass in which the pass began; -1 is none
        # Calls that were made without gradients, with what they gave: all of one pass, and of readers. A checkpoint makes them once more in
        # the backward pass.
        self._blind: list[tuple[ReaderCall, Tensor]] = []
        self._unwatched: deque[tuple[ReaderCall, Tensor]] = deque(maxlen=_WAITING)
        self._late: list[Passed] | None = None  # passes that wait for candidates, which are not known yet

    def wait_for(self, width: Width) -> None:
        """Candidates of this width will be known only after a pass: `ask`, then `catch_up`."""
        self._late = self._late or []
        self._readers = (*self._readers, *(axis.module.path for axis in width.filled_with("column")))

    def catch_up(self) -> None:
        """Candidates are known now: run them beside the passes that have waited, and from now on beside every pass at once."""
        passes, self._late = self._late or [], None
        for passed in passes:
            self._run(passed)

    def ask(self, asker: Any, width: Width, candidates: Entries | float) -> None:
        """Run these candidates too.

        A number stands for units whose weights are zero and whose value is that number: what is read is then how each of their weights,
        the bias last, would move what is read of a unit.
        """
        self._widths.append((asker, width, candidates))

    def call(self, path: str, made: Tensor) -> ReaderCall:
        """The call of a reader that is being made, and gives ``made``."""
        if self._is_direct():
            return ReaderCall(path, self.read if self._random else None, len(self._calls.get(path, ())))
        for call, before in reversed(self._unwatched):
            if call.path == path and torch.equal(before, made):
                return call
        return ReaderCall(path, None, 0)

    def _is_direct(self) -> bool:
        """Whether a call is made by the pass itself: in a backward pass since, a checkpoint makes some once more."""
        return bool(torch._C._current_graph_task_id() == self._began)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Watch the model's passes as long as the context lasts."""
        self._modules = dict(self._model.named_modules(remove_duplicate=False))
        self._givers = {
            path: module if (attention := holder_of(self._model, path)) is None else attention[1]
            for path, module in self._model.named_modules()
            if (role := role_of(module)) is not None and role.makes
        }
        handles = [
            module.register_forward_hook(self._record(path), with_kwargs=True) for path, module in self._givers.items()
        ]
        handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        # always: a pass that fails, and that the user catches, has ended too
        handles.append(self._model.register_forward_hook(self._end, with_kwargs=True, always_call=True))
        self._depth = 0
        try:
            self._sharded = is_sharded(self._model)
            whole_model = self._model
            if self._sharded:  # of layers that make units no weight is needed
                reshard(self._model)
                whole_model = unsharded_copy(self._model, {id(parameter) for _, _, parameter in self._run_by_copy()})
            self._copy = copied_block(whole_model, share=True, recorders=True)
            self._pairs = list(zip(self._copy.modules(), self._model.modules(), strict=True))
            with self._hooks.seen(self._modules.values()):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for mine, _ in self._pairs:  # they hold the candidates, and each other
                vars(mine).pop("forward", None)
            self._copy, self._made, self.read, self._given_back, self._late = None, False, {}, [], None
            for held in (self._modules, self._givers, self._pairs, self._calls, self._random, self._unwatched):
                held.clear()

    def _record(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._random and self._is_direct():
                given, made = first_tensor(args or tuple(kwargs.values())), first_tensor(output)
                assert given is not None and made is not None
                # A copy where the layer could not make it once more: torch reads its weights elsewhere.
                made = made.detach().clone() if isinstance(module, nn.MultiheadAttention) else made.detach()
                calls = self._calls.setdefault(path, [])
                if not torch.is_grad_enabled():
                    self._blind.append((ReaderCall(path, self.read, len(calls)), made))
                calls.append((given.detach(), made, made._version))

        return hook

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._depth == 0:
            self._calls.clear()
            self._blind.clear()
            self._hooks.changing.clear()
            # A pass without gradients is not measured, but a part of one that is may be without.
            self._random = random_state.capture() if torch.is_grad_enabled() and not is_transformed() else {}
            self.read, self._began = {}, torch._C._current_graph_task_id()
            if self._sharded:
                self._gather()
        self._depth += 1

    def _gather(self) -> None:
        """Give the copy of a sharded model the values of today of all that it really runs."""
        assert self._copy is not None
        for path, name, parameter in self._run_by_copy():
            if (path, name) not in self._changed:
                self._copy.get_submodule(path)._parameters[name].data.copy_(whole_tensor(parameter))  # type: ignore[union-attr]

    def _run_by_copy(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """The parameters of modules that the copy really runs, with their paths and names: layers that make units do not."""
        for path, module in self._modules.items():
            role = role_of(module)
            for name, parameter in module._parameters.items() if role is None or not role.makes else ():
                if parameter is not None:
                    yield path, name, parameter

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        drawn, self._random = self._random, {}
        if output is None or not drawn:
            return
        passed = Passed(
            args, kwargs, drawn, self._calls, self._blind, set(self._hooks.changing), self.read, autocast_of_now()
        )
        self._calls, self._blind = {}, []
        if self._late is None:
            self._run(passed)
        else:
            self._late.append(passed)
        self._unwatched.extend(each for each in passed.blind if each[0].path in self._readers)

    def _run(self, passed: Passed) -> None:
        """The copy, with candidates, beside a pass that the model has made."""
        assert self._copy is not None
        before = self._calls, self.read
        self._calls, self.read = passed.calls, passed.read
        self._hooks.changing.clear()
        self._hooks.changing.update(passed.changing)
        if not self._made:
            self._make(self._copy)
            self._made = True
        for mine, its in self._pairs:
            mine.training = its.training
        now = random_state.capture()  # on all devices: a model may draw on several
        saves = self._takes_gradients or any(isinstance(asked, float) for _, _, asked in self._widths)
        put_back, runs = hold_buffers(self._copy), 0

        def once() -> None:
            nonlocal runs
            runs += 1
            if runs > 1:  # it is a copy that counts its passes as the model does
                self._takes_gradients = True
                put_back()
            self.read.clear()
            self._again.clear()
            self._zeros.clear()
            random_state.restore(passed.drawn)  # what is drawn once more is the same, such as which blocks are left out
            self._copy(*passed.args, **passed.kwargs)  # type: ignore[misc]

        try:
            # With gradients: without, torch's TransformerEncoderLayer reads weights instead of calling its modules in eval mode.
            with passed.autocast(), torch.enable_grad():
                without_saving(once, unless=saves)
            self._check_calls()
            self._hooks.check()
        except MeasurementError:
            raise
        except Exception as error:
            let_memory_through(error)
            raise MeasurementError(
                f"the model's code fails with candidates for new units ({type(error).__name__}: {error}), although it did not for "
                "find_sites. Find the sites with an example like the training data; if forward takes a gradient itself, measure only "
                "layers (what='layers')."
            ) from error
        finally:
            random_state.restore(now)
            self._calls, self.read = before
            self._again.clear()
            self._zeros.clear()

    def _check_calls(self) -> None:
        """What candidates gave belongs to the cotangents of the pass only if the copy has called all readers that the pass had called."""
        for path in self._readers:
            before = len(self._calls.get(path, ()))
            if self._hooks.changes_all(self._givers[path]):
                raise MeasurementError(
                    f"a hook of all modules (register_module_forward_hook) changes what '{path}' gives, before it can be caught. Set it on "
                    "the modules themselves, or measure only layers (what='layers')."
                )
            if self._again[path] != before:
                raise self._went_astray(path, before)

    def _went_astray(self, path: str, before: int) -> MeasurementError:
        return MeasurementError(
            f"'{path}' was called {before} times in the pass, and {self._again[path]} times when the model's code ran once more with "
            "candidates for new units: it draws at random, or decides by the values, which layers run. Measure in eval mode, or only "
            "layers (what='layers')."
        )

    # --- the copy ---

    def _make(self, copy: nn.Module) -> None:
        """Have the copy run the candidates."""
        makers: dict[str, _Rows | float] = {}
        # along the axis of a reader: which asker's candidates lie where, -1 for old units
        readers: dict[str, Tensor] = {}
        # From the end of shared axes: what comes before keeps its positions.
        ordered = sorted(enumerate(self._widths), key=lambda each: -max(axis.start for axis in each[1][1].axes))
        for number, (_, width, candidates) in ordered:
            count = _count(width, candidates)
            for index, axis in enumerate(width.axes):
                module = copy.get_submodule(axis.module.path)
                role = role_of(self._modules[axis.module.path])
                new = candidates.along(index, axis) if isinstance(candidates, Entries) else None
                if axis.fill == "column":
                    labels = readers.get(axis.module.path, torch.full((axis.length,), -1, device="cpu"))
                    own = torch.full((axis.outer * count * axis.inner,), number, device="cpu")
                    readers[axis.module.path] = _in_place_of_units(labels, 0, axis, width, own)
                elif role is None or not role.makes:
                    _resize(module, axis, width, count, new)
                    self._changed.add((axis.module.path, axis.name))
                elif isinstance(candidates, Entries):
                    rows = makers.setdefault(axis.module.path, _Rows(module))
                    assert isinstance(rows, _Rows)
                    rows.add(candidates, index, axis)
                else:
                    makers[axis.module.path] = candidates
            for size in width.sizes:
                self._set_size(copy, size, width, count)
        self._readers = tuple(readers)
        # What a layer gives back is what its hooks had made of it. (An attention that is not read runs as it is.)
        done = {
            id(given)
            for path, given in self._givers.items()
            if path not in makers and (path in readers or given is self._modules[path])
        }
        for mine, its in self._pairs:
            self._hooks.install(mine, its, after=id(its) not in done)
        for path in self._givers:
            mine, role = copy.get_submodule(path), role_of(self._modules[path])
            assert role is not None
            mine.forward = self._forward(path, mine, role, makers.get(path), readers.get(path))
            if path not in makers:  # hooks of all modules (register_module_forward_hook) have been there too
                mine.register_forward_hook(lambda module, args, output: self._given_back.pop())
            attention = holder_of(copy, path)
            if attention is not None and path in readers:
                attention[1].__class__ = WideAttention
                attention[1].project = mine.forward  # type: ignore[assignment]

    def _set_size(self, copy: nn.Module, size: Size, width: Width, count: int) -> None:
        role = role_of(self._modules[size.module.path])
        # The others do not look at theirs: they give back what they gave, or make candidates.
        if role is None or role.passes:
            holder = size.holder(copy.get_submodule(size.module.path))
            old = getattr(holder, size.name)
            old = width.units * size.per_unit if old is None else old
            setattr(holder, size.name, old + (count - width.units) * size.per_unit)

    def _forward(
        self, path: str, module: nn.Module, role: Role, rows: _Rows | float | None, labels: Tensor | None
    ) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = first_tensor(args or tuple(kwargs.values()))
            assert x is not None
            calls, number = self._calls.get(path, []), self._again[path]
            self._again[path] += 1
            if number >= len(calls):
                raise self._went_astray(path, len(calls))
            given, output, version = calls[number]
            for index, held in by_label(x, role.channel, labels) if labels is not None else ():
                asker, width, candidates = self._widths[index]
                if isinstance(candidates, Entries):
                    held = held.detach()
                elif held.requires_grad:
                    held = _derivative(held, *self._zeros[width.axes[0].module.path])
                self.read.setdefault((id(asker), path), []).append(held)
            if rows is None:
                if output._version != version:  # what somebody has overwritten in place is made once more
                    layer: Any = self._modules[path]
                    bias = None if layer.bias is None else whole_tensor(layer.bias)
                    output = map_of(module).apply_rows(given, whole_tensor(layer.weight), bias)
                self._given_back = [output]
                return output
            if not isinstance(rows, _Rows):
                inputs = map_of(module).unfold(given)
                zero = torch.full_like(inputs, rows).requires_grad_()
                self._zeros[path] = zero, inputs
                return zero.clone()  # somebody may work in place on it
            return map_of(module).apply_rows(given, *rows.made())

        return forward


def _count(width: Width, candidates: Entries | float) -> int:
    if isinstance(candidates, Entries):
        return candidates.count(width)
    return map_of(width.axes[0].module.find_module()).inputs_per_unit


def _derivative(value: Tensor, zero: Tensor, inputs: Tensor) -> Tensor:
    """How a value that comes of ``zero`` would move along ``inputs``: what comes back is linear in what is sent, and this its gradient."""
    sent = torch.zeros_like(value, requires_grad=True)
    (back,) = torch.autograd.grad(value, zero, sent, create_graph=True)
    if not back.requires_grad:  # it is zero, whatever is sent
        return sent.detach()
    (moved,) = torch.autograd.grad(back, sent, inputs)
    return moved


def by_label(x: Tensor, channel: int, labels: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The parts of what a reader is given, by the label along its axis that says whose they are; -1 is nobody's."""
    for label in labels.unique().tolist():
        if label >= 0:
            places = (labels == label).nonzero().flatten()
            whole_axis = len(places) == len(labels)
            yield label, x if whole_axis else x.index_select(channel % x.dim(), places.to(x.device))


def _in_place_of_units(old: Tensor, dim: int, axis: Axis, width: Width, new: Tensor) -> Tensor:
    """What lies along an axis, with something else in the place of its units."""
    length = axis.outer * width.units * axis.inner
    before, _, after = old.split([axis.start, length, old.shape[dim] - axis.start - length], dim)
    return torch.cat([before, new, after], dim)


def _resize(module: nn.Module, axis: Axis, width: Width, count: int, new: Tensor | None) -> None:
    """A module that passes units one by one, for the candidates alone."""
    old: Tensor = getattr(module, axis.name).detach()
    stretch = Stretch(axis.dim, width.units, count, axis.start, axis.outer, axis.inner)
    entries = stretch.entries(stretch.applied(old, fill_entries(axis, old, new)))
    value = _in_place_of_units(old, axis.dim, axis, width, entries)
    if axis.name in module._buffers:
        module._buffers[axis.name] = value
    else:
        module._parameters[axis.name] = nn.Parameter(value, requires_grad=False)


# ---- A few places of a pass: what a layer that makes units is given there, and what comes back nearby to those that read
# them.


_MOST = 128  # more tell hardly better how large units are and which way they should point, and cost more


@dataclass(frozen=True)
class Places:
    """Some samples and positions of what a layer makes: an index for each of its axes but that of the units."""

    shape: tuple[int, ...]
    at: tuple[Tensor, ...]

    @classmethod
    def among(cls, shape: tuple[int, ...], device: torch.device) -> Places:
        """All of them, or as many as are needed."""
        count = math.prod(shape)
        flat = torch.arange(count, device="cpu")
        if count > _MOST:  # at random: steps of equal length would stay in one column of a picture
            flat = torch.randint(count, (_MOST,), generator=torch.Generator().manual_seed(count), device="cpu")
        return cls(shape, torch.unravel_index(flat.to(device), shape))

    def nearby(self, values: Tensor) -> Tensor:
        """Of another map, whose channels come last, what lies at about the same places: [places, channels]."""
        shape = values.shape[:-1]
        index = [
            self.at[axis].to(values.device) * size // self.shape[axis] if axis < len(self.shape) else size // 2
            for axis, size in enumerate(shape)
        ]
        rows: Tensor = values[tuple(index)] if index else values[None]
        return rows


def inputs_of(module: nn.Module, x: Tensor) -> tuple[Places, Tensor] | None:
    """Places of what a layer makes of ``x``, and what each weight of a unit is multiplied with there; None if it is not known."""
    layer = map_of(module)
    if not isinstance(layer, ConvRole):
        places = Places.among(tuple(x.shape[:-1]), x.device)
        return places, x[places.at] if places.at else x[None]
    conv = layer.module
    if not layer.can_unfold or x.dim() != conv.weight.dim():
        return None
    x, zeros = layer.pad(x)
    x = F.pad(x, [side for size in reversed(zeros) for side in (size, size)])
    spans = [(size - 1) * step + 1 for size, step in zip(layer.kernel, conv.dilation, strict=True)]
    space = [(length - span) // step + 1 for length, span, step in zip(x.shape[2:], spans, conv.stride, strict=True)]
    places = Places.among((len(x), *space), x.device)
    x = x.movedim(1, -1)
    taps = []
    for tap in product(*(range(size) for size in layer.kernel)):
        geometry = zip(places.at[1:], conv.stride, tap, conv.dilation, strict=True)
        at = tuple(place * step + offset * apart for place, step, offset, apart in geometry)
        index = (places.at[0], *at)
        taps.append(x[index])
    return places, torch.stack(taps, -1).flatten(1)
