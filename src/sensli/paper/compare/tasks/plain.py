"""Plain networks: linear layers of equal width with ReLU between them."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def plain(inputs: int, units: int, layers: int, outputs: int) -> nn.Sequential:
    """So many hidden layers of so many units each."""
    hidden = pairwise((inputs, *(units for _ in range(layers))))
    layers_and_relus = (each for pair in hidden for each in (nn.Linear(*pair), nn.ReLU()))
    return nn.Sequential(*layers_and_relus, nn.Linear(units, outputs))
