"""The layers of a model as a person would draw them: a list of boxes in the order of the modules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from sensli.modules.grown import CHANGED, Chain, ParametricLayer, ResidualLayer, grown_modules, new_in
from sensli.text.records import Plain

# ---- Which modules of a model are boxes of a drawing: one level of detail for all of it, so that equal blocks look equal.
#
# A stack of equal blocks is a stack of boxes that are not opened; everything else is opened level by level while
# there is room.

ROOM = 40  # boxes: what a person can look over; a larger model shows blocks instead of their layers

_RUNS = (nn.Sequential, nn.ModuleList)
_CONTAINERS = (*_RUNS, nn.ModuleDict)


@dataclass(frozen=True)
class Box:
    """A module that may be drawn."""

    path: str
    module: nn.Module
    alike: bool = False  # one of several equal blocks
    closed: bool = False  # not to be opened, whatever room there is
    bare: bool = False  # only the weights of the module itself, without its parts


def boxes_of(model: nn.Module, room: int = ROOM) -> list[Box]:
    """The boxes in the order in which the modules were registered. Modules that do nothing are left out."""
    boxes, opened = [Box("", model)], True
    while opened:
        # all of one level or none, so that what is equal looks equal
        fits = len(boxes) == 1 or sum(_old_parts(box) for box in boxes) <= room
        opening = [_opens(box) and (fits or _must_open(box)) for box in boxes]
        opened = any(opening)
        boxes = [part for box, opens in zip(boxes, opening, strict=True) for part in (_parts(box) if opens else (box,))]
    return [box for box in boxes if not _is_empty(box.module)] or [Box("", model)]


def inner_module(module: nn.Module) -> nn.Module:
    """The module itself, without the layers that were inserted around it."""
    while isinstance(module, Chain):
        module = module._modules["anchor"] or module
    return module


def path_of_part(path: str, name: str) -> str:
    """The path of a part."""
    return f"{path}.{name}" if path and name else path or name


def _opens(box: Box) -> bool:
    if isinstance(box.module, Chain):
        return True  # it is there only for what was inserted beside its module
    if box.closed or box.bare or is_parametrized(box.module):
        return False
    parts = list(box.module.children())
    # A module with weights and plain layers, as attention has, is a layer to a person; with blocks inside, it is a model.
    return bool(parts) and (not _own(box.module) or any(list(part.children()) for part in parts))


def _must_open(box: Box) -> bool:
    return isinstance(box.module, Chain) or (not box.alike and _is_group(box.module))


def _parts(box: Box) -> Iterator[Box]:
    own = _own(box.module)
    if own:
        yield Box(path_of_part(box.path, own[0]), box.module, bare=True)
    equal = _equal(box.module, alone=isinstance(box.module, nn.ModuleList))
    for name, part in box.module.named_children():
        alike = box.alike and name == "anchor" if isinstance(box.module, Chain) else id(part) in equal
        closed = new_in(part) is not None or (alike and not _is_group(inner_module(part)))
        yield Box(path_of_part(box.path, name), part, alike, closed)


def _old_parts(box: Box) -> int:
    """How many boxes this one would become, without those that growths have added."""
    if new_in(box.module) is not None:
        return 0
    if not _opens(box):
        return 1
    return sum(new_in(part) is None and not _is_empty(part) for part in box.module.children())


def _equal(parent: nn.Module, *, alone: bool = False) -> set[int]:
    """Those of a module's parts that are equal blocks; ``alone``: also a block that has no equal."""
    kinds = [(id(part), _kind(inner_module(part), isinstance(parent, _RUNS))) for part in parent.children()]
    counts = Counter(kind for _, kind in kinds)
    return {part for part, kind in kinds if kind is not None and (alone or counts[kind] > 1)}


def _kind(module: nn.Module, in_a_row: bool) -> tuple[type, ...] | None:
    """What equal blocks have in common, or None if the module is not a block."""
    parts = [type(inner_module(part)) for part in module.children() if new_in(part) is None]
    if isinstance(module, nn.Sequential):
        return (type(module), *parts) if in_a_row and len(parts) > 1 else None
    return (type(module),) if parts and not isinstance(module, _CONTAINERS) else None


def _is_group(module: nn.Module) -> bool:
    """Whether equal blocks in a row are most of a module, as in a stage of a network.

    The heads of an attention are not most of its block, and its two attentions are not in a row.
    """
    half = _count(module) / 2
    for parent in (part for part in module.modules() if isinstance(part, _RUNS)):
        equal = _equal(parent)
        if equal and sum(_count(part) for part in parent.children() if id(part) in equal) > half:
            return True
    return False


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _own(module: nn.Module) -> list[str]:
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def _is_empty(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS):
        return all(_is_empty(part) for part in module.children())
    return isinstance(module, nn.Identity)


