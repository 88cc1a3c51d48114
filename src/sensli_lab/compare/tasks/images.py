"""Tasks with images: Fashion-MNIST with plain networks, a part of CIFAR-10 with a VGG-like and a ResNet-20-like network."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sensli_lab.compare.methods import at_shares, when_triggered
from sensli_lab.compare.task import Load, Task, TaskData, TaskPart, plain_network, sizes_of
from sensli_lab.paper import datasets
from sensli_lab.paper.settings import DataSettings

CLASSES = 10

# ---- Parts of a published set of images, in the order of colours, height, width.


def image_loader(name: str, train: int, validation: int, test: int) -> Load:
    """How a task gets so many images: read from the folder or downloaded into it; the split is the same for all seeds."""
    wanted = DataSettings(name, train, validation=validation, test=test)
    return lambda folder, seed: _parts(wanted, folder)


@lru_cache(maxsize=1)  # all methods and seeds of a task train on the same images
def _parts(wanted: DataSettings, folder: Path | None) -> TaskData:
    split = datasets.load_split(wanted, folder, torch.device("cpu"))
    parts = [
        TaskPart(one.x.permute(0, 3, 1, 2).contiguous(), one.y) for one in (split.train, split.validation, split.test)
    ]
    return TaskData(parts[0], parts[1], parts[2])


# ---- Fashion-MNIST: 20,000 images to train on, 4,000 to decide by, 5,000 to test.


def on_pixels(units: int, layers: int) -> nn.Module:
    """A plain network on the pixels."""
    return nn.Sequential(nn.Flatten(), *plain_network(28**2, units, layers, CLASSES))


FASHION = Task(
    name="fashion",
    title="Fashion-MNIST, plain ReLU networks",
    sizes=sizes_of(on_pixels, small=(24, 2), middle=(48, 2), deep=(24, 8), wide=(106, 2), large=(96, 3)),
    load=image_loader("fashion_mnist", 20_000, 4_000, 5_000),
    example=((1, 28, 28), torch.float32),
    steps=600,
    looked_at=512,
    points=40,
)


# ---- CIFAR-10: 20,000 images to train on, 2,000 to decide by, 4,000 to test.


def vgg(channels: int, repeats: int, colors: int = 3, pixels: int = 32) -> nn.Module:
    """Three stages of 3 x 3 convolutions with ReLU, twice the channels in each, halved by pooling."""
    layers: list[nn.Module] = []
    before = colors
    for stage in range(3):
        for _ in range(repeats):
            layers += [nn.Conv2d(before, channels << stage, 3, padding=1), nn.ReLU()]
            before = channels << stage
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * (pixels // 8) ** 2, CLASSES))


class ImageBlock(nn.Module):
    """Two convolutions with BatchNorm, and the skip, which a 1 x 1 convolution carries where the shape changes."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        same = stride == 1 and before == channels
        self.skip = nn.Identity() if same else nn.Conv2d(before, channels, 1, stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.skip(x) + self.body(x))
        return y


def resnet(channels: int, blocks: int) -> nn.Module:
    """Three stages of blocks; with 16 channels and 3 blocks it is ResNet-20."""
    first = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    stages = [
        nn.Sequential(
            ImageBlock(channels << max(stage - 1, 0), channels << stage, 2 if stage else 1),
            *(ImageBlock(channels << stage, channels << stage, 1) for _ in range(blocks - 1)),
        )
        for stage in range(3)
    ]
    return nn.Sequential(*first, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels * 4, CLASSES))


VGG = Task(
    name="vgg",
    title="CIFAR-10, 20,000 images, VGG-like networks",
    sizes=sizes_of(vgg, small=(8, 1), middle=(16, 1), deep=(8, 3), wide=(24, 1), large=(16, 2)),
    load=image_loader("cifar10", 20_000, 2_000, 4_000),
    example=((3, 32, 32), torch.float32),
    steps=250,
    looked_at=256,
    points=25,
)

RESNET = replace(
    VGG,
    name="resnet",
    title="CIFAR-10, 20,000 images, ResNets like ResNet-20",
    sizes=sizes_of(resnet, small=(8, 1), middle=(12, 1), deep=(8, 3), wide=(16, 1), large=(16, 2)),
)

# ---- All images of CIFAR-10 but those that decide, for a budget at which the smallest network is not the best one at the end.

_WIDTHS: dict[str, Any] = {"what": "uniform", "units": 0.5}
_SLOWLY = "as uniform, the updates of new channels warm up for 200 steps"

CIFAR = replace(
    VGG,
    arms=(
        at_shares("uniform", "all widths by a half, four times", 5, 8, 12, 15, **_WIDTHS),
        at_shares("uniform", "all widths by a half, four times", 10, 15, 20, 25, **_WIDTHS),
        at_shares("uniform", "all widths by a half, four times", 20, 30, 40, 50, **_WIDTHS),
        at_shares("warmup", _SLOWLY, 10, 15, 20, 25, warmup=200, **_WIDTHS),
        when_triggered(
            "saturating", "all widths by a half, when the loss is near the end that its curve tells", **_WIDTHS
        ),
        when_triggered("slow", "all widths by a half, when training on brings little for its FLOPs", **_WIDTHS),
    ),
    name="cifar",
    title="CIFAR-10, all images, VGG-like networks, long",
    sizes=sizes_of(vgg, small=(4, 1), middle=(8, 1), deep=(8, 2), large=(16, 1)),
    load=image_loader("cifar10", 48_000, 2_000, 10_000),
    optimizer=partial(torch.optim.Adam, lr=3e-3),
    recipe="Adam 0.003",
    rates={"small": 2.0, "deep": 0.5},
    steps=1200,
    warmup=0.01,
    decay=0.2,
    points=50,
    calls=200,
    until=0.8,
    long=True,
)
