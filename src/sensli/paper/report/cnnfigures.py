"""The figures that only a CNN has: what the training cost, and the five norms at every place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sensli.merits.norms import NORMS
from sensli.paper.plans.config import Plan
from sensli.paper.report.costs import pair, ratios
from sensli.paper.report.figures import COLOURS, DPI, Results, _cycle, _spans_orders, _title, open_axes
from sensli.paper.report.statistics import number
from sensli.paper.running.store import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COSTS = {"seconds": "seconds of training and looking", "flops": "FLOPs per training image"}


def cost(plan: Plan, results: Results) -> Figure:
    """Training loss and test accuracy over time and over FLOPs, every run a line, a dot at each insertion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), dpi=DPI, layout="constrained")
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for column, (axis_name, words) in enumerate(COSTS.items()):
        for colour, (arm, result) in zip(_cycle(len(results)), results.items(), strict=True):
            _paths(grid[0][column], result, axis_name, "train_loss", colour, arm)
            _paths(grid[1][column], result, axis_name, "test_error", colour, arm)
        grid[1][column].set_xlabel(words)
    grid[0][0].set_ylabel("training loss")
    grid[1][0].set_ylabel("test accuracy")
    open_axes(grid.flat)
    if _spans_orders(results):
        grid[0][0].set_yscale("log")
    grid[0][0].legend(frameon=False, fontsize=9)
    both = pair(plan)
    if both is not None:
        found = ratios(results[both[0]], results[both[1]])
        for column, quotient in enumerate((found.time, found.flops)):
            grid[0][column].set_title(f"{both[0]} / {both[1]}: {number(quotient.mean)}", fontsize=9, loc="left")
    _title(figure, plan, "a line each, dots at insertions", smoothed=False)
    return figure


def _paths(axis: Axes, result: Result, along: str, curve: str, colour: str, arm: str) -> None:
    for run in range(len(result.runs[curve])):
        x, y = result.runs[along][run].double(), result.runs[curve][run].double()
        y = 1 - y if curve == "test_error" else y
        axis.plot(x.numpy(), y.numpy(), color=colour, linewidth=1.2, alpha=0.85, label=arm if run == 0 else None)
        if "place" in result.runs:
            times = [
                time
                for time, place in zip(result.settings.insert_at, result.runs["place"][run], strict=True)
                if place >= 0
            ]
            axis.plot(x[times].numpy(), y[times].numpy(), "o", color=colour, markersize=4)


def norms(plan: Plan, results: Results) -> Figure:
    """The five squared norms of the new kernel's gradient at every place, one line per run."""
    from matplotlib.figure import Figure

    result = next(result for result in results.values() if "norms" in result.runs)
    values = result.runs["norms"][:, 0]  # [runs, places, norms]
    there = ~values[0, :, 0].isnan()
    values = values[:, there]
    figure = Figure(figsize=(9.0, 2.9), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(NORMS))
    for k, name in enumerate(NORMS):
        axis = axes[k]
        for place in range(values.shape[1]):
            axis.hlines(values[:, place, k].numpy(), place + 0.7, place + 1.3, color=COLOURS[place % 5], linewidth=1.0)
        axis.set_title(name, fontsize=8)
        axis.set_xticks(list(range(1, values.shape[1] + 1)))
        axis.tick_params(labelsize=7)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("squared norm", fontsize=8)
    figure.supxlabel(f"place, after {result.settings.insert_at[0]} epochs", fontsize=8)
    _title(figure, plan, "a line each", smoothed=False)
    return figure
