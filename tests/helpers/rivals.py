"""Small networks and data for the methods of other papers, and the networks that they really grow."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli import find_sites
from sensli_lab.methods.pairs import Pair, look


def mlp(activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 6), activation(), nn.Linear(6, 3)).double()


class Mean(nn.Module):
    """Over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def tokens(*, early: bool = False) -> nn.Sequential:
    """Every token by itself; their mean after the last layer, or before it."""
    torch.manual_seed(0)
    layers, last = [nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh()], nn.Linear(9, 3)
    return nn.Sequential(*layers, *((Mean(), last) if early else (last, Mean()))).double()


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.Tanh(), nn.Flatten(),
        nn.Linear(4 * 9, 2),
    ).double()  # fmt: skip


def data(shape: tuple[int, ...] = (4,), classes: int = 3, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(10 + i, *shape, generator=generator).double(),
            torch.randint(classes, (10 + i,), generator=generator),
        )
        for i in range(count)
    ]


def seen(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Pair]:
    return look(model, find_sites(model, batches[0][0], what="units", units=2), batches, F.cross_entropy)


def mean_loss(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    return F.cross_entropy(model(x), y)


def grown(model: nn.Module, site: Any) -> nn.Module:
    other = copy.deepcopy(model)
    edit = site.in_model(other).move.plan(other, site.in_model(other))
    edit.build()
    edit.apply()
    return other
