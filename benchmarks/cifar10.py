"""CIFAR-10 for the benchmarks, from the folder that SENSLI_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from sensli_lab.paper import image_sets
from sensli_lab.paper.image_sets import FACTS


def training_data() -> tuple[Tensor, Tensor] | None:
    """The 50,000 training images, normalised, and their labels; None where the data is not there."""
    folder = os.environ.get("SENSLI_DATA")
    if not folder or not any((Path(folder) / layout).is_dir() for layout in (image_sets.BINARY, image_sets.PICKLED)):
        return None
    raw, facts = image_sets.load_cifar10(Path(folder)), FACTS["cifar10"]
    images = (raw.train_x.float() / 255 - torch.tensor(facts.mean)) / torch.tensor(facts.std)
    return images.permute(0, 3, 1, 2), raw.train_y  # colours last in memory, as they were read
