"""The protocol of a start: what new units begin with, and what measures their worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from sensli.moves.move import Gauge
from sensli.moves.width.entries import Entries

if TYPE_CHECKING:
    from sensli.moves.sites import Site
    from sensli.moves.width.confirming import Trial
    from sensli.moves.width.width import Width


class Start:
    """One way in which new units begin, so that the function is kept.

    Everything is the same on all processes, and draws no global random number.
    """

    together: ClassVar[bool] = True  # whether the units of several blocks can begin as one site

    def refusal(self, site: Site, trial: Trial) -> str:
        """Why the units of a site cannot begin so, after a trial on a copy; empty if they can."""
        return ""

    def entries(self, width: Width) -> Entries:
        """What new units begin with if they were never measured; ``width`` is bound to its modules."""
        raise NotImplementedError

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        """What measures the worth of new units; ``width`` is bound to its modules."""
        raise NotImplementedError

    def sources(self, units: int, more: int) -> tuple[int, ...]:
        """Of each new unit the one that it is a copy of; empty where units are not copies."""
        return ()
