"""Parts of a published set of images, in the order of colours, height, width."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from sensli.paper.compare.task import Data, Part
from sensli.paper.data import pipeline
from sensli.paper.plans.settings import Data as Wanted


@lru_cache(maxsize=1)  # all methods and seeds of a task train on the same images
def images(name: str, folder: Path | None, train: int, validation: int, test: int) -> Data:
    """The images, read from the folder or downloaded into it; the split is the same for all seeds."""
    split = pipeline.load(Wanted(name, train, validation=validation, test=test), folder, torch.device("cpu"))
    parts = (Part(one.x.permute(0, 3, 1, 2).contiguous(), one.y) for one in (split.train, split.validation, split.test))
    return Data(*parts)
