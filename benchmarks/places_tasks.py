"""Small tasks for the study of places: a network, data, and how long it trains before and after an insertion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.language import Block, LanguageModel, next_byte_loss, text_of_python
from benchmarks.language import batches as windows
from sensli_lab.paper import datasets, image_sets

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """One network on one data set. What it decides: ``chooses`` the default of a kind of site, or only reports on it."""

    kind: str  # of its sites: "linear", "conv", "block"
    chooses: bool
    build: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]  # so many, from a seed
    training: list[Batch]  # a fixed part of the training data, for merits and losses
    validation: list[Batch]
    before: int  # steps
    after: int
    rate: float
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy


class Patches(nn.Module):
    """A transformer of pre-norm blocks on the 16 patches of an image of 28 x 28."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 7, stride=7)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList([_Looking(width) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


class _Looking(Block):
    """A block whose positions all see each other."""

    causal = False

    def __init__(self, width: int) -> None:
        super().__init__(width, heads=4)


def funnel(*widths: int) -> nn.Sequential:
    """A plain ReLU network."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions(colours: int, width: int, side: int) -> nn.Sequential:
    """Five convolutions with two poolings between them."""
    layers: list[nn.Module] = []
    channels = (colours, width, width, 2 * width, 2 * width, 3 * width)
    for index, (before, after) in enumerate(pairwise(channels)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if index in (1, 3) else []
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * width * (side // 8) ** 2, 10))


def _images(name: str, folder: Path, train: int, held_out: int) -> tuple[Batch, Batch]:
    raw, facts = image_sets.load_images(name, folder), image_sets.FACTS[name]

    def scaled(x: Tensor) -> Tensor:
        return ((x.float() / 255 - torch.tensor(facts.mean)) / torch.tensor(facts.std)).permute(0, 3, 1, 2).contiguous()

    return (scaled(raw.train_x[:train]), raw.train_y[:train]), (scaled(raw.test_x[:held_out]), raw.test_y[:held_out])


def _shuffled(x: Tensor, y: Tensor, size: int) -> Callable[[int, int], Iterator[Batch]]:
    def batches(count: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while count > 0:
            for index in torch.randperm(len(x), generator=generator).split(size)[:count]:
                count -= 1
                yield x[index], y[index]

    return batches


def _split(x: Tensor, y: Tensor, size: int) -> list[Batch]:
    return list(zip(x.split(size), y.split(size), strict=True))


def _of_images(
    name: str,
    folder: Path,
    train: int,
    kind: str,
    chooses: bool,
    build: Callable[[], nn.Module],
    steps: int,
    rate: float,
) -> Task:
    (x, y), held_out = _images(name, folder, train, 500)
    training, validation = _split(x, y, 250), _split(*held_out, 250)
    return Task(kind, chooses, build, _shuffled(x, y, 50), training, validation, steps // 2, steps, rate)


def two_spirals(folder: Path) -> Task:
    """The paper's points, all of them in each step."""
    points = datasets.split_spirals()
    given, held_out = (points.train_x, points.train_y), (points.test_x, points.test_y)
    batches = _shuffled(*given, len(points.train_x))
    build = lambda: funnel(2, 8, 8, 8, 8, 2)  # noqa: E731
    return Task("linear", False, build, batches, _split(*given, 50), [held_out], 200, 600, 0.003)


def bytes_of_text(folder: Path) -> Task:
    """The next byte of the help texts of Python."""
    length, (text, rest) = 32, text_of_python()

    def batches(count: int, seed: int) -> Iterator[Batch]:
        return windows(text, length, 16, count, seed)

    build = lambda: LanguageModel(3, 48, 4, length)  # noqa: E731
    training, validation = list(windows(text, length, 64, 8, -1)), list(windows(rest, length, 64, 8, -1))
    return Task("block", True, build, batches, training, validation, 120, 90, 2e-3, next_byte_loss)


TASKS: dict[str, Callable[[Path], Task]] = {
    "fashion-mlp": lambda folder: _of_images(
        "fashion_mnist", folder, 1000, "linear", True, lambda: funnel(784, 96, 64, 48, 32, 24, 10), 200, 1e-3
    ),
    "fashion-cnn": lambda folder: _of_images(
        "fashion_mnist", folder, 1000, "conv", True, lambda: convolutions(1, 8, 28), 80, 2e-3
    ),
    "language": bytes_of_text,
    "spirals": two_spirals,
    "cifar10-cnn": lambda folder: _of_images(
        "cifar10", folder, 1000, "conv", False, lambda: convolutions(3, 10, 32), 80, 2e-3
    ),
    "patches": lambda folder: _of_images(
        "fashion_mnist", folder, 1000, "block", False, lambda: Patches(3, 32), 100, 2e-3
    ),
}
