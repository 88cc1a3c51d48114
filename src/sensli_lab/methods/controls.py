"""Controls: SensLI's own sites and starts with one of its choices left to chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from sensli.growing.looking import Sensli
from sensli.growing.options import Options
from sensli.growing.strategy import OptionalLoss
from sensli.growing.triggers import TriggerContext
from sensli.merits.merits import Merits
from sensli.moves.sites import Site
from sensli.text.commands import GROW
from sensli_lab.methods.searching import UnitMethod

# ---- A control: SensLI's own sites and starts, at a random one of them. What is measured decides whether to grow, not
# where.
#
# It is `Grower(select="random")` under a name. The function is kept.


class RandomPlace(Sensli):
    """Chooses among the sites by lot."""

    takes: ClassVar[frozenset[str]] = Sensli.takes - {"select"}
    grows: ClassVar[tuple[str, ...]] = GROW

    @classmethod
    def made(cls, options: Options) -> Sensli:
        return cls(replace(options, strategy="sensli", select="random"))


class RandomStart(Sensli):
    """Chooses by the merits of the best rows, and hands over the sites as they were before the measurement, whose rows are random."""

    takes: ClassVar[frozenset[str]] = Sensli.takes - {"init"}

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        return super().score(model, sites, batches, loss_fn).with_sites(sites)


class RandomUnits(UnitMethod):
    """Random widths with random rows; nothing is measured."""

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        drawn = torch.randperm(len(merits), generator=self.generator, device=self.generator.device).tolist()
        return [merits[index].site for index in drawn]
