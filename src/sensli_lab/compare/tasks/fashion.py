"""Fashion-MNIST with plain networks: 20,000 images to train on, 4,000 to decide by, 5,000 to test."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli_lab.compare.task import Task, TaskData
from sensli_lab.compare.tasks.networks import images, plain

PIXELS, CLASSES = 28, 10


def network(units: int, layers: int) -> nn.Module:
    """A plain network on the pixels."""
    return nn.Sequential(nn.Flatten(), *plain(PIXELS**2, units, layers, CLASSES))


def load(folder: Path | None, seed: int) -> TaskData:
    return images("fashion_mnist", folder, 20_000, 4_000, 5_000)


FASHION = Task(
    name="fashion",
    title="Fashion-MNIST, plain ReLU networks",
    sizes={
        "small": partial(network, 24, 2),
        "middle": partial(network, 48, 2),
        "deep": partial(network, 24, 8),
        "wide": partial(network, 106, 2),
        "large": partial(network, 96, 3),
    },
    load=load,
    example=((1, PIXELS, PIXELS), torch.float32),
    loss=cross_entropy,
    optimizer=partial(torch.optim.Adam, lr=1e-3),
    recipe="Adam 0.001",
    batch=64,
    steps=600,
    looks=(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4),
    units=0.5,
    looked_at=512,
    points=40,
)
