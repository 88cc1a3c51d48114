"""The two-spiral data set: 600 points in the plane, one full turn from radius 0.5 to 1.5, the second class mirrored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

POINTS = 300  # per class
CLASSES = 2
FEATURES = 2


@dataclass(frozen=True)
class Split:
    """Inputs [samples, 2] and labels [samples] for training and test."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def points() -> tuple[Tensor, Tensor]:
    """All points, float64 [600, 2], and labels [600]: class 1 is `r (cos phi, sin phi)`, class 0 its mirror image."""
    i = torch.arange(POINTS, dtype=torch.float64, device="cpu")
    phi = 2 * math.pi * i / POINTS
    radius = 0.5 + i / POINTS
    spiral = torch.stack((radius * phi.cos(), radius * phi.sin()), dim=1)
    labels = torch.cat((torch.ones(POINTS, device="cpu"), torch.zeros(POINTS, device="cpu"))).long()
    return torch.cat((spiral, -spiral)), labels


def split(train: int = 450, seed: int = 0, dtype: torch.dtype = torch.float32) -> Split:
    """A random split, drawn once per experiment and shared by all its runs."""
    x, y = points()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed), device="cpu")
    x, y = x[order].to(dtype), y[order]
    return Split(x[:train], y[:train], x[train:], y[train:])
