"""The layers of a model as a person would draw them: a list of boxes in the order of the modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from sensli.modules.chain import Chain
from sensli.modules.marks import CHANGED, grown, new_in
from sensli.moves.layer.modules import ParametricLayer, ResidualLayer
from sensli.surgery.history.detail import Box, boxes_of, inner, join

LIMIT = 120  # boxes without a growth; where there are more, neighbours share one


@dataclass(frozen=True)
class Unit:
    """One box: a module, how it prints in short, which growth it came with, and which ones changed it."""

    path: str
    label: str
    parameters: int
    growth: int | None = None
    units: int | None = None  # how many it makes, where that is one number
    changes: tuple[int, ...] = ()  # numbers of the growths that gave it more of them

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unit:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**data, "changes": tuple(data.get("changes", ()))})


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
    for _, path, module in grown(box.module):
        if new_in(module) is not None:
            new.update(map(id, module.modules()))
        elif id(module) in new:
            continue
        if id(module) not in known:
            known.add(id(module))
            yield Box(join(box.path, path), module)


def _unit(box: Box, own: Sequence[nn.Module], counted: set[int]) -> Unit:
    """``own`` are the modules of the box that are in no other one."""
    tensors = {id(tensor): tensor for part in own for tensor in part._parameters.values() if tensor is not None}
    parameters = sum(tensor.numel() for key, tensor in tensors.items() if key not in counted)
    counted.update(tensors)
    if box.bare:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        return Unit(box.path, f"Parameter{more}", parameters)
    new = new_in(box.module)
    makers = own if new is not None else [inner(box.module)]
    changes = sorted(number for part in own for number in part.__dict__.get(CHANGED, ()))
    return Unit(box.path, _label(box.module), parameters, new, _units(makers), tuple(changes))


def _fold(units: list[Unit], limit: int) -> list[Unit]:
    """Neighbours that did not grow share a box, as few as it takes; a growth between them parts them and moves no others."""
    size, old, places = max(1, math.ceil(sum(unit.growth is None for unit in units) / limit)), 0, []
    for place, unit in enumerate(units):
        places.append((old // size, 0) if not _grew(unit) else (-1, place))
        old += unit.growth is None
    folded = []
    for _, run in groupby(zip(places, units, strict=True), key=lambda pair: pair[0]):
        first, *others = (unit for _, unit in run)
        if others:
            parameters = sum(unit.parameters for unit in (first, *others))
            first = Unit(first.path, f"{first.label} and {len(others)} more", parameters)
        folded.append(first)
    return folded


def _grew(unit: Unit) -> bool:
    return unit.growth is not None or bool(unit.changes)


def _units(makers: Sequence[nn.Module]) -> int | None:
    """How many units a layer makes; of one that was inserted, its first map."""
    found = (getattr(module, name, None) for module in makers for name in ("out_features", "out_channels"))
    return next((units for units in found if isinstance(units, int)), None)


def _label(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, Chain):
        return _label(inner(module))
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
