"""NORTH* (Maile, Rachelson, Luga, Wilson 2022), in its variant Pre: units whose pre-activations no unit has yet, where those that are
there are already independent of each other.

Where and how many: of the activations H of a layer on n samples, the share phi of singular values of H / sqrt(n) above 0.01; as long as
phi stays above 0.97 of what it was at first, the layer gets units, by that excess. How: rows pinv(h) V r with V orthogonal to the
existing pre-activations and r normal, as long as the rows that are there are on average; columns are zero, so the function is kept.
Only forward statistics decide.
The paper asks after every mini-batch; here it is asked at a look. Its code sorts candidates of dense layers the wrong way round; this
variant does not sort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sensli.growing.strategies.moments import mean_norm
from sensli.growing.strategies.pairs import Pair
from sensli.growing.strategies.rival import Rival
from sensli.moves.sites import Site

RANK = 0.01  # singular values above it count
KEPT = 0.97  # of the first share


class North(Rival):
    """The score is the number of units by which the activations exceed the rank that they began with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first: dict[str, float] = {}  # the share of each layer at its first look

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        units = pair.width.units
        rank = int((torch.linalg.svdvals(pair.activations / len(pair.activations) ** 0.5) > RANK).sum())
        share = self.first.setdefault(pair.site.path, rank / units)
        excess = rank - int(units * KEPT * share)
        made = pair.h @ pair.existing_rows.T
        basis = torch.linalg.svd(made, full_matrices=False)
        taken = basis.U[:, RANK * basis.S.max() < basis.S]
        drawn = torch.randn(len(made), pair.width.more, generator=self.generator, dtype=torch.float64, device="cpu")
        free = drawn - taken @ (taken.T @ drawn)
        rows = torch.linalg.lstsq(pair.h, free, driver="gelsd").solution.T
        rows = rows * (mean_norm(pair.existing_rows) / rows.norm(dim=1, keepdim=True).clamp_min(1e-12))
        return pair.start(rows), max(0.0, float(excess))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "first": dict(self.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        first = state["first"]
        if not isinstance(first, dict) or not all(type(value) is float for value in first.values()):
            raise ValueError(f"first is {first!r}")
        super().load_state_dict(state)
        self.first = dict(first)
