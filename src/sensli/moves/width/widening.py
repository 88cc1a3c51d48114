"""The edit that gives a width more units.

The function is kept because nothing reads new units yet, because they are zero, or because they are copies that share what read their
sources: that is the start's to say. Old entries that change, because they are shared with copies or because a method moves them, are
remembered for the way back.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli.errors import MovedSite, UnknownSite, UnsupportedSite
from sensli.modules.copies import is_large
from sensli.modules.engines.all_or_nothing import about_to_change
from sensli.modules.engines.fsdp import check_resized, follow_shapes
from sensli.modules.grown import fit_class, new_in
from sensli.modules.running import put, sharded_like, whole_tensor
from sensli.modules.wrappers import is_sharded, own_modules
from sensli.moves.inserting import forget, recall, remember_lost
from sensli.moves.point import Ref, attribute
from sensli.moves.sites import Edit, Site
from sensli.moves.stretching import OWN, Copied, Exchange, Resize, Stretch, given_back, is_copied, like_layout
from sensli.moves.width.starts import STARTS
from sensli.moves.width.width import Axis, Entries, Width, family, fill_entries, find_part

# ---- How layers have become wider since something was measured for them: measured entries follow with zeros, which change
# nothing.
#
# At one look two neighbouring widths may grow. The second one's rows were measured for fewer inputs, and the new ones
# are nothing to them. Where the new ones are copies, entries follow as the layer's own did: copied, or shared.


_DEEP = 64  # growths of one layer: nobody measures longer in advance

_MADE: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[str, int, Stretch], ...]] = weakref.WeakKeyDictionary()


def note_widening(width: Width) -> None:
    """Before the axes of a width, bound to its modules, get longer."""
    about_to_change(_MADE)
    for axis in width.axes:
        module, length = axis.module.find_module(), axis.tensor.shape[axis.dim]
        _MADE[module] = (*_MADE.get(module, ()), (axis.name, length, width.stretch(axis)))[-_DEEP:]


def forget_widening(width: Width) -> None:
    """After they have become as before."""
    about_to_change(_MADE)
    for axis in reversed(width.axes):
        module = axis.module.find_module()
        made = _MADE.get(module)
        if made and made[-1][0] == axis.name and made[-1][2] == width.stretch(axis):
            _MADE[module] = made[:-1]


def carry_entries(entries: Tensor, stretch: Stretch) -> Tensor:
    """Entries along one axis after another axis of their tensor has become longer."""
    return stretch.copied(entries) if isinstance(stretch, Copied) else stretch.applied(entries)


def follow_entries(entries: Tensor, axis: Axis, shape: Sequence[int]) -> Tensor | None:
    """Entries that were measured along an axis with the shape that its layer has now; None if they do not fit, whatever was made since."""
    if list(entries.shape) == list(shape):
        return entries
    made = [
        (length, stretch)
        for name, length, stretch in _MADE.get(axis.module.find_module(), ())
        if name == axis.name and stretch.dim != axis.dim
    ]
    for first in reversed(range(len(made))):  # the fewest growths that explain the difference
        value = entries
        for length, stretch in made[first:]:
            if value.shape[stretch.dim] != length:
                break
            value = carry_entries(value, stretch)
        if list(value.shape) == list(shape):
            return value
    return None


class Passing:
    """Large parameters of a copy that is wider for a trial: they have their values only while the layer runs that has them.

    All of them at once would be a second copy of the model. In between they have their new shape and not a number in them, so that
    whoever reads them without calling the layer is found out.
    """

    def __init__(self, layers: Callable[[Tensor], Sequence[nn.Module]]) -> None:
        """``layers``: those that have a parameter, where nothing else reads it; otherwise none."""
        self._layers = layers
        self._made: dict[int, tuple[Tensor, Tensor, list[Callable[[Tensor], Tensor]]]] = {}

    def takes(self, tensor: Tensor) -> bool:
        return is_large(tensor) and bool(self._layers(tensor))

    def widen(self, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        """Have the value of today be made of the one before."""
        self._made.setdefault(id(tensor), (tensor, tensor.data, []))[2].append(make)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The layers run with their values as long as the context lasts."""
        handles: list[Any] = []
        try:
            for tensor, old, makes in self._made.values():
                empty = tensor.data
                for layer in self._layers(tensor):
                    fill, let_go = self._filling(tensor, old, makes), partial(self._set, tensor, empty)
                    handles.append(layer.register_forward_pre_hook(fill, prepend=True))
                    handles.append(layer.register_forward_hook(let_go, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _filling(
        self, tensor: Tensor, value: Tensor, makes: Sequence[Callable[[Tensor], Tensor]]
    ) -> Callable[..., None]:
        def fill(*_: Any) -> None:
            tensor.data = reduce(lambda before, make: make(before), makes, value)

        return fill

    @staticmethod
    def _set(tensor: Tensor, value: Tensor, *_: Any) -> None:
        tensor.data = value


class Widening(Edit):
    """Parameters and buffers get more entries, and the attributes that count them follow. The objects stay."""

    passing: Passing | None = None  # for a trial in a copy of a model
    _old: list[Tensor] | None = None  # what they held before: a trial in a copy of a model takes it back at once

    def __init__(
        self, model: nn.Module, site: Site, *, strict: bool = True, made: tuple[str, nn.Module] | None = None
    ) -> None:
        assert isinstance(site.move, Width)
        self._model = model
        self.renames, self.beside = {}, {}
        if made is None:
            self._plan(model, site, strict)
        else:
            self.name, self.module = made
            self.site, self._move = site, site.move.in_model(model)
            self.resized = recall(self.module, resizes(model, self._move, made=True))
        self.copies = bool(self._move.sources)
        check_sizes(self._move)
        self._sharded = is_sharded(model)
        if made is None and self._sharded:
            check_resized(model, {id(each.tensor): each.new_shape for each in self.resized})
        check_hooks(self.resized, made=made is not None)

    def _plan(self, model: nn.Module, site: Site, strict: bool) -> None:
        move = site.move
        assert isinstance(move, Width)
        if move.blocks and not covers_all_blocks(model, move):
            raise UnknownSite(
                f"'{site}' is for all blocks of this {type(model).__name__}, but their number has changed. Call find_sites again."
            )
        sources = move.sources or STARTS[move.start].sources(move.units, move.more)
        self._move = move = replace(move.in_model(model), sources=sources)
        self.name, self.module = site.find(model)
        if strict and move.layers not in (None, layers_in(model)):
            raise MovedSite(
                f"a layer was inserted since find_sites found '{site}', and may read its units or make others. Call find_sites again."
            )
        self.resized = resizes(model, move, strict=strict)
        point = replace(site.point, anchor=Ref.to(self.name, self.module))
        self._done = _costing(move, self.resized)
        self.site = replace(site, point=point, move=self._done)
        self.beside = {each.name: tuple(each.old_shape) for each in self.resized}

    def build(self) -> None:
        entries = None if self._move._entries is None else _fitting(self._move, self._move._entries)
        if entries is None:  # never measured, or for another layer
            nothing = Entries(tuple(None for _ in self._move.axes))
            entries = nothing if self.copies else STARTS[self._move.start].entries(self._move)
        self.site = replace(self.site, move=replace(self._done, _entries=None))  # the record is plain data
        self._moves_old = bool(self._move.factors) or any(shift is not None for shift in entries.shifts)
        self._new = []
        for each in self.resized:
            old = whole_tensor(each.tensor)
            make = partial(_laid_out, resize=each, width=self._move, entries=entries)
            if self.passing is not None and self.passing.takes(each.tensor):
                self.passing.widen(each.tensor, make)
                self._new.append(old.new_full((), torch.nan).expand(tuple(each.new_shape)))
            else:
                self._new.append(sharded_like(make(old), each.tensor))

    def apply(self) -> None:
        change_sizes(self._move, self._move.more)
        note_widening(self._move)
        self._old = [each.tensor.data for each in self.resized]  # they get other memory now, so nobody changes these
        for each, old, value in zip(self.resized, self._old, self._new, strict=True):
            if self._moves_old or each.is_shared:
                each.lost[OWN] = (old,)
            put(each.tensor, value)
        if self._sharded:
            follow_shapes(self._model)
        if self.copies or self._moves_old:
            remember_lost(self.module, self.resized)

    def revert(self) -> None:
        forget(self.module, self.resized)
        for number, each in enumerate(self.resized):
            put(each.tensor, _before(each, self._move) if self._old is None else self._old[number])
        if self._sharded:
            follow_shapes(self._model)
        forget_widening(self._move)
        change_sizes(self._move, -self._move.more)


def _costing(width: Width, resized: Sequence[Resize]) -> Width:
    """The same with what it costs now: a width that was grown since it was found may have changed that."""
    more = [
        (len(each.new_shape) > 1, math.prod(each.new_shape) - math.prod(each.old_shape))
        for each in resized
        if each.is_parameter
    ]
    added, biases = sum(entries for _, entries in more), sum(entries for matrix, entries in more if not matrix)
    if added == width.added:
        return width
    flops = width.flops * (added - biases) / max(width.added - biases, 1)  # biases count no FLOPs
    return replace(width, added=added, flops=round(flops))


def resizes(
    model: nn.Module,
    width: Width,
    *,
    made: bool = False,
    strict: bool = False,
    change: Callable[[Axis], Stretch | Exchange] | None = None,
) -> list[Resize]:
    """The parameters and buffers that change, each once, with all their axes that do. ``made``: they have changed already.

    ``change``: how an axis does, if it does not get longer as that of the width.
    """
    by_tensor: dict[int, tuple[str, Tensor, dict[Stretch | Exchange, str]]] = {}
    for axis in width.axes:
        path, module = find_part(model, axis.module)
        tensor = getattr(module, axis.name, None)
        stretch = width.stretch(axis) if change is None else change(axis)
        if (
            not isinstance(tensor, Tensor)
            or tensor.dim() <= axis.dim
            or not _fits(stretch, tensor, axis.length if strict else 0, made=made)
        ):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else "missing"
            raise MovedSite(
                f"{path}.{axis.name} is {shape}, which does not hold the {width.units} units that find_sites saw: the model has changed. "
                "Call find_sites again."
            )
        _, _, stretches = by_tensor.setdefault(id(tensor), (f"{path}.{axis.name}", tensor, {}))
        stretches[stretch] = axis.fill
    for factor in width.factors:
        path, module = find_part(model, factor.module)
        tensor = getattr(module, factor.name, None)
        if not isinstance(tensor, Tensor):
            raise MovedSite(f"{path}.{factor.name} is missing: the model has changed. Call find_sites again.")
        by_tensor.setdefault(id(tensor), (f"{path}.{factor.name}", tensor, {}))
    found_ones = []
    for name, tensor, stretches in by_tensor.values():
        # From the end of an axis: what comes before keeps its position. What is exchanged, rows before columns.
        late = {stretch for stretch, fill in stretches.items() if change is not None and fill == "column"}
        ordered = tuple(sorted(stretches, key=lambda stretch: (stretch in late, stretch.dim, -stretch.start)))
        old = list(tensor.shape)
        for stretch in ordered if made else ():
            old[stretch.dim] -= stretch.change
        found_ones.append(Resize(name, tensor, ordered, tuple(old)))
    return found_ones


def layers_in(model: nn.Module) -> int:
    """How many layers were inserted into a model."""
    return sum(new_in(module) is not None for _, module in own_modules(model))


def check_hooks(resized: Sequence[Resize], *, made: bool = False) -> None:
    """Raise if a hook for the gradient of a parameter does not take one of the other shape: the next backward pass would fail."""
    for each in resized:
        shape = each.old_shape if made else each.new_shape
        for hook in list((getattr(each.tensor, "_backward_hooks", None) or {}).values()):
            try:
                given = hook(each.tensor.detach().new_zeros(shape))
                problem = (
                    "" if given is None or given.shape == shape else f"it returns a gradient of {tuple(given.shape)}"
                )
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                raise UnsupportedSite(
                    f"{each.name} has a hook on its gradient (register_hook) that does not take a gradient of {tuple(shape)} ({problem}). "
                    "Remove the hook first, and register one for the new shape afterwards."
                )


def check_sizes(width: Width) -> None:
    """Raise if something that should count the units of a width, bound to its modules, is not there or is not a number."""
    for size in width.sizes:
        value = attribute(size.module.find_module(), (*size.through, size.name), "missing")
        if type(value) is not int and not (size.unsaid and value is None):
            where = ".".join(part for part in (size.module.path, *size.through, size.name) if part)
            raise UnknownSite(
                f"{where} is {value!r}, which does not count the units that find_sites saw: the model has changed. Call find_sites again."
            )


def covers_all_blocks(model: nn.Module, width: Width) -> bool:
    """Whether all blocks that the model has now are among those of a width."""
    ours = Counter(family(path) for path in {axis.module.path for axis in width.axes})
    there = Counter(family(path) for path, _ in model.named_modules())
    return all(there[name] == count for name, count in ours.items())


def change_sizes(width: Width, more: int) -> None:
    """Let the attributes that count units follow; ``more`` may be below zero."""
    for size in width.sizes if more else ():
        holder = size.holder(size.module.find_module())
        value, before = getattr(holder, size.name), width.units * size.per_unit
        count = (before if value is None else value) + more * size.per_unit
        about_to_change(holder, size.name)
        setattr(holder, size.name, None if size.unsaid and count == before else count)
        fit_class(holder)


def _fits(stretch: Stretch | Exchange, tensor: Tensor, length: int, *, made: bool) -> bool:
    if length and tensor.shape[stretch.dim] != length:
        return False
    needed = stretch.start + stretch.outer * stretch.units * stretch.inner + (stretch.change if made else 0)
    return tensor.shape[stretch.dim] >= needed


def _fitting(width: Width, entries: Entries) -> Entries | None:
    """Entries that were measured, with the shape that the layers have now."""
    found: list[list[Tensor | None]] = []
    more = width.more if entries.sizes is None else 1
    for given, units in ((entries.values, more), (entries.shifts, width.units)):
        found.append([])
        for axis, new in zip(width.axes, given, strict=True) if given else ():
            found[-1].append(None if new is None else follow_entries(new, axis, axis.shape_of(units)))
            if new is not None and found[-1][-1] is None:
                return None
    return Entries(tuple(found[0]), tuple(found[1]), entries.sizes)


def grown_value(value: Tensor, resize: Resize, width: Width, entries: Entries) -> Tensor:
    """One tensor after the change; where two axes grow, what is new in both is a column. Gradients flow through it."""
    shifts = entries.shifts or tuple(None for _ in width.axes)
    fills: dict[Stretch | Exchange, tuple[Axis, Tensor | None, Tensor | None]] = {
        width.stretch(axis): (axis, entries.along(index, axis), shift)
        for index, (axis, shift) in enumerate(zip(width.axes, shifts, strict=True))
        if getattr(axis.module.find_module(), axis.name, None) is resize.tensor
    }
    value = value * _factor(resize, width) if width.factors else value
    moved = [_beside(value, axis, shift.to(value)) for axis, _, shift in fills.values() if shift is not None]
    # Rows first: columns are zero in them. Copies are copied with everything.
    in_order = sorted(resize.stretches, key=lambda each: not is_copied(resize) and fills[each][0].fill != "row")
    for stretch in in_order:
        axis, new, _ = fills[stretch]
        entered = stretch.copied if isinstance(stretch, Copied) else stretch.applied
        value = entered(value, fill_entries(axis, value, new))
    for shift in moved:  # last: copies are of units as they were
        value = value + resize.stretched(shift, along=range(shift.dim()))
    return value


def _laid_out(old: Tensor, resize: Resize, width: Width, entries: Entries) -> Tensor:
    """The same, in memory as the tensor was before."""
    return like_layout(grown_value(old, resize, width, entries), old)


def _beside(value: Tensor, axis: Axis, entries: Tensor) -> Tensor:
    """Entries along an axis of a tensor, with zeros for those that are not of its units."""
    after = value.shape[axis.dim] - axis.start - entries.shape[axis.dim]
    padding = [(axis.start, after) if dim == axis.dim else (0, 0) for dim in reversed(range(value.dim()))]
    return F.pad(entries, [part for pair in padding for part in pair])


def _before(resize: Resize, width: Width) -> Tensor:
    """A tensor on the way back: to the bit as it was where that is known, otherwise what it has now of the old units."""
    known = resize.lost.get(OWN)
    if known is not None:
        value = known[0]
    else:
        value = whole_tensor(resize.tensor)
        value = (given_back(resize, value) if is_copied(resize) else resize.shrunk(value)) / _factor(resize, width)
    return sharded_like(like_layout(value, resize.tensor), resize.tensor)


def _factor(resize: Resize, width: Width) -> float:
    """What a growth multiplies the old entries of a tensor with."""
    own = [factor.by for factor in width.factors if getattr(factor.module.find_module(), factor.name) is resize.tensor]
    return math.prod(own)
