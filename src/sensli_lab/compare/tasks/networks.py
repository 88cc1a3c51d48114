"""What several tasks use: plain networks, and parts of published images."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from sensli_lab.compare.task import Load, TaskData, TaskPart
from sensli_lab.paper import datasets
from sensli_lab.paper.settings import DataSettings

# ---- Parts of a published set of images, in the order of colours, height, width.


def images(name: str, train: int, validation: int, test: int) -> Load:
    """How a task gets so many images: read from the folder or downloaded into it; the split is the same for all seeds."""
    wanted = DataSettings(name, train, validation=validation, test=test)
    return lambda folder, seed: _parts(wanted, folder)


@lru_cache(maxsize=1)  # all methods and seeds of a task train on the same images
def _parts(wanted: DataSettings, folder: Path | None) -> TaskData:
    split = datasets.load(wanted, folder, torch.device("cpu"))
    parts = (split.train, split.validation, split.test)
    return TaskData(*(TaskPart(one.x.permute(0, 3, 1, 2).contiguous(), one.y) for one in parts))


# ---- Plain networks: linear layers of equal width with ReLU between them.


def plain(inputs: int, units: int, layers: int, outputs: int) -> nn.Sequential:
    """So many hidden layers of so many units each."""
    hidden = pairwise((inputs, *(units for _ in range(layers))))
    layers_and_relus = (each for pair in hidden for each in (nn.Linear(*pair), nn.ReLU()))
    return nn.Sequential(*layers_and_relus, nn.Linear(units, outputs))
