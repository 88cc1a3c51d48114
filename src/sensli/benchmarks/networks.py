"""The networks that the benchmarks run on."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sensli.finding import find_sites
from sensli.surgery import insert


def paper_cnn() -> nn.Sequential:
    """The paper's CNN: three convolutions with pooling, two hidden layers; 2,674,816 parameters."""
    layers: list[nn.Module] = []
    for channels, filters in ((3, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [
        nn.Flatten(),
        nn.Linear(4096, 500),
        nn.ReLU(),
        nn.Linear(500, 500),
        nn.ReLU(),
        nn.Linear(500, 10, bias=False),
    ]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def deep_network(hidden: int, width: int = 256) -> nn.Sequential:
    """A plain ReLU network with so many hidden layers of one width."""
    layers: list[nn.Module] = []
    for _ in range(hidden):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def extended(model: nn.Module, example: torch.Tensor, where: str | None = None) -> nn.Module:
    """A copy with a layer at every site: what a measurement would cost without virtual layers."""
    big = copy.deepcopy(model)
    for site in find_sites(big, example, where=where):
        insert(big, site)
    return big.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
