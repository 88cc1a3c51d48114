"""A control: the place that SensLI chooses, and new units with random rows instead of those that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import nn

from sensli.growing.strategies.sensli import Sensli
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merits
from sensli.moves.sites import Site


class RandomStart(Sensli):
    """Chooses by the merits of the best rows, and hands over the sites as they were before the measurement, whose rows are random."""

    takes: ClassVar[frozenset[str]] = Sensli.takes - {"start"}

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return super().score(model, sites, batches, loss_fn).with_sites(sites)
