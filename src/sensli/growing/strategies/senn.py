"""SENN (Mitchell, Menzenbach, Kersting, Mundt 2023): units by the natural gradient that they would add.

With C = E[f r'] of a new unit's activation f and the part r of the cotangent that the reader cannot serve, the score is
C' E[ff']^-1 C E[gg']^-1 summed up. Its authors search for f among 100 candidates with 3,000 steps each; for small activations the
best value has a closed form, the squared singular values of A^(-1/2) N E^(-1/2) with A = E[hh'], N = -E[h r'] and E = E[gg'] damped by
a tenth of its mean diagonal, and the rows A^(-1/2) u. We use it, with both signs: for a ReLU they differ. Columns are zero, so the function
is kept. Its layers are not here: they begin as an identity because each unit there has an activation that can be one, which the
networks of others do not have. A width grows only if its score is at least ``THRESHOLD`` times the natural gradient of the reader's own
weights, as in their code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sensli.growing.strategies.moments import inverse_root, mean_norm, moment, pseudo_inverse
from sensli.growing.strategies.pairs import Pair
from sensli.growing.strategies.rival import Rival
from sensli.moves.sites import Site

THRESHOLD = 0.007  # of their MNIST experiment; 1.0 in the toy ones, 0.03 for images of 28 pixels
DAMPING = 0.1


class Senn(Rival):
    """Rows by a singular value decomposition instead of a search."""

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        root, cotangents = inverse_root(moment(pair.h)), moment(pair.g)
        cotangents = (
            cotangents + DAMPING * cotangents.diagonal().mean() * torch.eye(len(cotangents), device="cpu").double()
        )
        bypass = -pair.bypass(residual=True)
        whitened = (pair.by_output(bypass) @ inverse_root(cotangents)).flatten(1)
        left, values, _ = torch.linalg.svd(root @ whitened, full_matrices=False)
        half = -(-pair.width.more // 2)
        rows = (root @ left[:, :half]).T
        rows = torch.cat([rows, -rows])[: pair.width.more]
        rows = rows * (mean_norm(pair.existing_rows) / rows.norm(dim=1, keepdim=True).clamp_min(1e-12))
        score = float(values[: pair.width.more].square().sum())
        own = pair.a.T @ pair.g / len(pair.a)
        present = float((own * (pseudo_inverse(moment(pair.a)) @ own @ pseudo_inverse(cotangents))).sum())
        return pair.start(rows), score if score > THRESHOLD * present else 0.0
