"""Short trainings with a history to look at."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower, History, triggers

X = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))


Y = (X[:, 0] * X[:, 1] > 0).long()


BATCHES = [(X, Y)]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def grow(calls: int = 4, **options: Any) -> Grower:
    model = make_model()
    grower = Grower(model, example=X[:1], **{"trigger": triggers.Every(2), "tau": 0, **options})
    for call in range(calls):
        grower.step(BATCHES, cross_entropy, metric=1 / (call + 1))
    return grower


def infinite() -> History:
    """A history of a training in which the existing weights had no gradient: the threshold's quotient is infinite."""
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    nn.init.ones_(model[0].bias)
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 0])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    grower = Grower(model, optimizer, example=x[:1], trigger=triggers.Every(1))
    grower.step([(x, y)], cross_entropy, metric=math.nan)
    return grower.history
