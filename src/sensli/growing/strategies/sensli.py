"""The paper's method: a layer at the site with the largest merit, if it is worth it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from sensli.growing.options import OF_STRATEGIES, Options
from sensli.growing.searching import Search
from sensli.growing.strategies import generators
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.threshold import Blind, Threshold
from sensli.growing.trigger import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.measuring import measure
from sensli.merits.merits import Merit, Merits
from sensli.merits.ranking import chosen, is_control
from sensli.moves.sites import Site, Sites
from sensli.surgery.history.reasons import reason_of, rule_of


class Sensli(Strategy):
    """Proposes what `find_sites` finds, scores by `measure`, and takes what passes the threshold by the order of ``select``."""

    takes: ClassVar[frozenset[str]] = OF_STRATEGIES

    def __init__(self, options: Options) -> None:
        self.options = options
        self.threshold = Threshold(options.tau, options.floor)
        self._search = Search(
            layer=options.layer, where=options.where, kernel_size=options.kernel_size, init=options.init, grow=options.grow,
            units=options.units, start=options.start,
        )  # fmt: skip
        # Not the global random state, which growing leaves alone.
        self._generator = torch.Generator().manual_seed(options.seed)

    @classmethod
    def made(cls, options: Options) -> Sensli:
        return cls(options)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        return self._search.sites(model, example)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        options = self.options
        blind = Blind(loss_fn) if loss_fn is not None and options.floor else None
        merits = measure(
            model, sites, batches, blind or loss_fn, norm=options.norm, ratio=True, confidence=options.confidence,
            tolerance=options.tolerance,
        )  # fmt: skip
        if options.floor:
            self.threshold.learn_scale(model, blind, merits)
        return merits

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        worth = self.threshold.worth(merits)
        found = chosen(self.options.select, merits, worth, self.options.count, self._generator, per=self.options.per)
        return [merit.site for merit in found]

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        return reason_of(
            merits, taken, select=self.options.selection, tau=self.threshold.tau, floor=self.threshold.least_gain(merits),
            control=is_control(self.options.select), per=self.options.per,
        )  # fmt: skip

    def rule(self, merits: Merits, taken: Sequence[Merit]) -> str:
        return rule_of(merits, taken, self.options.selection)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": generators.saved(self._generator), "largest_loss": self.threshold.largest_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loss, generator = _loss(state.get("largest_loss", 0.0)), generators.read(state["generator"])
        self.threshold.largest_loss = loss
        self._generator.set_state(generator)


def _loss(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"largest_loss is {value!r}")
    return float(value)
