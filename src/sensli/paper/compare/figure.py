"""The figure of a task: validation loss over FLOPs with bands, and the front of the fixed networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from sensli.paper.compare.front import BEGIN, front_at
from sensli.paper.compare.methods import Method
from sensli.paper.compare.run import Run
from sensli.paper.compare.summary import Runs, fixed_curves
from sensli.paper.compare.task import Task
from sensli.paper.report.figures import COLOURS, DPI, check_available, save
from sensli.paper.report.statistics import band

POINTS = 80
DASHES = ((0, (5, 2)), (0, (1, 1)), (0, (1, 3)), (0, (3, 1, 1, 1)), (0, (7, 2, 1, 2)))


def draw(task: Task, methods: Sequence[Method], runs: Runs, path: Path) -> None:
    """Geometric means over the seeds with 95 % bands for what grows, thin grey ones for the fixed sizes, the front in black."""
    check_available()
    from matplotlib.figure import Figure

    shown = [method for method in methods if method.name in runs]
    total = max(run.budget for own in runs.values() for run in own.values())
    grid = torch.linspace(0, 1, POINTS)
    figure = Figure(figsize=(7.6, 4.6), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    colours, dashes = cycle(COLOURS), cycle(DASHES)
    means: list[float] = []
    for method in shown:
        mean, low, high = _band(torch.stack([_at(run, grid * total) for run in runs[method.name].values()]))
        means += mean.tolist()
        if method.grows:
            colour = next(colours)
            axis.plot(grid.numpy(), mean.numpy(), color=colour, linewidth=1.5, label=method.name)
            axis.fill_between(grid.numpy(), low.numpy(), high.numpy(), color=colour, alpha=0.12, linewidth=0)
        else:
            axis.plot(
                grid.numpy(), mean.numpy(), color="0.45", linestyle=next(dashes), linewidth=1.1, label=method.name
            )
    seeds = sorted({seed for own in runs.values() for seed in own})
    fronts = [fixed for seed in seeds if (fixed := fixed_curves(runs, shown, seed)) is not None]
    if fronts:
        best = torch.tensor([[front_at(fixed, float(share) * total) for share in grid] for fixed in fronts])
        axis.plot(grid.numpy(), _band(best)[0].numpy(), color="black", linewidth=1.0, label="front of the fixed sizes")
    axis.set_yscale("log")
    axis.set_ylim(min(means) / 2, 2 * max(means))  # bands of few seeds may be wider than all curves together
    axis.set_xlim(BEGIN / 2, 1)
    axis.set_xlabel("share of the FLOPs, all looks included")
    axis.set_ylabel("validation loss")
    axis.set_title(f"{task.title}: geometric mean of {_seeds(len(seeds))}", fontsize=9, loc="left")
    axis.legend(frameon=False, fontsize=8, ncols=2)
    axis.grid(alpha=0.25, linewidth=0.5)
    save(figure, path)


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds with 95 % bands"


def _band(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The geometric mean over the runs, and both ends of its 95 % band: losses of one task lie orders of magnitude apart."""
    mean, half = band(values.clamp(min=1e-12).log())
    return mean.exp(), (mean - half).exp(), (mean + half).exp()


def _at(run: Run, flops: Tensor) -> Tensor:
    """The validation loss at these FLOPs, on straight lines between the points of the curve."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (run.flops, run.validation))
    place = torch.searchsorted(x, flops.double()).clamp(1, len(x) - 1)
    share = ((flops - x[place - 1]) / (x[place] - x[place - 1])).clamp(0, 1)
    return y[place - 1] + share * (y[place] - y[place - 1])
