"""The optimizer follows parameters whose entries change: first a plan that checks everything, then room is made, then the change.

A state gets the entries that it would have if those of the parameter had been there from the start and had never had a gradient: zeros
for most of them. Counts of steps stay, old entries keep their values, and those that go are remembered, so that `plan_shrinking` gives
all of them back to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import OptimizerError
from sensli.modules.engines.fsdp import sharded_like, whole
from sensli.moves.copying import copied, given_back, is_copied
from sensli.moves.stretching import Exchange, Fill, Resize, Stretch, like_layout
from sensli.surgery.state.copies import is_copy, is_near
from sensli.surgery.state.optim import (
    Group,
    Optimizers,
    as_list,
    as_optimizers,
    called,
    check_able,
    kinds,
    states_of,
    tensors_in,
)

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
        held = whole(self.state[self.key])
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
            new, self.before = self._changed(full), self._changed(whole(self.of.tensor).detach())
        new = like_layout(new, full)
        self.value = sharded_like(new if axis is None else new.squeeze(axis), self.state[self.key])

    def _changed(
        self, tensor: Tensor, along: Collection[int] | None = None, fill: complex | Fill | Sequence[Tensor] = 0.0
    ) -> Tensor:
        """A tensor of the parameter's shape, or with some of its axes, after the change or on the way back."""
        if self.copy and is_copied(self.of):
            return (given_back if self.back else copied)(self.of, tensor)
        if self.back:
            return self.of.shrunk(tensor, along, fill)
        assert not isinstance(fill, Sequence)
        return self.of.stretched(tensor, fill, along)

    def apply(self) -> None:
        assert self.value is not None
        if self.before is not None:
            # What the parameter got besides, its new entries and what a method moved, its copy gets too.
            value, now = whole(self.value), whole(self.of.tensor).detach()
            moved = torch.where(now == self.before, value, value + (now - self.before).to(value))
            self.value = sharded_like(like_layout(moved, value), self.value)
        if self.lost:
            self.of.lost[id(self.state), self.key] = self.lost
        self.state[self.key] = self.value


@dataclass(eq=False)
class _Gradient:
    """What a parameter has gathered so far, before and after: the edit drops it, because it has the old shape."""

    of: Resize
    parameter: nn.Parameter
    old: Tensor | None
    back: bool
    new: Tensor | None = None
    lost: tuple[Tensor, ...] = ()

    def build(self) -> None:
        if self.old is None:
            return
        dense = whole(self.old).to_dense()  # that of an embedding may be sparse
        if self.back:
            new = self.of.shrunk(dense, back=self.of.lost.get(_GRADIENT, 0.0))
        else:
            new, self.lost = self.of.stretched(dense), self.of.taken(dense)
        self.new = sharded_like(like_layout(new, dense), self.old)

    def apply(self) -> None:
        if self.lost:
            self.of.lost[_GRADIENT] = self.lost
        self.parameter.grad = self.new

    def settle(self) -> None:
        if self.of.new_shape != self.of.old_shape:
            _new_accumulator(self.parameter)


@dataclass(frozen=True, eq=False)
class Resizing:
    """What becomes of the states and gradients of resized parameters; nothing has changed before `apply`."""

    changes: tuple[_Change, ...]
    gradients: tuple[_Gradient, ...]

    def build(self) -> None:
        """Make room, before the parameters change; with sharded models all ranks come here."""
        _tell_copies(self.changes)
        for change in self.changes:
            change.build()
        for each in self.gradients:
            each.build()

    def apply(self) -> None:
        """After the parameters have changed."""
        for change in self.changes:
            change.apply()
        for each in self.gradients:
            each.apply()

    def settle(self) -> None:
        """After all ranks have agreed: DistributedDataParallel has to be rebuilt from here on."""
        for each in self.gradients:
            each.settle()


