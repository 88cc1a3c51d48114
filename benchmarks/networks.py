"""The networks that the benchmarks run on."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sensli.moves.finding import find_sites
from sensli.surgery.growth import insert
from sensli_lab.paper import cnn, planning
from sensli_lab.paper.image_sets import FACTS
from sensli_lab.paper.planning import RunOptions, plan


def paper_cnn() -> nn.Sequential:
    """The paper's CNN: three convolutions with pooling, two hidden layers; 2,674,816 parameters."""
    network = plan(planning.find_experiment("1"), "stated", RunOptions()).arms["CNN LI"].network
    model = cnn.build_cnn(network, FACTS["cifar10"], seed=0)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def deep_network(hidden: int, width: int = 256) -> nn.Sequential:
    """A plain ReLU network with so many hidden layers of one width."""
    layers: list[nn.Module] = []
    for _ in range(hidden):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class DenseLayer(nn.Module):
    """A layer of a DenseNet: its output beside its input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(channels), nn.ReLU()
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(4 * growth), nn.ReLU()
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))
        return torch.cat([x, new], 1)


def densenet(blocks: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32) -> nn.Sequential:
    """DenseNet-121 for 10 classes: many wide places on small maps."""
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(channels)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    for block, count in enumerate(blocks):
        if block:
            halved = channels // 2
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, halved, 1, bias=False), nn.AvgPool2d(2)]
            channels = halved
        layers += [DenseLayer(channels + index * growth, growth) for index in range(count)]
        channels += count * growth
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers)


def wide_cnn(channels: int = 256) -> nn.Sequential:
    """Three convolutions of many channels on the whole map of the image."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def extended(model: nn.Module, example: torch.Tensor, where: str | None = None) -> nn.Module:
    """A copy with a layer at every site: what a measurement would cost without virtual layers."""
    big = copy.deepcopy(model)
    for site in find_sites(big, example, where=where):
        insert(big, site)
    return big.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
