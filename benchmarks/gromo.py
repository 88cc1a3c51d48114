"""gromo, the living library of growing networks, beside ours: the same start, data, steps and moments, through the interface of each.

`python -m benchmarks.gromo` prints the test loss, the seconds and the lines that a user writes. It needs `pip install 'sensli[gromo]'`.

Two spirals, 360 points, ReLU, 2 hidden layers of 5 units, Adam 0.01, 2,000 steps with all points; after each 100 steps 2 units more, 8
times. gromo follows its preset for TINY, with the four amplitudes of its tutorial; ours is `Grower(what="units")`, and `strategy="tiny"`.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower
from sensli.growing.triggers import At
from sensli_lab.compare.task import TaskPart
from sensli_lab.compare.tasks.spirals import SPIRALS

STEPS, UNITS, SEEDS = 2000, 2, 5
MOMENTS = range(100, 900, 100)
Make = Callable[[nn.Sequential, TaskPart], nn.Module]


def with_gromo(start: nn.Sequential, part: TaskPart) -> nn.Module:
    growing_mlp, tools = import_module("gromo.containers.growing_mlp"), import_module("gromo.utils.training_utils")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(part.x, part.y), batch_size=len(part))
    loss_of_all = nn.CrossEntropyLoss(reduction="sum")
    model: Any = growing_mlp.GrowingMLP(2, 2, hidden_size=5, number_hidden_layers=2, activation=nn.ReLU())
    with torch.no_grad():
        for layer, given in zip(model.layers, (each for each in start if isinstance(each, nn.Linear)), strict=True):
            layer.weight.copy_(given.weight)
            layer.bias.copy_(given.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        cross_entropy(model(part.x), part.y).backward()
        optimizer.step()
        if step in MOMENTS:
            tools.compute_statistics(model, loader, loss_of_all)
            model.compute_optimal_updates(maximum_added_neurons=UNITS, compute_delta=False)
            model.reset_computation()
            model.select_best_update()
            losses = {}
            for amplitude in (0.0, 0.1, 0.5, 1.0):
                model.set_scaling_factor(amplitude)
                model.currently_updated_layer.previous_module.output_extension_scaling = amplitude
                with torch.no_grad():
                    losses[amplitude] = float(loss_of_all(model.extended_forward(part.x), part.y))
            best = min(losses, key=lambda amplitude: losses[amplitude])
            model.set_scaling_factor(best)
            model.currently_updated_layer.previous_module.output_extension_scaling = best
            model.apply_change()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model  # type: ignore[no-any-return]


def with_ours(start: nn.Sequential, part: TaskPart, strategy: str = "sensli") -> nn.Module:
    model = start
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    grower = Grower(
        model, optimizer, preset="paper", example=part.x[:2], trigger=At(MOMENTS), strategy=strategy, what="units", units=UNITS,
        tau=0.0 if strategy == "sensli" else 1.0, max_factor=None, step_name="step",  # only ours has a threshold
    )  # fmt: skip
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(part.x), part.y).backward()
        optimizer.step()
        grower.step([(part.x, part.y)], cross_entropy)
    return model


def with_our_tiny(start: nn.Sequential, part: TaskPart) -> nn.Module:
    return with_ours(start, part, "tiny")


def not_grown(start: nn.Sequential, part: TaskPart) -> nn.Module:
    optimizer = torch.optim.Adam(start.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(start(part.x), part.y).backward()
        optimizer.step()
    return start


def lines_of(function: Make) -> int:
    """The lines that a user writes: those of the function, without its first one and without a data set that both have."""
    return len([line for line in inspect.getsource(function).splitlines() if line.strip()]) - 1


def measured(make: Make) -> tuple[list[float], list[float], list[int]]:
    """Test losses, seconds and parameters, seed by seed."""
    losses, seconds, parameters = [], [], []
    for seed in range(SEEDS):
        start, data = SPIRALS.network("small", seed), SPIRALS.load(None, seed)
        assert isinstance(start, nn.Sequential)
        torch.manual_seed(seed)
        began = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of either: nothing would help here, or a matrix has no inverse
            model = make(start, data.train)
        seconds.append(time.process_time() - began)
        with torch.no_grad():
            losses.append(float(cross_entropy(model(data.test.x), data.test.y)))
        parameters.append(sum(each.numel() for each in model.parameters()))
    return losses, seconds, parameters


def main() -> int:
    torch.set_num_threads(1)
    if find_spec("gromo") is None:
        print("gromo is not installed, so there is nothing to compare with. Get it with: pip install 'sensli[gromo]'")
        return 0
    print(f"{'':24} test loss: median, and all seeds             seconds of one core  parameters  lines")
    rows: tuple[tuple[str, Make, Make], ...] = (
        ("gromo, TINY", with_gromo, with_gromo),
        ("ours, strategy='tiny'", with_our_tiny, with_ours),
        ("ours, what='units'", with_ours, with_ours),
        ("not grown", not_grown, not_grown),
    )
    for name, make, written in rows:
        losses, seconds, parameters = measured(make)
        every = " ".join(f"{loss:.2g}" for loss in sorted(losses))
        numbers = f"{statistics.median(seconds):8.1f} {round(statistics.mean(parameters)):18} {lines_of(written):7}"
        print(f"{name:24} {statistics.median(losses):8.2g} ({every:34}) {numbers}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