def plan_resizing(optimizers: Optimizers, resized: Sequence[Resize]) -> Resizing:
    """What the optimizers keep of each parameter with the parameter's new shape. Refuses what it does not understand."""
    known, parameters = as_optimizers(optimizers), [each for each in resized if each.is_parameter]
    check_able(known)
    if known and parameters and not any(True for _ in _held(known, parameters)):
        names = ", ".join(each.name for each in parameters[:2])
        raise OptimizerError(
            f"none of the parameters that would get new entries ({names}, ...) is in {', '.join(map(called, known))}, so nothing "
            "would train them. Add them to the optimizer, or grow without optimizer=."
        )
    changes = tuple(_changes(optimizers, parameters, back=False))
    return Resizing(changes, _gradients(parameters, back=False))


def plan_shrinking(optimizers: Optimizers, resized: Sequence[Resize]) -> Resizing:
    """The way back: of all states the old entries. A state that did not follow has no others, and stays."""
    parameters = [each for each in resized if each.is_parameter]
    changes = tuple(_changes(optimizers, parameters, back=True))
    return Resizing(changes, _gradients(parameters, back=True))


def _held(optimizers: Sequence[Optimizer], parameters: Sequence[Resize]) -> Iterator[tuple[Optimizer, Group, Resize]]:
    """Which optimizer has which parameter in which group."""
    by_id = {id(each.tensor): each for each in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in by_id:
                    yield optimizer, group, by_id[id(parameter)]


def _changes(optimizers: Optimizers, parameters: Sequence[Resize], *, back: bool) -> Iterator[_Change]:
    for given in as_list(optimizers):
        for (_, group, each), (optimizer, states) in product(_held(as_optimizers(given), parameters), states_of(given)):
            state = states.get(each.tensor, {})
            for key, value in state.items():
                along = _along(optimizer, each, key, value, back=back)
                if along:
                    copy = tuple(value.shape) == (each.new_shape if back else each.old_shape) and is_copy(
                        optimizer, key
                    )
                    yield _Change(optimizer, state, key, each, along, _fill(optimizer, group, key, value), back, copy)


def _tell_copies(changes: Iterable[_Change]) -> None:
    """Which states of unknown names are copies of their parameters: by all of one name, because one alone may be near by chance."""
    unknown: dict[tuple[int, str], list[_Change]] = {}
    for change in changes:
        if change.copy is None:
            unknown.setdefault((id(change.optimizer), change.key), []).append(change)
    for alike in unknown.values():
        near = is_near((whole(each.state[each.key]), whole(each.of.tensor)) for each in alike)
        for each in alike:
            each.copy = near


def _along(optimizer: Optimizer, each: Resize, key: str, value: Any, *, back: bool) -> Collection[int]:
    """The axes along which one entry of a state changes with its parameter; none if it stays."""
    shape, other = (each.new_shape, each.old_shape) if back else (each.old_shape, each.new_shape)
    if not isinstance(value, Tensor):
        if any(each.numel() > 1 for each in tensors_in(value)):
            _refuse(optimizer, each, f"{key!r} is a {called(value)} of tensors")
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


def _gradients(parameters: Sequence[Resize], *, back: bool) -> tuple[_Gradient, ...]:
    found = []
    for each in parameters:
        assert isinstance(each.tensor, nn.Parameter)
        found.append(_Gradient(each, each.tensor, each.tensor.grad, back))
    return tuple(found)


def _new_accumulator(parameter: nn.Parameter) -> None:
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


def _check_gradient(parameter: nn.Parameter, gradients: tuple[Tensor | None, ...]) -> None:
    """Of a graph from before a change of the shape: torch would store a gradient that does not fit."""
    if gradients[0] is not None and gradients[0].shape != parameter.shape:
        raise RuntimeError(
            "backward() reached a parameter that has got another shape since the forward pass, because the model has grown. Grow between "
            "two steps, or run the forward pass again."
        )


def _refuse(optimizer: Optimizer, each: Resize, what: str) -> NoReturn:
    raise OptimizerError(
        f"{called(optimizer)} cannot follow {each.name} from {each.old_shape} to {each.new_shape}: in its state {what}, which is neither "
        "one value per entry, row or column nor a single number, so what belongs to the new entries is unknown. Use an optimizer of "
        "torch (AdamW, SGD, ...), or grow without optimizer= and rebuild it for the grown model."
    )
