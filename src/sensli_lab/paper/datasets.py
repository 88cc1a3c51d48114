"""Images and spirals as tensors, ready for a network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sensli_lab.paper import image_sets
from sensli_lab.paper.image_sets import Facts, Raw
from sensli_lab.paper.settings import DataSettings

# ---- Images as tensors, ready for the network: normalised once, cropped and flipped a whole batch at a time.
#
# Images are kept [N, height, width, colours], which is what `channels_last` wants: gathering a batch of crops with
# one index expression gives the layout of the convolutions for free. There is no Python per image.

PADDING = 4


@dataclass(frozen=True)
class Images:
    """Normalised images [N, height, width, colours] and their labels [N], on the device of the training."""

    x: Tensor
    y: Tensor
    black: Tensor  # what a black pixel became, [colours]: crops reach over the edge into black

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The images as they are, [B, colours, height, width] in channels_last layout."""
        return self.x[index].permute(0, 3, 1, 2), self.y[index]

    def batches(self, size: int, order: Tensor | None = None) -> Batches:
        return Batches(self, size, torch.arange(len(self), device="cpu") if order is None else order)

    def augmented(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The images cropped at random from their padded selves and flipped at random, every one on its own.

        One draw for the batch on the CPU, so that a run sees the same images on every device.
        """
        count, size = len(index), self.x.shape[1]
        draws = torch.randint(0, 2 * PADDING + 1, (2, count, 1), generator=generator, device=generator.device)
        flips = torch.randint(0, 2, (count, 1), generator=generator, device=generator.device)
        along = torch.arange(size, device="cpu")
        rows = draws[0] + along
        columns = draws[1] + torch.where(flips.bool(), size - 1 - along, along)
        side = size + 2 * PADDING
        padded = self.black.expand(count, side, side, -1).clone()
        padded[:, PADDING:-PADDING, PADDING:-PADDING] = self.x[index]
        own = torch.arange(count, device=padded.device).view(-1, 1, 1)
        rows, columns = (indices.to(padded.device) for indices in (rows.unsqueeze(2), columns.unsqueeze(1)))
        return padded[own, rows, columns].permute(0, 3, 1, 2), self.y[index]


@dataclass(frozen=True)
class Batches:
    """Batches in a given order; can be gone through more than once, and has a length."""

    images: Images
    size: int
    order: Tensor

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.order.split(self.size):
            yield self.images.batch(index)


@dataclass(frozen=True)
class Split:
    train: Images
    validation: Images
    test: Images


def split_images(raw: Raw, facts: Facts, wanted: DataSettings, device: torch.device, dtype: torch.dtype) -> Split:
    """Training and validation images drawn from the official training images, test images from the official test ones."""
    order, test_order = (
        torch.randperm(len(labels), generator=torch.Generator().manual_seed(wanted.split_seed), device="cpu")
        for labels in (raw.train_y, raw.test_y)
    )
    train, held = order[: wanted.train], order[wanted.train : wanted.train + wanted.validation]
    test = test_order[: wanted.test or len(test_order)]

    def normalised(x: Tensor, y: Tensor, index: Tensor) -> Images:
        mean, std = (torch.tensor(values, dtype=dtype, device="cpu") for values in (facts.mean, facts.std))
        pixels = x[index].to(dtype).div_(255).sub_(mean).div_(std)
        return Images(pixels.to(device), y[index].to(device), (-mean / std).to(device))

    return Split(
        normalised(raw.train_x, raw.train_y, train),
        normalised(raw.train_x, raw.train_y, held),
        normalised(raw.test_x, raw.test_y, test),
    )


def load_split(
    wanted: DataSettings, folder: Path | None, device: torch.device, dtype: torch.dtype = torch.float32
) -> Split:
    return split_images(
        image_sets.load_images(wanted.name, folder), image_sets.FACTS[wanted.name], wanted, device, dtype
    )


# ---- The two-spiral data set: 600 points in the plane, one full turn from radius 0.5 to 1.5, the second class mirrored.

POINTS = 300  # per class
CLASSES = 2
FEATURES = 2


@dataclass(frozen=True)
class SpiralSplit:
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


def split_spirals(train: int = 450, seed: int = 0, dtype: torch.dtype = torch.float32) -> SpiralSplit:
    """A random split, drawn once per experiment and shared by all its runs."""
    x, y = points()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed), device="cpu")
    x, y = x[order].to(dtype), y[order]
    return SpiralSplit(x[:train], y[:train], x[train:], y[train:])
