"""TINY (Verbockhaven, Rudkiewicz, Chevallier, Charpiat 2024): units whose first-order decrease of the loss is largest, both sides at once.

With h the input of the layer that gets units, a and g the input and the cotangent of the one that reads them: what the reader could do
itself is left out of g (R = E[aa']^+ E[ag'], g - R'a), and of N = -E[h (g - R'a)'] the singular values s of E[hh']^(-1/2) N give the
units: rows sqrt(s) E[hh']^(-1/2) u, columns sqrt(s) v. The predicted decrease is the sum of s^2, times the square of an amplitude that
is found by trying {0, 0.1, 0.5, 1} as the tutorial of its library does; the library itself tries 101 and more. We leave the reader's own
weights as they are, which is the preset of the paper, and drop singular values below 1e-3 as its code does. The function is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from sensli.growing.strategies.moments import inverse_root, moment
from sensli.growing.strategies.pairs import Pair
from sensli.growing.strategies.rival import Rival
from sensli.moves.sites import Site

AMPLITUDES = (0.1, 0.5, 1.0)
SMALLEST = 1e-3


class Tiny(Rival):
    """The largest predicted decrease, with the amplitude that lowers the loss most; nowhere if none does."""

    keeps: ClassVar[bool] = False

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        root = inverse_root(moment(pair.h))
        left, values, right = torch.linalg.svd(root @ -pair.bypass(residual=True), full_matrices=False)
        kept = values >= min(SMALLEST, float(values.max()))
        count = min(pair.width.more, int(kept.sum()))
        values = values[:count]
        rows = (root @ left[:, :count]).T * values.sqrt()[:, None]
        columns = right[:count] * values.sqrt()[:, None]
        sites = [pair.start(each * rows, each * columns) for each in AMPLITUDES]
        losses = [try_out(site) for site in sites]
        best = min(range(len(sites)), key=lambda index: losses[index])
        nothing = try_out(pair.start(0 * rows, 0 * columns))
        return sites[best], float(values.square().sum()) if losses[best] < nothing else 0.0
