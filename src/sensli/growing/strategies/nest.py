"""NeST (Dai, Yin, Jha 2018): units along the largest entries of the bridging gradient. Growth alone; its pruning is `remove_dead`'s trade.

With M the gradient of a bypass around the units, its largest entries (a share ``beta`` of them) are served one by one: of a pair (i, j)
with M_ij, a row gets e sgn(-M_ij) sqrt|M_ij| at i and a column e sqrt|M_ij| at j, with one random sign e for each pair; then both are
scaled to ``alpha`` times the mean size of the entries that are there. There is no released code; a port in another library drops the
sign of M, which the formula has. The pairs are dealt out to the new units in turn. The function is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from sensli.growing.strategies.pairs import Pair
from sensli.growing.strategies.rival import Rival
from sensli.moves.sites import Site

BETA = 0.4
ALPHA = 0.3


class Nest(Rival):
    """Rows and columns from single entries of M; the score is what these entries add up to, squared."""

    keeps: ClassVar[bool] = False

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        bypass = pair.bypass()
        count = max(pair.width.more, round(BETA * bypass.numel()))
        sizes, places = bypass.abs().flatten().topk(min(count, bypass.numel()))
        rows, columns = _shared(bypass, sizes, places, pair.width.more, self.generator)
        rows = ALPHA * rows * _mean(pair.existing_rows) / _mean(rows)
        columns = ALPHA * columns * _mean(pair.existing_columns) / _mean(columns)
        return pair.start(rows, columns), float(sizes.square().sum())


def _shared(
    bypass: Tensor, sizes: Tensor, places: Tensor, units: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows and columns of so many units, each with every so-many-th of the pairs."""
    rows = torch.zeros(units, bypass.shape[0], dtype=bypass.dtype, device="cpu")
    columns = torch.zeros(units, bypass.shape[1], dtype=bypass.dtype, device="cpu")
    signs = torch.randint(2, sizes.shape, generator=generator, device=generator.device) * 2.0 - 1.0
    unit = torch.arange(len(sizes), device="cpu") % units
    here, there = places // bypass.shape[1], places % bypass.shape[1]
    rows.index_put_((unit, here), -signs * bypass[here, there].sign() * sizes.sqrt(), accumulate=True)
    columns.index_put_((unit, there), signs * sizes.sqrt(), accumulate=True)
    return rows, columns


def _mean(values: Tensor) -> float:
    """The mean size of the entries that are not zero."""
    found = values[values != 0].abs()
    return float(found.mean()) if len(found) else 1.0
