"""What follows a model when a Grower inserts a layer: optimizers, schedulers, averages, the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sensli.growing.options import Options
from sensli.merits.merits import Merit
from sensli.modules.engines.all_or_nothing import AllOrNothing, Kept
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site
from sensli.surgery.averaging import Averaged, check_alike, follow, kept_of
from sensli.surgery.dead import renew
from sensli.surgery.handmade import Copies
from sensli.surgery.history.growth import Growth
from sensli.surgery.history.history import History
from sensli.surgery.insertion import grow
from sensli.surgery.state.optim import Optimizers, as_optimizers
from sensli.surgery.state.rates import Schedulers, as_schedulers


@dataclass
class Followers:
    """The optimizers, schedulers and averages of one model."""

    optimizer: Optimizers
    scheduler: Schedulers
    averaged: Averaged
    copies: Copies | None = None  # that the model had when the Grower was made

    def check(self, model: nn.Module, options: Options) -> None:
        """Refuse those that could never follow a growth with these options, before any training."""
        options.check_followers(bare(model), self.optimizer, self.scheduler)
        check_alike(model, self.averaged)
        self.copies = Copies(model)

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
        if self.copies is not None and not history:
            self.copies.check(self.optimizers)
        with AllOrNothing() as change:
            self.keep(change, model, history)
            growth = grow(
                model, merit.site, optimizer=self.optimizer, scheduler=self.scheduler, lr_scale=options.lr_scale if first else 1.0,
                own_rate=options.own_rate, group=options.group, freeze_rest=options.freeze_rest,
            )  # fmt: skip
            found = {"merit": merit.value, "ratio": merit.ratio} if measured else {}
            growth = replace(growth, details={**when, **found})
            history.append(growth)
            follow(self.averaged, growth, model)
        return growth

    def recycle(self, model: nn.Module, site: Site, history: History, *, when: Mapping[str, int], check: Any) -> Growth:
        """Give dead units a new start, and let everything follow."""
        check_alike(model, self.averaged)
        with AllOrNothing() as change:
            self.keep(change, model, history)
            growth = replace(renew(model, site, optimizer=self.optimizer, check=check), details=dict(when))
            history.append(growth)
            follow(self.averaged, growth, model)
        return growth

    def keep(self, change: AllOrNothing, model: nn.Module, history: History) -> Kept:
        """Let a change keep the model, all that follows it, and the history."""
        return change.keep(model, *self.optimizers, *as_schedulers(self.scheduler), *kept_of(self.averaged), history)
