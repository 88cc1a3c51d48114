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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from sensli.growing.searching import Search
from sensli.growing.strategies.by_one import refuse_sharded
from sensli.growing.strategies.redrawn import redrawn
from sensli.growing.strategies.rival import Rival
from sensli.growing.strategies.sparsity import Sparsity, sizes
from sensli.growing.trigger import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules.flops import count_flops
from sensli.modules.wrappers import bare
from sensli.moves.dead.dead import Narrow
from sensli.moves.sites import Site, Sites
from sensli.moves.width.confirming import in_order
from sensli.moves.width.width import Width
from sensli.surgery.history.history import History
from sensli.text.names import UNMEASURED

THRESHOLD = 0.01
LEAST = 2  # units of a layer that stay: one alone could not be widened again
REST, SHRINK, EXPAND = PHASES = ("rest", "shrink", "expand")  # what the next look does: begin, remove, widen


class MorphNet(Rival):
    """Widths by what a sparse training leaves of them."""

    keeps: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = True

    def __init__(self, *, units: int | float = 0.25, where: Any = None, seed: int = 0) -> None:
        super().__init__(units=units, where=where, seed=seed)
        self.units, self.phase, self.sparsity = units, REST, Sparsity()
        self._search = Search(layer="auto", where=where, grow="units", units=1, start="random")

    # --- the looks ---

    def propose(self, model: nn.Module, example: Any) -> Sites:
        network, widths = bare(model), self._search.sites(model, example)
        if self.phase == REST:
            self.sparsity.flops = max(1, int(count_flops(network, example)))
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
        network = bare(model)
        refuse_sharded(network, self)
        if self.phase != REST:
            made = {
                (axis.module.path, axis.name)
                for site in sites if isinstance(site.move, Width)
                for axis in site.move.axes if axis.fill == "row"
            }  # fmt: skip
            units = [site.move.units for site in sites if isinstance(site.move, Width)]
            share = self.units if isinstance(self.units, float) or not units else self.units * len(units) / sum(units)
            sites = [
                redrawn(site, network, share, made, self.generator) if isinstance(site.move, Width) else site
                for site in sites
            ]
        return Merits([Merit(site, 1.0) for site in sites], norm=UNMEASURED, batches=0)

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
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
