"""The layers of a model as a person would draw them: a short list of boxes in the order of the modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from sensli.modules.marks import changed_in, grown, new_in
from sensli.moves.layer.forms import ParametricLayer, ResidualLayer

LIMIT = 40  # boxes: what fits on a screen; a deeper model shows blocks instead of their layers


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
    """The model's layers in the order they were registered, opened level by level as long as there are at most ``limit``.

    A layer that was inserted or widened always has its own box; where there are still too many, neighbours share a box.
    """
    boxes: list[tuple[str, nn.Module]] = list(model.named_children()) if _opens(model) else [("", model)]
    opened = True
    while opened:
        opened = False
        # all of one level or none, so that equal blocks look equal; but what holds an inserted layer must be opened
        room = sum(len(list(m.children())) if _opens(m) else 1 for _, m in boxes) <= limit
        following: list[tuple[str, nn.Module]] = []
        for path, module in boxes:
            if _opens(module) and (room or _holds_growth(module)):
                following += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
                opened = True
            else:
                following.append((path, module))
        boxes = following
    units = [
        Unit(
            path,
            _label(module),
            sum(p.numel() for p in module.parameters()),
            new_in(module),
            _units(module),
            changed_in(module),
        )
        for path, module in boxes
    ]
    return tuple(units if len(units) <= limit else _fold(units, limit))


def _fold(units: list[Unit], limit: int) -> list[Unit]:
    """Neighbours that did not grow share a box, as few as it takes."""
    old = sum(not _grew(unit) for unit in units)
    size = math.ceil(old / max(1, limit - (len(units) - old)))
    folded: list[Unit] = []
    for grew, run in groupby(units, key=_grew):
        members = list(run)
        if grew:
            folded += members
            continue
        for start in range(0, len(members), size):
            part = members[start : start + size]
            label = part[0].label if len(part) == 1 else f"{part[0].label} and {len(part) - 1} more"
            folded.append(Unit(part[0].path, label, sum(unit.parameters for unit in part)))
    return folded


def _grew(unit: Unit) -> bool:
    return unit.growth is not None or bool(unit.changes)


def _opens(module: nn.Module) -> bool:
    """Whether a box is better shown as its parts: a leaf, an inserted layer and a module that itself has weights are not."""
    return (
        new_in(module) is None
        and any(True for _ in module.children())
        and not any(True for _ in module.parameters(recurse=False))
    )


def _holds_growth(module: nn.Module) -> bool:
    return any(True for _ in grown(module))


def _units(module: nn.Module) -> int | None:
    """How many units a layer makes; of one that was inserted, its first map."""
    for name in ("out_features", "out_channels"):
        found = getattr(module, name, None)
        if isinstance(found, int):
            return found
    parts = module.children() if new_in(module) is not None else ()
    return next((units for units in map(_units, parts) if units is not None), None)


def _label(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.Linear):
        return f"{name}({module.in_features}, {module.out_features})"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        kernel = module.kernel_size
        size = str(kernel[0]) if len(set(kernel)) == 1 else "x".join(map(str, kernel))
        return f"{name}({module.in_channels}, {module.out_channels}, {size})"
    if new_in(module) is not None and isinstance(module, nn.Sequential):
        return " + ".join(_label(part) for part in module.children())
    if isinstance(module, ResidualLayer | ParametricLayer):  # as their sites print: "Residual(Conv2d(8, 8, 3), Tanh)"
        parts = [_label(part) for part in module.children()][:2]
        return f"{name.removesuffix('Layer')}({', '.join(parts)})"
    return name
