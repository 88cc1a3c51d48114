"""MorphNet (Gordon, Eban, Nachum, Chen, Wu, Yang, Choi 2018): shrink under a price for FLOPs, widen all layers alike, train from scratch.

A control more than a growth during training. Its looks follow each other in three steps: the first only begins to add a regulariser to
the loss (`sparsity`). The second look removes the units whose size is below 0.01, at most all but two of a layer, and the regulariser ends.
The third one widens all layers by the share ``units`` and draws their weights again. If nothing is to be removed, the second look widens at
once.

From the code: the size of a unit, its threshold, and a strength around 1. FLOPs of a unit are those that it adds to the network as it is,
which is the code's formula with the units that are there for alive ones. The code looks for the widening that fits a budget; here the share
is given, and the trigger's limits hold. Layers in no width, and the optimizer, keep what they have: a training really from scratch is a new
model with the widths that were found. The function is not kept.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import SensliError
from sensli.growing.strategy import OptionalLoss
from sensli.growing.triggers import TriggerContext
from sensli.merits.merits import Merit, Merits
from sensli.modules.flops import count_flops
from sensli.modules.wrappers import bare
from sensli.moves.dead import Narrow
from sensli.moves.sites import Site, Sites
from sensli.moves.width.confirming import in_order, width_of
from sensli.moves.width.width import Axis, Entries, Width, by_unit, existing_entries, fill_entries
from sensli.surgery.history import History
from sensli_lab.methods.pairs import with_more
from sensli_lab.methods.searching import UnitMethod, equal_merits, refuse_sharded

# ---- Units made sparse while a model trains: MorphNet's regulariser, whose gradient is added before each step of an
# optimizer.
#
# s / C sum of c_l r_i over all units i of all widths l, with C the FLOPs of the network, c_l those of one unit of the
# width, and r_i the size of a unit: |gamma| of the batch norm on its way, otherwise the root of the mean square of
# its row (group lasso). Each process adds the same gradient to gradients that are equal on all of them.

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
        width = width.in_model(model)
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


# ---- A width with more units, whose layers begin again: all weights that make or read its units are drawn as torch draws
# a new layer's.
#
# Each weight is drawn by one width alone, and rows that are new do not read columns that are new at the same look.


def redraw_width(
    site: Site, network: nn.Module, share: float, made: set[tuple[str, str]], source: torch.Generator
) -> Site:
    """The site with a share of units more; ``made`` are the weights whose rows belong to a width, as path and name."""
    width = width_of(site).in_model(network)
    more = max(1, round(share * width.units))
    values: list[Tensor | None] = []
    shifts: list[Tensor | None] = []
    for axis in width.axes:
        old = existing_entries(width, axis).detach()
        shape = list(old.shape)
        shape[axis.dim] = axis.outer * more * axis.inner
        drawn = axis.fill in ("row", "column")
        values.append(_drawn(axis, shape, old, source) if drawn else None)
        if axis.fill == "column" and (axis.module.path, axis.name) in made:
            shifts.append(None)  # its rows are those of another width, which draws them
        elif drawn:
            shifts.append(_drawn(axis, list(old.shape), old, source) - old)
        else:
            shifts.append(fill_entries(axis, old, None) - old)
    entries = Entries(tuple(values), tuple(shifts))
    return replace(site, move=with_more(width_of(site), more, _entries=entries))


def _drawn(axis: Axis, shape: Sequence[int], like: Tensor, source: torch.Generator) -> Tensor:
    """As torch draws a linear layer or a convolution: uniform up to one over the root of the inputs. Biases are zero."""
    if like.dim() < 2:
        return like.new_zeros(shape)
    weight: Tensor = getattr(axis.module.find_module(), axis.name)
    bound = (weight.numel() / len(weight)) ** -0.5
    drawn = 2 * torch.rand(shape, generator=source, dtype=torch.float64, device=source.device) - 1
    entries: Tensor = (drawn * bound).to(like)
    return entries


THRESHOLD = 0.01
LEAST = 2  # units of a layer that stay: one alone could not be widened again
REST, SHRINK, EXPAND = PHASES = ("rest", "shrink", "expand")  # what the next look does: begin, remove, widen


class MorphNet(UnitMethod):
    """Widths by what a sparse training leaves of them."""

    by_ones: ClassVar[bool] = True
    keeps: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.phase, self.sparsity = REST, Sparsity()

    # --- the looks ---

    def propose(self, model: nn.Module, example: Any) -> Sites:
        network, widths = bare(model), super().propose(model, example)
        if self.phase == REST:
            self.sparsity.flops = max(1, int(count_flops(network, example)))
        if self.phase != SHRINK:
            return widths
        narrow = []
        for site in in_order(widths):
            width = width_of(site)
            size = sizes(width.in_model(network))
            small = [unit for unit in size.argsort().tolist() if size[unit] < THRESHOLD]
            small = small[: max(0, width.units - LEAST)]
            if small:
                saved = -width.added * len(small) // width.more
                narrow.append(replace(site, move=Narrow(width, tuple(sorted(small)), saved)))
        return Sites(narrow, widths.skipped, model_name=type(network).__name__) if narrow else widths

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        network = bare(model)
        refuse_sharded(network, self)
        if self.phase != REST:
            widths = [site.move for site in sites if isinstance(site.move, Width)]
            made = {(axis.module.path, axis.name) for width in widths for axis in width.axes if axis.fill == "row"}
            there = sum(width.units for width in widths)
            share = self.units if isinstance(self.units, float) or not there else self.units * len(widths) / there
            sites = [
                redraw_width(site, network, share, made, self.generator) if isinstance(site.move, Width) else site
                for site in sites
            ]
        return equal_merits(sites)

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        if self.phase == REST:
            self.sparsity.begin(merit.site for merit in merits)
            self.phase = SHRINK
            return []
        removed = any(isinstance(merit.site.move, Narrow) for merit in merits)
        self.phase = EXPAND if removed else REST
        self.sparsity.end()
        return [merit.site for merit in merits]

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        if self.phase == SHRINK:
            return "MorphNet makes units sparse from now on"
        return "MorphNet removed what became sparse" if self.phase == EXPAND else "MorphNet widened all layers alike"

    # --- every step, and what is saved ---

    def attend(self, model: nn.Module, optimizers: Sequence[Optimizer], history: History) -> None:
        self.sparsity.attend(model, optimizers)

    def state_dict(self) -> dict[str, Any]:
        own = self.sparsity
        return {**super().state_dict(), "phase": self.phase, "flops": own.flops, "watched": list(own.watched)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        phase, flops, watched = state["phase"], state["flops"], state["watched"]
        if phase not in PHASES or type(flops) is not int or flops < 1:
            raise ValueError(f"phase is {phase!r} and flops is {flops!r}")
        for data in watched:
            Site.from_dict(data).check()
        super().load_state_dict(state)
        self.phase, self.sparsity.flops = phase, flops
        self.sparsity.set(watched)
