"""A control: a random width, with random rows and zero columns. The function is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sensli.growing.strategies.rival import Rival
from sensli.growing.triggers import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.moves.sites import Site, Sites
from sensli.text.names import UNMEASURED


class RandomUnits(Rival):
    """Measures nothing."""

    def propose(self, model: nn.Module, example: Any) -> Sites:
        return self._search.sites(model, example)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return Merits([Merit(site, 1.0) for site in sites], norm=UNMEASURED, batches=0)

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        drawn = torch.randperm(len(merits), generator=self.generator, device=self.generator.device).tolist()
        return [merits[index].site for index in drawn]
