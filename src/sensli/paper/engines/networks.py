"""The small networks of the spiral experiments as ordinary modules, and their counts.

These modules are where the initial weights of a stack come from, so a run starts exactly as plain PyTorch would.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from sensli.paper.data.spirals import CLASSES, FEATURES
from sensli.paper.plans.settings import Network, Settings


class ResidualBlock(nn.Module):
    """`x + W2 tanh(W1 x + b)`, the residual layer of the paper's ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.activation = nn.Tanh()
        self.outer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(self.activation(self.inner(x)))
        return y


def build(network: Network, seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The network with PyTorch's default initialisation under `seed`; the global random state is left alone."""
    width = network.widths[0]
    is_fnn = network.kind == "fnn"
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers["first"] = nn.Linear(FEATURES, width, bias=is_fnn or network.end_bias)
        if is_fnn:
            layers["relu0"] = nn.ReLU()
        elif network.first_activation:
            layers["tanh"] = nn.Tanh()
        for i in range(1, len(network.widths)):
            if is_fnn:
                layers[f"hidden{i}"] = nn.Linear(width, width)
                layers[f"relu{i}"] = nn.ReLU()
            else:
                layers[f"block{i}"] = ResidualBlock(width)
        layers["last"] = nn.Linear(width, CLASSES, bias=is_fnn or network.end_bias)
    return nn.Sequential(layers).to(dtype)


def parameters(network: Network, grown: int = 0) -> int:
    """How many parameters the network has after `grown` insertions."""
    width, inner = network.widths[0], len(network.widths) - 1 + grown
    if network.kind == "fnn":
        return (FEATURES + 1) * width + inner * (width + 1) * width + (width + 1) * CLASSES
    ends = FEATURES * width + width * CLASSES + (width + CLASSES) * network.end_bias
    return ends + inner * (2 * width + 1) * width


def forward_flops(network: Network, grown: int = 0) -> int:
    """FLOPs of one forward pass of one sample: two per weight, biases and activations not counted."""
    width, inner = network.widths[0], len(network.widths) - 1 + grown
    per_layer = width * width * (1 if network.kind == "fnn" else 2)
    return 2 * (FEATURES * width + inner * per_layer + width * CLASSES)


def places(network: Network, grown: int = 0, *, printed: bool = False) -> int:
    """Where a layer can go: after each hidden layer, that is before and after every residual block.

    The paper's FLOP tables count one place fewer for the residual networks (one per block): `printed=True`.
    """
    count = len(network.widths) + grown
    return count - 1 if printed and network.kind == "resnet" else count


def training_flops(settings: Settings, *, printed: bool = False) -> tuple[int, int]:
    """FLOPs per training sample over all epochs, and the part spent on measuring.

    A training step costs three forward passes; a measurement three of the network with a layer at every place; looking for dead
    units one of the network.
    """
    network = settings.network
    ends = (*settings.insert_at, settings.epochs)
    starts = (0, *settings.insert_at)
    training = sum(
        3 * forward_flops(network, grown) * (end - start)
        for grown, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
    measuring = sum(
        3 * forward_flops(network, grown + places(network, grown, printed=printed))
        for grown in range(len(settings.insert_at))
    ) + sum(forward_flops(network, sum(at <= time for at in settings.insert_at)) for time in settings.recycle_at)
    return training + measuring, measuring
