"""The paper's CNN as an ordinary module, and its counts.

A stage is one or more 3 x 3 convolutions with ReLU, then 2 x 2 max-pooling. A place is after a convolution and its ReLU, so a
stage of r convolutions has r places, and a layer inserted there makes it r + 1; which of them makes no difference
to the architecture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sensli.paper.data import Facts
from sensli.paper.plans.settings import Network


def repeats(network: Network) -> list[int]:
    return list(network.repeats or (1,) * len(network.channels))


def grown(network: Network, places: Sequence[int]) -> list[int]:
    """Convolutions per stage after insertions at these places, one after another; -1: nothing was inserted."""
    stages = repeats(network)
    for place in places:
        if place < 0:
            continue
        end = 0
        for stage, count in enumerate(stages):
            end += count
            if place < end:
                stages[stage] += 1
                break
        else:
            raise ValueError(f"place {place} does not exist in a network with {stages} convolutions per stage")
    return stages


def build(network: Network, facts: Facts, seed: int, stages: Sequence[int] | None = None) -> nn.Sequential:
    """The network with PyTorch's default initialisation under `seed`; the global random state is left alone."""
    layers: list[nn.Module] = []
    colours, size = facts.colours, facts.size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for channels, count in zip(network.channels, stages or repeats(network), strict=True):
            for _ in range(count):
                layers += [nn.Conv2d(colours, channels, 3, padding=1), nn.ReLU()]
                colours = channels
            layers.append(nn.MaxPool2d(2))
            size //= 2
        layers.append(nn.Flatten())
        features = colours * size * size
        for width in network.widths:
            layers += [nn.Linear(features, width), nn.ReLU()]
            features = width
        layers.append(nn.Linear(features, facts.classes, bias=False))
    return nn.Sequential(*layers)


def parameters(network: Network, facts: Facts, stages: Sequence[int]) -> int:
    total, colours, size = 0, facts.colours, facts.size
    for channels, count in zip(network.channels, stages, strict=True):
        total += (9 * colours + 1) * channels + (count - 1) * (9 * channels + 1) * channels
        colours, size = channels, size // 2
    features = colours * size * size
    for width in network.widths:
        total += (features + 1) * width
        features = width
    return total + features * facts.classes


def layer_flops(network: Network, facts: Facts) -> list[int]:
    """FLOPs of one inserted convolution in each stage: two per multiply-add, nothing else, as the paper counts it."""
    return [2 * 9 * channels**2 * (facts.size // 2**stage) ** 2 for stage, channels in enumerate(network.channels)]


def forward_flops(network: Network, facts: Facts, stages: Sequence[int]) -> int:
    """FLOPs of one forward pass of one image, by the paper's conventions.

    The layers of the baseline count two per multiply-add and one per element for the bias, the ReLU and the input of the pooling (hidden
    linear layers: bias and ReLU); convolutions beyond one per stage count their multiply-adds alone.
    """
    total, colours, size = 0, facts.colours, facts.size
    for channels in network.channels:
        pixels = size * size
        total += 2 * 9 * colours * channels * pixels + 3 * channels * pixels
        colours, size = channels, size // 2
    features = colours * size * size
    for width in network.widths:
        total += 2 * features * width + 2 * width
        features = width
    total += 2 * features * facts.classes
    added = zip(stages, layer_flops(network, facts), strict=True)
    return total + sum((count - 1) * flops for count, flops in added)


def extended_flops(network: Network, facts: Facts, stages: Sequence[int]) -> int:
    """The same with one more layer at every place: what the paper counts for a measurement (times three)."""
    return forward_flops(network, facts, [2 * count for count in stages])


def look_flops(network: Network, facts: Facts, stages: Sequence[int]) -> int:
    """What a measurement of one image computes here: three passes of the network as it is, and a weight gradient at every place."""
    places = zip(stages, layer_flops(network, facts), strict=True)
    return 3 * forward_flops(network, facts, stages) + sum(count * flops for count, flops in places)
