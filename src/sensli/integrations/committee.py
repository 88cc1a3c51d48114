"""Networks that answer together: the module that a scikit-learn estimator of sensli keeps as ``model_``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Committee(nn.Module):
    """Standardises its input, asks every member, and takes the mean: of the outputs, or of the probabilities of classes.

    For classes the output is the logarithm of the mean probabilities, so ``softmax`` of it gives them.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, members: Iterable[nn.Module], mean: Any, scale: Any, *, classify: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))
        self.members, self.classify = nn.ModuleList(members), classify

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.scale
        outputs = torch.stack([member(x) for member in self.members])
        return outputs.softmax(-1).mean(0).log() if self.classify else outputs.mean(0)


def networks(count: int, inputs: int, width: int, outputs: int) -> list[nn.Module]:
    """So many networks with one hidden layer, which differ in their first weights."""
    return [nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs)) for _ in range(count)]
