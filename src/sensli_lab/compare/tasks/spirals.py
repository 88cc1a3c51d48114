"""The paper's two spirals, with its network of 5 units a layer: 360 points to train on, 120 to decide by, 120 to test."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from sensli_lab.compare.task import Task, TaskData, TaskPart, plain_network, sizes_of
from sensli_lab.paper import datasets

TRAIN, HELD = 360, 120


def build_plain_network(units: int, layers: int) -> nn.Module:
    """A plain network on the two coordinates."""
    return plain_network(datasets.FEATURES, units, layers, datasets.CLASSES)


def load_spirals(folder: Path | None, seed: int) -> TaskData:
    """The same points and the same split for all seeds."""
    split = datasets.split_spirals(train=TRAIN)
    return TaskData(
        TaskPart(split.train_x, split.train_y),
        TaskPart(split.test_x[:HELD], split.test_y[:HELD]),
        TaskPart(split.test_x[HELD:], split.test_y[HELD:]),
    )


SPIRALS = Task(
    name="spirals",
    title="two spirals, ReLU networks of 5 units a layer",
    sizes=sizes_of(build_plain_network, small=(5, 2), middle=(6, 3), deep=(5, 9), wide=(13, 2), large=(8, 4)),
    load=load_spirals,
    example=((datasets.FEATURES,), torch.float32),
    optimizer=partial(torch.optim.Adam, lr=0.01),
    recipe="Adam 0.01",
    batch=None,
    steps=600,
    units=2,
    looked_at=TRAIN,
)
