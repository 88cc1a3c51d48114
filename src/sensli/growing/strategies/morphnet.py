"""MorphNet (Gordon, Eban, Nachum, Chen, Wu, Yang, Choi 2018): shrink under a price for FLOPs, widen all layers alike, train from scratch.

A control more than a growth during training. Its looks follow each other in three steps: the first only begins to add a regulariser to
the loss, s / C sum of c_l r_i over all units i of all widths l, with C the FLOPs of the network, c_l those of one unit of the width, and
r_i the size of a unit: |gamma| of the batch norm on its way, otherwise the root of the mean square of its row (group lasso). The second
look removes the units with r below 0.01, at most all but two of a layer, and the regulariser ends. The third one widens all layers by the
share ``units`` and draws their weights again. If nothing is to be removed, the second look widens at once.

From the code: r, its threshold, and a strength s around 1. FLOPs of a unit are those that it adds to the network as it is, which is the
code's formula with the units that are there for alive ones. The code looks for the widening that fits a budget; here the share is given,
and the trigger's limits hold. Redrawn are the weights of all layers that make or read the units, as torch draws those of a new layer;
rows that are new do not read columns that are new at the same look. Layers in no width, and the optimizer, keep what they have: a
training really from scratch is a new model with the widths that were found. The function is not kept.
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

from sensli.growing.searching import Search
from sensli.growing.strategies.pairs import refuse_several
from sensli.growing.strategies.rival import Rival
from sensli.growing.trigger import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules.flops import count_flops
from sensli.modules.wrappers import bare
from sensli.moves.dead.dead import Narrow
from sensli.moves.sites import Site, Sites
from sensli.moves.width.confirming import in_order
from sensli.moves.width.entries import Entries, by_unit, existing, filled
from sensli.moves.width.width import Axis, Width
from sensli.surgery.history.history import History

STRENGTH = 1.0
THRESHOLD = 0.01
LEAST = 2  # units of a layer that stay: one alone could not be widened again
REST, SHRINK, EXPAND = PHASES = ("rest", "shrink", "expand")  # what the next look does: begin, remove, widen


class MorphNet(Rival):
    """Widths by what a sparse training leaves of them."""

    keeps: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = True

    def __init__(self, *, units: int | float = 0.25, where: Any = None, seed: int = 0) -> None:
        super().__init__(units=units, where=where, seed=seed)
        self.units, self.phase, self.flops = units, REST, 1
        self._search = Search(layer="auto", where=where, grow="units", units=1, start="random")
        self._watched: list[dict[str, Any]] = []  # the widths whose units are made sparse, as plain data
        self._bound: list[Width] | None = None
        self._handles: list[Any] = []

    # --- the looks ---

    def propose(self, model: nn.Module, example: Any) -> Sites:
        network, widths = bare(model), self._search.sites(model, example)
        if self.phase == REST:
            self.flops = max(1, int(count_flops(network, example)))
        if self.phase != SHRINK:
            return widths
        narrow = []
        for site in in_order(widths):
            assert isinstance(site.move, Width)
            size = sizes(site.move.on(network))
            small = [unit for unit in size.argsort().tolist() if size[unit] < THRESHOLD]
            small = small[: max(0, site.move.units - LEAST)]
            if small:
                saved = -site.move.added * len(small) // site.move.more
                narrow.append(replace(site, move=Narrow(site.move, tuple(sorted(small)), saved)))
        return Sites(narrow, widths.skipped, model_name=type(network).__name__) if narrow else widths

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        refuse_several()
        if self.phase != REST:
            network = bare(model)
            made = {
                (axis.module.path, axis.name)
                for site in sites if isinstance(site.move, Width)
                for axis in site.move.axes if axis.fill == "row"
            }  # fmt: skip
            units = [site.move.units for site in sites if isinstance(site.move, Width)]
            share = self.units if isinstance(self.units, float) or not units else self.units * len(units) / sum(units)
            sites = [
                self._wider(site, network, share, made) if isinstance(site.move, Width) else site for site in sites
            ]
        return Merits([Merit(site, 1.0) for site in sites], norm="none", batches=0)

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        if self.phase == REST:
            self._watched = [json.loads(json.dumps(merit.site.by_path().to_dict())) for merit in merits]
            self.phase, self._bound = SHRINK, None
            return []
        removed = any(isinstance(merit.site.move, Narrow) for merit in merits)
        self.phase, self._watched = EXPAND if removed else REST, []
        return [merit.site for merit in merits]

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        if self.phase == SHRINK:
            return "MorphNet makes units sparse from now on"
        return "MorphNet removed what became sparse" if self.phase == EXPAND else "MorphNet widened all layers alike"

    def _wider(self, site: Site, network: nn.Module, share: float, made: set[tuple[str, str]]) -> Site:
        """The site with a share of units more, and all weights of its layers drawn again, each by one width alone."""
        assert isinstance(site.move, Width)
        width = site.move.on(network)
        more = max(1, round(share * width.units))
        values: list[Tensor | None] = []
        shifts: list[Tensor | None] = []
        for axis in width.axes:
            old = existing(width, axis).detach()
            shape = list(old.shape)
            shape[axis.dim] = axis.outer * more * axis.inner
            drawn = axis.fill in ("row", "column")
            values.append(self._drawn(axis, shape, old) if drawn else None)
            if axis.fill == "column" and (axis.module.path, axis.name) in made:
                shifts.append(None)  # its rows are those of another width, which draws them
            elif drawn:
                shifts.append(self._drawn(axis, list(old.shape), old) - old)
            else:
                shifts.append(filled(axis, old, None) - old)
        known = site.move
        grown = replace(
            known, more=more, added=known.added * more // known.more, flops=known.flops * more // known.more,
            _entries=Entries(tuple(values), tuple(shifts)),
        )  # fmt: skip
        return replace(site, move=grown)

    def _drawn(self, axis: Axis, shape: Sequence[int], like: Tensor) -> Tensor:
        """As torch draws a linear layer or a convolution: uniform up to one over the root of the inputs. Biases are zero."""
        if like.dim() < 2:
            return like.new_zeros(shape)
        weight: Tensor = getattr(axis.module.find_module(), axis.name)
        bound = (weight.numel() / len(weight)) ** -0.5
        drawn = 2 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 1
        entries: Tensor = (drawn * bound).to(like)
        return entries

    # --- every step ---

    def attend(self, model: nn.Module, optimizers: Sequence[Optimizer], history: History) -> None:
        for handle in self._handles:
            handle.remove()
        self._model, self._bound = weakref.ref(model), None
        self._handles = [optimizer.register_step_pre_hook(self._add_gradient) for optimizer in optimizers]

    def penalty(self, widths: Iterable[Width]) -> Tensor:
        """The regulariser."""
        costs = [width.flops / width.more / self.flops * sizes(width).sum() for width in widths]
        return STRENGTH * torch.stack(costs).sum()

    def _add_gradient(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: the gradient of the regulariser, as if it were in the loss."""
        model = self._model()
        if self.phase != SHRINK or not self._watched or model is None:
            return
        if self._bound is None:
            moves = [Site.from_dict(data).move for data in self._watched]
            self._bound = [move.on(model) for move in moves if isinstance(move, Width)]
        known = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch.enable_grad():
            found = torch.autograd.grad(self.penalty(self._bound), known, allow_unused=True)
        for parameter, gradient in zip(known, found, strict=True):
            if gradient is not None:
                parameter.grad = parameter.grad + gradient

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "phase": self.phase, "flops": self.flops, "watched": list(self._watched)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        phase, flops, watched = state["phase"], state["flops"], state["watched"]
        if phase not in PHASES or type(flops) is not int or flops < 1:
            raise ValueError(f"phase is {phase!r} and flops is {flops!r}")
        for data in watched:
            Site.from_dict(data).check()
        super().load_state_dict(state)
        self.phase, self.flops, self._watched, self._bound = phase, flops, list(watched), None


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
