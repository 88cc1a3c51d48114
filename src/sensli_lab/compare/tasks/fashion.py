"""Fashion-MNIST with plain networks: 20,000 images to train on, 4,000 to decide by, 5,000 to test."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from sensli_lab.compare.task import Task
from sensli_lab.compare.tasks.networks import images, plain

PIXELS, CLASSES = 28, 10


def network(units: int, layers: int) -> nn.Module:
    """A plain network on the pixels."""
    return nn.Sequential(nn.Flatten(), *plain(PIXELS**2, units, layers, CLASSES))


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
    load=images("fashion_mnist", 20_000, 4_000, 5_000),
    example=((1, PIXELS, PIXELS), torch.float32),
    steps=600,
    looked_at=512,
    points=40,
)
