"""A task: data, a loss, networks of several sizes, and the schedule that all methods follow, stated in shares of the FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sensli.modules.flops import count_flops
from sensli_lab.paper.machine import run_seed

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TaskPart:
    """Samples: inputs and targets, the samples first."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class TaskData:
    """What is trained on, what decisions may look at, and what is looked at once, at the end."""

    train: TaskPart
    validation: TaskPart
    test: TaskPart
    digest: str = ""  # of what other machines may have otherwise


Load = Callable[[Path | None, int], TaskData]  # from the user's data folder, and the seed of the run
ADAM = partial(torch.optim.Adam, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One comparison. ``sizes`` are networks by name, ``small`` first, which every growth begins with, and ``large`` last.

    The defaults are those of the tasks with images.
    """

    name: str
    title: str
    sizes: Mapping[str, Callable[[], nn.Module]]
    load: Load
    example: tuple[tuple[int, ...], torch.dtype]  # of one sample
    loss: Loss = cross_entropy
    optimizer: Callable[..., torch.optim.Optimizer] = ADAM  # of the parameters
    recipe: str = "Adam 0.001"  # the optimizer in words, which also tells results of another one apart
    batch: int | None = 64  # None: all samples at once
    steps: int  # of the large network: the budget is what these cost
    looks: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)  # shares of the budget
    units: int | float = 0.5  # of a layer that is widened
    looked_at: int  # training samples that a look is given
    counts_errors: bool = True
    warmup: float = 0.0  # share of the budget
    decay: float = 0.5  # share of the budget in which the learning rate falls to 0, at its end
    points: int = 60  # of a curve
    # method -> factor on the learning rate, chosen on other seeds
    rates: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 1  # of a sample
    calls: int = 40  # of a grower that waits, were it asked to the end
    until: float | None = None  # share of the budget up to which it is asked; None: the last look
    arms: tuple[Any, ...] = ()  # methods that this task alone has
    long: bool = False  # whether the smallest network is not the best one at the end

    def network(self, size: str, seed: int) -> nn.Module:
        """The network of this size as it starts under a seed; the global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run_seed(seed, 0, "weights"))
            return self.sizes[size]()

    def sample(self, count: int = 1) -> Tensor:
        """An example of the input."""
        shape, kind = self.example
        return torch.zeros(count, *shape, dtype=kind, device="cpu")

    @cached_property
    def outlines(self) -> dict[str, str]:
        """The networks by size as they print: their layers and shapes."""
        return {size: str(self.network(size, 0)) for size in self.sizes}

    @cached_property
    def forward_flops(self) -> dict[str, int]:
        """FLOPs of a forward pass of one sample through the network of each size."""
        return {size: int(count_flops(self.network(size, 0), self.sample())) for size in self.sizes}

    def rate(self, share: float) -> float:
        """The factor of the learning rate after this share of the FLOPs: constant, then linear to 0."""
        return min(self.warmed(share), max((1.0 - share) / self.decay, 0.0))

    def warmed(self, share: float) -> float:
        """The factor of the warm-up, 1 after it."""
        return max(share / self.warmup, 0.02) if share < self.warmup else 1.0


def sizes_of(build: Callable[..., nn.Module], **sizes: tuple[int, ...]) -> dict[str, Callable[[], nn.Module]]:
    """Networks by name: what builds one, called with these numbers."""
    return {name: partial(build, *numbers) for name, numbers in sizes.items()}


def plain_network(inputs: int, units: int, layers: int, outputs: int) -> nn.Sequential:
    """So many hidden layers of so many units each."""
    hidden = pairwise((inputs, *(units for _ in range(layers))))
    layers_and_relus = (each for pair in hidden for each in (nn.Linear(*pair), nn.ReLU()))
    return nn.Sequential(*layers_and_relus, nn.Linear(units, outputs))
