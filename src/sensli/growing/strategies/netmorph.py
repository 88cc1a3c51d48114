"""NetMorph (Wei, Wang, Rui, Chen 2016), wider: random weights on one side of the new units, zeros on the side that has fewer of them.

Its way deeper is `"netmorph-deeper"`. There is no released code. Where and when are left to the user, so the widths are taken in
turn. The function is kept; after a torch ReLU, zero rows never learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from sensli.growing.strategies.pairs import Pair
from sensli.growing.strategies.rival import Rival
from sensli.moves.sites import Site


class NetMorph(Rival):
    """One width after the other."""

    batches: ClassVar[int | None] = 1  # it looks at shapes alone
    in_turn: ClassVar[bool] = True

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        rows, columns = pair.existing_rows, pair.existing_columns
        zero_rows = rows.shape[1] < columns.shape[1]
        drawn = [
            torch.randn(pair.width.more, old.shape[1], generator=self.generator, dtype=torch.float64, device="cpu")
            * old.std(correction=0)
            for old in (rows, columns)
        ]
        return pair.start(drawn[0] * (not zero_rows), drawn[1] * zero_rows), 1.0
