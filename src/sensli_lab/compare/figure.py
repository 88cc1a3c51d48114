"""The figure of a task: validation loss over FLOPs with the front of the fixed networks, below it how far the best methods are from the
front on the way, and beside them where every method ended.

The curves stay readable with any number of methods: the best few have a colour and a band, all others are thin lines. Every
method has its line in the panel beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sensli_lab.compare.front import BEGIN, LEVELS, Runs, fixed_curves, front, front_at
from sensli_lab.compare.jobs import Run
from sensli_lab.compare.methods import Method
from sensli_lab.work.pages import COLOURS, check_available, new_figure, save_figure
from sensli_lab.work.statistics import band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

POINTS = 80
DASHES = ((0, (5, 2)), (0, (1, 1)), (0, (1, 3)), (0, (3, 1, 1, 1)), (0, (7, 2, 1, 2)))
NAMED = 5  # curves with a colour
CURVES = (*COLOURS[:4], "#c0392b")  # no grey one, which the fixed sizes have
KIND_COLOURS = {
    "fixed": "0.35", "reference": "0.6", "sensli": COLOURS[0], "control": COLOURS[1], "rival": COLOURS[2], "own": COLOURS[3]
}  # fmt: skip
LEAST = 1e-12  # of a loss, for its logarithm


def draw_task(title: str, methods: Sequence[Method], runs: Runs, path: Path, command: str) -> None:
    """Geometric means over the seeds with 95 % bands; the command that computes them is below."""
    check_available()
    shown = [method for method in methods if method.name in runs]
    within = [method for method in shown if not method.full]
    named = best_methods(within, runs)
    colours = dict(zip((method.name for method in within if method in named), CURVES, strict=False))
    figure = new_figure(10.4, max(6.4, 1.5 + 0.19 * len(shown)))
    axes = figure.subplot_mosaic(
        [["curves", "ends"], ["ratios", "ends"]], width_ratios=(1.45, 1), height_ratios=(1.9, 1)
    )
    _curves(axes["curves"], shown, runs, colours)
    _ratios(axes["ratios"], within, runs, colours)
    _ends(axes["ends"], shown, runs)
    seeds = len({seed for own in runs.values() for seed in own})
    words = "one seed" if seeds == 1 else f"geometric mean of {seeds} seeds with 95 % bands"
    figure.suptitle(f"{title}: {words}", fontsize=9.5, x=0.01, ha="left")
    figure.supxlabel(_folded(command), fontsize=6, family="monospace", color="0.4", x=0.01, ha="left")
    save_figure(figure, path)


def best_methods(methods: Sequence[Method], runs: Runs) -> list[Method]:
    """The growing methods with a colour: the best of each kind, then the best of all, by the validation loss at the end."""
    growing = [method for method in methods if method.grows]
    ranked = sorted(growing, key=lambda method: _order(_end(runs[method.name].values(), "validation")[0]))
    firsts = [next(method for method in ranked if method.kind == kind) for kind in {one.kind: None for one in ranked}]
    return [*firsts, *(method for method in ranked if method not in firsts)][:NAMED]


def _curves(axis: Axes, shown: Sequence[Method], runs: Runs, colours: Mapping[str, str]) -> None:
    """Over FLOPs."""
    within = [method for method in shown if not method.full]
    total = max(run.budget for method in within for run in runs[method.name].values())
    grid = torch.linspace(0, 1, POINTS, device="cpu")
    dashes = cycle(DASHES)
    means: list[float] = []
    for method in within:
        mean, low, high = _band(torch.stack([_at(run, grid * total) for run in runs[method.name].values()]))
        means += mean[grid >= BEGIN / 2].tolist()  # what is left of it is not shown
        if colour := colours.get(method.name):
            axis.plot(grid.numpy(), mean.numpy(), color=colour, linewidth=1.6, label=method.name, zorder=3)
            axis.fill_between(grid.numpy(), low.numpy(), high.numpy(), color=colour, alpha=0.12, linewidth=0)
        elif method.grows:
            axis.plot(grid.numpy(), mean.numpy(), color="0.85", linewidth=0.7, zorder=1)
        else:
            (line,) = axis.plot(grid.numpy(), mean.numpy(), color="0.45", linewidth=1.1, label=method.name, zorder=2)
            line.set_linestyle(next(dashes))
    seeds = sorted({seed for method in within for seed in runs[method.name]})
    fronts = [fixed for seed in seeds if (fixed := fixed_curves(runs, within, seed)) is not None]
    if fronts:
        losses = [[front_at(fixed, float(share) * total) for share in grid] for fixed in fronts]
        lowest = _band(torch.tensor(losses, device="cpu"))[0].numpy()
        axis.plot(grid.numpy(), lowest, color="black", linewidth=1.1, label="front of the fixed sizes", zorder=4)
    for method in shown:
        if method.full:
            end, grey = _end(runs[method.name].values(), "validation")[0], KIND_COLOURS["reference"]
            axis.axhline(end, color=grey, linewidth=0.8, label=f"{method.name}, at its end", zorder=2)
            means.append(end)
    if len(colours) < sum(method.grows for method in within):
        axis.plot([], [], color="0.85", linewidth=0.7, label="other growing methods")
    axis.set_yscale("log")
    axis.set_ylim(*limits(means, 2))  # bands of few seeds may be wider than all curves together
    _plain_ticks(axis.yaxis, axis.get_ylim())
    axis.set_xlim(BEGIN / 2, 1)
    axis.set_xlabel("share of the FLOPs, all looks included", fontsize=8)
    axis.set_ylabel("validation loss", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.legend(frameon=False, fontsize=7, ncols=2, loc="lower left")
    axis.grid(alpha=0.25, linewidth=0.5)


def _ratios(axis: Axes, within: Sequence[Method], runs: Runs, colours: Mapping[str, str]) -> None:
    """On the way: the front ratio of the methods with a colour at every level, and of the fixed size that is closest to the fronts of
    other seeds."""
    fronts = {method.name: found for method in within if (found := front(method, within, runs)) is not None}
    share = torch.linspace(0, 1, LEVELS, device="cpu").numpy()
    fixed = [method.name for method in within if method.in_front and method.name in fronts]
    if fixed:
        closest = min(fixed, key=lambda name: fronts[name].mean.mean)
        means = [level.mean for level in fronts[closest].levels]
        axis.plot(share, means, color="0.45", linewidth=1.1, linestyle=DASHES[0], label=f"{closest}, other seeds")
    heights = [1.0]
    for name, colour in colours.items():
        if name in fronts:
            levels = fronts[name].levels
            means = [level.mean for level in levels]
            heights += means
            axis.plot(share, means, color=colour, linewidth=1.6)
            if levels[0].log.runs > 1:
                low, high = ([math.exp(getattr(level.log, end)) for level in levels] for end in ("low", "high"))
                axis.fill_between(share, low, high, color=colour, alpha=0.12, linewidth=0)
    axis.axhline(1, color="black", linewidth=1.1)
    axis.set_yscale("log")
    axis.set_ylim(*limits(heights, 1.5))
    _plain_ticks(axis.yaxis, axis.get_ylim())
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 1], ["loss of the front at 5 %", "lowest loss of both"])
    first, last = axis.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    axis.set_ylabel("front ratio", fontsize=8)
    axis.tick_params(labelsize=7)
    if fixed:
        axis.legend(frameon=False, fontsize=7, loc="lower left")
    axis.grid(alpha=0.25, linewidth=0.5)


def _ends(axis: Axes, shown: Sequence[Method], runs: Runs) -> None:
    """At the end: test losses, the best one on top."""
    found = {method.name: _end(runs[method.name].values(), "test") for method in shown}
    ranked = sorted(shown, key=lambda method: -_order(found[method.name][0]))
    for place, method in enumerate(ranked):
        mean, low, high = found[method.name]
        colour = KIND_COLOURS[method.kind]
        axis.plot([low, high], [place, place], color=colour, linewidth=1.2, alpha=0.6)
        axis.plot([mean], [place], marker="o" if method.grows else "s", markersize=3.5, color=colour)
    for name, dashes in (("small", (1, 1)), ("large", (4, 2))):
        if name in found:
            axis.axvline(found[name][0], color="0.6", linewidth=0.7, linestyle=(0, dashes), zorder=0)
    axis.set_xscale("log")
    axis.set_xlim(*limits([mean for mean, _, _ in found.values()], 3))
    _plain_ticks(axis.xaxis, axis.get_xlim())
    axis.set_yticks(range(len(ranked)), [method.name for method in ranked], fontsize=7)
    for label, method in zip(axis.get_yticklabels(), ranked, strict=True):
        label.set_color(KIND_COLOURS[method.kind])
    axis.set_ylim(-0.7, len(ranked) - 0.3)
    axis.set_xlabel("test loss at the end (dotted: small, dashed: large)", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25, linewidth=0.5, axis="x")


def _end(runs: Iterable[Run], part: str) -> tuple[float, float, float]:
    """The geometric mean of the last losses, and both ends of its 95 % band; of one run the loss itself."""
    last = [run.test_loss if part == "test" else run.validation[-1] for run in runs]
    values = torch.tensor(last, dtype=torch.float64, device="cpu")
    mean, low, high = (float(value) for value in _band(values[:, None]))
    return (mean, low, high) if len(values) > 1 else (mean, mean, mean)


def _order(loss: float) -> float:
    """What diverged comes last."""
    return loss if math.isfinite(loss) else math.inf


def limits(losses: Sequence[float], factor: float) -> tuple[float, float]:
    """All losses and a fifth of their range as margin, so much as this factor at most."""
    finite = [max(loss, LEAST) for loss in losses if math.isfinite(loss)] or [1.0]
    low, high = min(finite), max(finite)
    margin = min(max((high / low) ** 0.2, 1.02), factor)
    return low / margin, high * margin


def _plain_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Where an axis spans little more than a power of ten, a few plain numbers: powers would leave it without, or crowd it."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

    if limits[1] < 100 * limits[0]:
        axis.set_major_locator(MaxNLocator(6) if limits[1] < 5 * limits[0] else LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FormatStrFormatter("%g"))


def _folded(command: str, width: int = 215) -> str:
    """Lines of at most so many characters, broken between words."""
    return fill(command, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _band(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The geometric mean over the runs, and both ends of its 95 % band: losses of one task lie orders of magnitude apart."""
    mean, half = band(values.clamp(min=LEAST).log())
    return mean.exp(), (mean - half).exp(), (mean + half).exp()


def _at(run: Run, flops: Tensor) -> Tensor:
    """The validation loss at these FLOPs, on straight lines between the points of the curve."""
    x, y = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in (run.flops, run.validation))
    place = torch.searchsorted(x, flops.double()).clamp(1, len(x) - 1)
    share = ((flops - x[place - 1]) / (x[place] - x[place - 1])).clamp(0, 1)
    return y[place - 1] + share * (y[place] - y[place - 1])
