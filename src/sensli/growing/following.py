"""What follows a model when a Grower inserts a layer, and when it takes one back: optimizers, schedulers, averages, the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sensli.growing.options import Options
from sensli.merits.merits import Merit
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site
from sensli.surgery.averaging import Averaged, check_alike, follow, unfollow
from sensli.surgery.dead import renew
from sensli.surgery.history.growth import Growth
from sensli.surgery.history.history import History
from sensli.surgery.insertion import grow
from sensli.surgery.state.optim import Optimizers, as_optimizers
from sensli.surgery.state.rates import Schedulers
from sensli.surgery.undoing import undo


@dataclass
class Followers:
    """The optimizers, schedulers and averages of one model."""

    optimizer: Optimizers
    scheduler: Schedulers
    averaged: Averaged

    def check(self, model: nn.Module, options: Options) -> None:
        """Refuse those that could never follow a growth with these options, before any training."""
        options.check_followers(bare(model), self.optimizer, self.scheduler)
        check_alike(model, self.averaged)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers, without wrappers of other libraries."""
        return as_optimizers(self.optimizer)

    def insert(
        self,
        model: nn.Module,
        merit: Merit,
        history: History,
        options: Options,
        *,
        when: Mapping[str, int],
        first: bool,
        measured: bool = True,
    ) -> Growth:
        """Insert the layer, and let everything follow. What concerns the rest of the model is done once per look, with the ``first``."""
        check_alike(model, self.averaged)
        growth = grow(
            model, merit.site, optimizer=self.optimizer, scheduler=self.scheduler, lr_scale=options.lr_scale if first else 1.0,
            own_rate=options.own_rate, group=options.group, freeze_rest=options.freeze_rest,
        )  # fmt: skip
        found = {"merit": merit.value, "ratio": merit.ratio} if measured else {}
        growth = replace(growth, details={**when, **found})
        history.append(growth)  # at once: what is in the history is taken back if anything fails from here on
        follow(self.averaged, growth, model)
        return growth

    def recycle(self, model: nn.Module, site: Site, history: History, *, when: Mapping[str, int], check: Any) -> Growth:
        """Give dead units a new start, and let everything follow."""
        check_alike(model, self.averaged)
        growth = replace(renew(model, site, optimizer=self.optimizer, check=check), details=dict(when))
        history.append(growth)
        follow(self.averaged, growth, model)
        return growth

    def take_back(self, model: nn.Module, history: History, kept: int) -> None:
        """Undo all growths but the first ones, the last one first."""
        for growth in reversed(history[kept:]):
            unfollow(self.averaged, growth)
            undo(model, growth, optimizer=self.optimizer, scheduler=self.scheduler)
            history.pop()
