"""Which modules of a model are boxes of a drawing: one level of detail for all of it, so that equal blocks look equal.

A stack of equal blocks is a stack of boxes that are not opened; everything else is opened level by level while there is room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from sensli.modules.chain import Chain
from sensli.modules.marks import new_in

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


def inner(module: nn.Module) -> nn.Module:
    """The module itself, without the layers that were inserted around it."""
    while isinstance(module, Chain):
        module = module._modules["anchor"] or module
    return module


def join(path: str, name: str) -> str:
    """The path of a part."""
    return f"{path}.{name}" if path and name else path or name


def _opens(box: Box) -> bool:
    if isinstance(box.module, Chain):
        return True  # it is there only for what was inserted beside its module
    if box.closed or box.bare or is_parametrized(box.module):
        return False
    parts = list(box.module.children())
    # A module with weights and plain layers, as attention has, is a layer to a person; with blocks inside, it is a model.
    return bool(parts) and (not _own(box.module) or any(_has_parts(part) for part in parts))


def _must_open(box: Box) -> bool:
    return isinstance(box.module, Chain) or (not box.alike and _is_group(box.module))


def _parts(box: Box) -> Iterator[Box]:
    own = _own(box.module)
    if own:
        yield Box(join(box.path, own[0]), box.module, bare=True)
    equal = _equal(box.module, alone=isinstance(box.module, nn.ModuleList))
    for name, part in box.module.named_children():
        alike = box.alike and name == "anchor" if isinstance(box.module, Chain) else id(part) in equal
        closed = new_in(part) is not None or (alike and not _is_group(inner(part)))
        yield Box(join(box.path, name), part, alike, closed)


def _old_parts(box: Box) -> int:
    """How many boxes this one would become, without those that growths have added."""
    if new_in(box.module) is not None:
        return 0
    if not _opens(box):
        return 1
    return sum(new_in(part) is None and not _is_empty(part) for part in box.module.children())


def _equal(parent: nn.Module, *, alone: bool = False) -> set[int]:
    """Those of a module's parts that are equal blocks; ``alone``: also a block that has no equal."""
    kinds = [(id(part), _kind(inner(part), isinstance(parent, _RUNS))) for part in parent.children()]
    counts = Counter(kind for _, kind in kinds)
    return {part for part, kind in kinds if kind is not None and (alone or counts[kind] > 1)}


def _kind(module: nn.Module, in_a_row: bool) -> tuple[type, ...] | None:
    """What equal blocks have in common, or None if the module is not a block."""
    parts = [type(inner(part)) for part in module.children() if new_in(part) is None]
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


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _is_empty(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS):
        return all(_is_empty(part) for part in module.children())
    return isinstance(module, nn.Identity)
