"""Units made sparse while a model trains: MorphNet's regulariser, whose gradient is added before each step of an optimizer.

s / C sum of c_l r_i over all units i of all widths l, with C the FLOPs of the network, c_l those of one unit of the width, and r_i the size
of a unit: |gamma| of the batch norm on its way, otherwise the root of the mean square of its row (group lasso). Each process adds the same
gradient to gradients that are equal on all of them.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import SensliError
from sensli.moves.sites import Site
from sensli.moves.width.entries import by_unit
from sensli.moves.width.width import Axis, Width

STRENGTH = 1.0


class Sparsity:
    """The regulariser of the widths that it was begun with, until it ends."""

    def __init__(self) -> None:
        self.flops = 1  # of the network
        self.watched: list[dict[str, Any]] = []  # the widths whose units are made sparse, as plain data
        self._bound: list[Width] = []
        self._shapes: list[torch.Size] | None = None  # of what is bound; None: nothing yet
        self._handles: list[Any] = []

    def begin(self, sites: Iterable[Site]) -> None:
        """From now on, for these widths."""
        self.set([json.loads(json.dumps(site.by_path().to_dict())) for site in sites])

    def end(self) -> None:
        """Nothing is added any more."""
        self.set([])

    def set(self, watched: Sequence[dict[str, Any]]) -> None:
        """The widths as plain data."""
        self.watched, self._shapes = list(watched), None

    def attend(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Follow the steps of these optimizers from now on, and of no others."""
        for handle in self._handles:
            handle.remove()
        self._model, self._shapes = weakref.ref(model), None
        self._handles = [optimizer.register_step_pre_hook(self._add_gradient) for optimizer in optimizers]

    def penalty(self, widths: Iterable[Width]) -> Tensor:
        """The regulariser."""
        costs = [width.flops / width.more / self.flops * sizes(width).sum() for width in widths]
        return STRENGTH * torch.stack(costs).sum()

    def _add_gradient(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: the gradient of the regulariser, as if it were in the loss."""
        model = self._model()
        if not self.watched or model is None:
            return
        self._bind(model)
        if not self._bound:
            return
        known = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch.enable_grad():
            found = torch.autograd.grad(self.penalty(self._bound), known, allow_unused=True)
        for parameter, gradient in zip(known, found, strict=True):
            if gradient is not None:
                parameter.grad = parameter.grad + gradient

    def _bind(self, model: nn.Module) -> None:
        """Find the widths in the model, again if a shape has changed: by `undo`, or by a growth of somebody else."""
        if self._shapes is None:
            moves = [Site.from_dict(data).move for data in self.watched]
        elif self._shapes != _shapes(self._bound):
            moves = list(self._bound)
        else:
            return
        found = (_of_today(move, model) for move in moves if isinstance(move, Width))
        self._bound = [width for width in found if width is not None]
        self._shapes = _shapes(self._bound)


def _of_today(width: Width, model: nn.Module) -> Width | None:
    """A width with the units that it has now; None where it is gone, or its layers no longer agree."""
    try:
        width = width.on(model)
    except SensliError:
        return None
    axes, units = [], set()
    for axis in width.axes:
        tensor = getattr(axis.module.find_module(), axis.name, None)
        if not isinstance(tensor, Tensor) or tensor.dim() <= axis.dim:
            return None
        each, length = axis.outer * axis.inner, tensor.shape[axis.dim]
        more, rest = divmod(length - (axis.length or axis.start + each * width.units), each)
        if rest:
            return None
        units.add(width.units + more)
        axes.append(replace(axis, length=length))
    return replace(width, units=units.pop(), axes=tuple(axes)) if len(units) == 1 and min(units) > 0 else None


def _shapes(widths: Iterable[Width]) -> list[torch.Size]:
    return [getattr(axis.module.find_module(), axis.name).shape for width in widths for axis in width.axes]


def sizes(width: Width) -> Tensor:
    """The size of each unit of a width that is bound to its modules: |gamma| of a batch norm, or the root mean square of its rows."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    gammas = [axis for axis in width.axes if axis.name == "weight" and isinstance(axis.module.find_module(), norms)]
    if gammas:
        return _entries(width, gammas[0]).abs()
    rows = []
    for axis in width.axes:
        own = _entries(width, axis)
        if axis.fill == "row" and own.dim() > 1:
            rows.append(by_unit(own.movedim(axis.dim, 0).flatten(1), axis))
    # A root has no slope at zero.
    return (torch.cat(rows, 1).square().mean(1) + 1e-24).sqrt()


def _entries(width: Width, axis: Axis) -> Tensor:
    """Those of the units that are there, with a graph to their parameter."""
    tensor: Tensor = getattr(axis.module.find_module(), axis.name)
    return tensor.narrow(axis.dim, axis.start, axis.outer * width.units * axis.inner)
