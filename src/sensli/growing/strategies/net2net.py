"""Net2Net (Chen, Goodfellow, Shlens 2016), wider: every new unit is a copy of one that is there, and both share what read the one.

How is `start="net2net"`; where is left to the user, so the widths are taken in turn. The paper widens all layers at once, once, on a
trained network (``count`` large enough does that), and begins again with a tenth of the learning rate. Its way deeper is
`"net2net-deeper"`. The function is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import nn

from sensli.growing.strategies.rival import Rival
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.moves.sites import Site, Sites
from sensli.text.names import UNMEASURED


class Net2Net(Rival):
    """One width after the other; nothing is measured."""

    start_of_sites: ClassVar[str] = "net2net"
    in_turn: ClassVar[bool] = True

    def propose(self, model: nn.Module, example: Any) -> Sites:
        return self._search.sites(model, example)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return Merits([Merit(site, 1.0) for site in sites], norm=UNMEASURED, batches=0)
