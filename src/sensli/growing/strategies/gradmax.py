"""GradMax (Evci, van Merrienboer, Unterthiner, Vladymyrov, Pedregosa 2022): zero rows, and columns that give these the largest gradient.

How is `start="gradmax"`. Where is not part of the method: its code widens all layers at once or takes them in turn, as here; the
singular values that it computes could rank them (`Grower(grow="units", start="gradmax")` does that). It looks at one batch. The function
is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import nn

from sensli.growing.strategies.rival import Rival
from sensli.merits.backward import LossFunction
from sensli.merits.measuring import measure
from sensli.merits.merits import Merits
from sensli.moves.sites import Site, Sites


class GradMax(Rival):
    """One width after the other, with the singular vectors of one batch."""

    start_of_sites: ClassVar[str] = "gradmax"
    in_turn: ClassVar[bool] = True

    def propose(self, model: nn.Module, example: Any) -> Sites:
        return self._search.sites(model, example)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return measure(model, sites, batches, loss_fn, norm="frobenius", ratio=False, max_batches=1)