LIMIT = 120  # boxes without a growth; where there are more, neighbours share one


@dataclass(frozen=True)
class Unit(Plain):
    """One box: a module, how it prints in short, which growth it came with, and which ones changed it."""

    path: str
    label: str
    parameters: int
    growth: int | None = None
    units: int | None = None  # how many it makes, where that is one number
    changes: tuple[int, ...] = ()  # numbers of the growths that gave it more of them


def outline(model: nn.Module, limit: int = LIMIT) -> tuple[Unit, ...]:
    """The model's layers and blocks in the order they were registered.

    Whatever was inserted or widened is a separate box, also inside a block, whose box comes right before it. Every parameter counts in
    one box.
    """
    counted: set[int] = set()
    return tuple(_fold([unit for box in boxes_of(model) for unit in _drawn(box, counted)], limit))


def _drawn(box: Box, counted: set[int]) -> Iterator[Unit]:
    """A box, and those of the growths inside it."""
    members = [box, *_grown_inside(box)]
    parts = [box.module] if box.bare else list(box.module.modules())
    owner = {id(part): number for number, each in enumerate(members) for part in each.module.modules()}  # the innermost
    order = list(range(len(members)))
    if new_in(box.module) is not None:  # layers inside a new one are its neighbours, in the order of the data flow
        layers = [owner[id(part)] for part in parts if part._parameters and not part._modules]
        order.sort(key=lambda number: layers.index(number) if number in layers else 0)
    for number in order:
        yield _unit(members[number], [part for part in parts if owner[id(part)] == number], counted)


def _grown_inside(box: Box) -> Iterator[Box]:
    """Modules inside a box that a growth made; and those that one changed, unless they are parts of a new layer."""
    if box.bare:
        return
    known, new = {id(box.module)}, set[int]()  # modules that have a box; parts of new layers
    for _, path, module in grown_modules(box.module):
        if new_in(module) is not None:
            new.update(map(id, module.modules()))
        elif id(module) in new:
            continue
        if id(module) not in known:
            known.add(id(module))
            yield Box(path_of_part(box.path, path), module)


def _unit(box: Box, own: Sequence[nn.Module], counted: set[int]) -> Unit:
    """``own`` are the modules of the box that are in no other one."""
    tensors = {id(tensor): tensor for part in own for tensor in part._parameters.values() if tensor is not None}
    parameters = sum(tensor.numel() for key, tensor in tensors.items() if key not in counted)
    counted.update(tensors)
    if box.bare:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        return Unit(box.path, f"Parameter{more}", parameters)
    new = new_in(box.module)
    makers = own if new is not None else [inner_module(box.module)]
    changes = sorted(number for part in own for number in part.__dict__.get(CHANGED, ()))
    return Unit(box.path, _label(box.module), parameters, new, _units(makers), tuple(changes))


def _fold(units: list[Unit], limit: int) -> list[Unit]:
    """Neighbours that did not grow share a box, as few as it takes; a growth between them parts them and moves no others."""
    size, old, places = max(1, math.ceil(sum(unit.growth is None for unit in units) / limit)), 0, []
    for place, unit in enumerate(units):
        grew = unit.growth is not None or bool(unit.changes)
        places.append((-1, place) if grew else (old // size, 0))
        old += unit.growth is None
    folded = []
    for _, run in groupby(zip(places, units, strict=True), key=lambda pair: pair[0]):
        first, *others = (unit for _, unit in run)
        if others:
            parameters = sum(unit.parameters for unit in (first, *others))
            first = Unit(first.path, f"{first.label} and {len(others)} more", parameters)
        folded.append(first)
    return folded


def _units(makers: Sequence[nn.Module]) -> int | None:
    """How many units a layer makes; of one that was inserted, its first map."""
    found = (getattr(module, name, None) for module in makers for name in ("out_features", "out_channels"))
    return next((units for units in found if isinstance(units, int)), None)


def _label(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, Chain):
        return _label(inner_module(module))
    if isinstance(module, nn.Linear):
        return f"{name}({module.in_features}, {module.out_features})"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        kernel = module.kernel_size
        size = str(kernel[0]) if len(set(kernel)) == 1 else "x".join(map(str, kernel))
        return f"{name}({module.in_channels}, {module.out_channels}, {size})"
    parts = [_label(part) for part in module.children() if new_in(part) is None]
    if type(module) is nn.Sequential and 0 < len(parts) <= 4:
        return " + ".join(parts)
    if isinstance(module, ResidualLayer | ParametricLayer):  # as their sites print: "Residual(Conv2d(8, 8, 3), Tanh)"
        return f"{name.removesuffix('Layer')}({', '.join(parts[:2])})"
    return name
