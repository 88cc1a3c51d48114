"""Networks that answer together: the module that a scikit-learn estimator of sensli keeps as ``model_``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Committee(nn.Module):
    """Standardises its input, asks every member, and takes the mean: of the outputs, or of the probabilities of classes.

    For classes the output is the logarithm of the mean probabilities, so ``softmax`` of it gives them. ``smoothing`` is that of the labels
    in training, which the probabilities are freed from.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, members: Iterable[nn.Module], mean: Any, scale: Any, *, classify: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64, device="cpu"))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64, device="cpu"))
        self.members, self.classify, self.smoothing = nn.ModuleList(members), classify, 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.scale
        outputs = torch.stack([member(x) for member in self.members])
        return sharpened(outputs.softmax(-1).mean(0), self.smoothing).log() if self.classify else outputs.mean(0)


def sharpened(probabilities: Tensor, smoothing: float) -> Tensor:
    """The probabilities of the labels themselves, from those that were learnt of smoothed ones.

    A label that is smoothed by e is right with ``1 - e`` and any of K classes with ``e / K``; so a probability p is learnt as
    ``(1 - e) p + e / K``. What is learnt as less than ``e / K`` would be negative, and is nearly zero instead.
    """
    floor = smoothing / probabilities.shape[-1]
    found = (probabilities - floor).clamp(min=0.01 * floor)
    return found / found.sum(-1, keepdim=True)


def networks(count: int, sizes: Sequence[int]) -> list[nn.Module]:
    """So many networks with layers of these sizes, from the inputs to the outputs, which differ in their first weights."""
    return [_network(sizes) for _ in range(count)]


def _network(sizes: Sequence[int]) -> nn.Sequential:
    layers = [nn.Linear(*pair, device="cpu") for pair in pairwise(sizes)]
    return nn.Sequential(*(module for layer in layers[:-1] for module in (layer, nn.ReLU())), layers[-1])
