"""Two small tasks for the studies of trials and triggers: data, a network that is a little too small, and what a step costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from sensli.modules.flops import count_flops
from sensli_lab.paper import datasets, image_sets

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Data, the widths of a plain ReLU network, and how it trains."""

    train: Batch
    held_out: Batch
    widths: tuple[int, ...]
    batch: int
    rate: float
    epoch: int  # steps

    def network(self) -> nn.Sequential:
        """The small network."""
        parts: list[nn.Module] = []
        for before, after in pairwise(self.widths):
            parts += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    def optimizer(self, model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), lr=self.rate, weight_decay=0.0, fused=True)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches without end, in a new order each time round."""
        x, y = self.train
        while True:
            for index in torch.randperm(len(x), generator=generator).split(self.batch):
                yield x[index], y[index]

    @torch.no_grad()
    def losses(self, model: nn.Module) -> dict[str, float]:
        """The loss on a fixed part of the training data, and on data held out."""
        count = len(self.held_out[0])
        parts = {"training": (self.train[0][:count], self.train[1][:count]), "held out": self.held_out}
        return {name: cross_entropy(model(x), y).item() for name, (x, y) in parts.items()}

    def flops(self, model: nn.Module) -> int:
        """Of one step: a backward pass counts as two forward passes."""
        return 3 * self.batch * int(count_flops(model, self.train[0][:1]))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One step of training."""
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def _spirals(folder: Path) -> Task:
    points = datasets.split_spirals()
    return Task((points.train_x, points.train_y), (points.test_x, points.test_y), (2, 8, 8, 2), 450, 0.01, 25)


def _fashion(folder: Path) -> Task:
    raw, count, held_out = image_sets.load_fashion_mnist(folder), 6000, 1000

    def given(x: Tensor, y: Tensor, count: int) -> Batch:
        small = nn.functional.avg_pool2d(x[:count].float().reshape(count, 1, 28, 28) / 255, 2)
        return (small.flatten(1) - 0.286) / 0.353, y[:count]

    # Test images are held out: nothing is chosen by them that is used elsewhere.
    return Task(
        given(raw.train_x, raw.train_y, count),
        given(raw.test_x, raw.test_y, held_out),
        (196, 12, 12, 10),
        60,
        0.002,
        100,
    )


TASKS: dict[str, Callable[[Path], Task]] = {"spirals": _spirals, "fashion-mnist": _fashion}
