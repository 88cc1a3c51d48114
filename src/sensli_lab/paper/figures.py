"""The figures of an experiment from its stored results, as PNG and PDF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sensli.merits.norms import NORMS
from sensli_lab.paper import presets
from sensli_lab.paper.evidence import pair, ratios
from sensli_lab.paper.planning import Plan
from sensli_lab.paper.store import Result
from sensli_lab.work.pages import COLOURS, check_available, new_figure, open_axes, save_figure
from sensli_lab.work.statistics import band, format_number, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 600  # a curve needs no more than a figure has columns

Results = Mapping[str, Result]


def draw_figures(plan: Plan, results: Results, folder: Path, formats: tuple[str, ...] = ("png", "pdf")) -> list[Path]:
    """Draw all figures the experiment asks for; returns the files of the first format."""
    check_available()
    written = []
    for kind in plan.experiment.figures:
        figure = DRAWERS[kind](plan, results)
        figure.draw_without_rendering()  # finds the layout, which would be found twice more for each file
        figure.set_layout_engine(None)
        paths = [folder / f"exp-{plan.key}-{kind}.{suffix}" for suffix in formats]
        for path in paths:
            save_figure(figure, path)
        written.append(paths[0])
    return written


def curves(plan: Plan, results: Results) -> Figure:
    """Training loss and test error over iterations: mean over the runs with a 95 % band, dotted at insertions."""
    styles = {arm: {"color": colour} for arm, colour in _colours(results).items()}
    return _losses_and_errors(plan, results, styles, "mean with 95\N{NO-BREAK SPACE}% band")


def times(plan: Plan, results: Results) -> Figure:
    """As `curves`, for many insertion times: light to dark from early to late, arms without insertion in black."""
    from matplotlib import colormaps

    moments = sorted({result.settings.insert_at[0] for result in results.values() if result.settings.insert_at})
    fixed = iter(("-", "--", ":"))
    styles: dict[str, dict[str, Any]] = {}
    for arm, result in results.items():
        if result.settings.insert_at:
            place = moments.index(result.settings.insert_at[0]) / max(len(moments) - 1, 1)
            shade = colormaps["viridis_r"](0.12 + 0.85 * place)
            styles[arm] = {"color": shade, "linestyle": "--" if result.settings.wake else "-", "linewidth": 1.1}
        else:
            styles[arm] = {"color": "black", "linestyle": next(fixed, ":"), "linewidth": 1.6}
        styles[arm]["shade"] = False
    return _losses_and_errors(plan, results, styles, "mean")


def _losses_and_errors(plan: Plan, results: Results, styles: Mapping[str, dict[str, Any]], how: str) -> Figure:
    """Both over iterations, a line for each arm."""
    figure, (top, bottom) = _panels()
    moments: set[int] = set()
    for arm, result in results.items():
        _line(top, plan, result, "train_loss", arm, **styles[arm])
        _line(bottom, plan, result, "test_error", arm, **styles[arm])
        if "place" in result.runs:
            grew = (result.runs["place"] >= 0).any(0).tolist()  # with a threshold not every look inserts
            looks = zip(result.settings.insert_at, grew, strict=True)
            moments.update(time * _per_epoch(result) for time, inserted in looks if inserted)
    for axis in (top, bottom):
        for moment in moments:
            axis.axvline(moment, color="0.4", linestyle=":", linewidth=1.0, zorder=0)
    if _spans_orders(results):
        top.set_yscale("log")
    top.set_ylabel("training loss")
    bottom.set_ylabel("test error")
    bottom.set_xlabel("iteration")
    bottom.set_ylim(bottom=0)
    many = len(results) > 5
    top.legend(frameon=False, fontsize=7 if many else 9, ncols=2 if many else 1, loc="best")
    _title(figure, plan, how)
    return figure


def gradients(plan: Plan, results: Results) -> Figure:
    """Frobenius norm of each layer's weight gradient in the arm that recorded it: one run, and the mean of all."""
    figure, axes = _panels(5.4)
    recorded = (result for result in results.values() if result.settings.record_gradients)
    result = next(result for result in recorded if len(result.settings.insert_at) == 1)
    norms, place = result.runs["gradient_norm"].double(), result.runs["place"][:, 0]
    time, epochs = result.settings.insert_at[0], norms.shape[1]
    per_epoch = _per_epoch(result)
    keep = slice(None, None, max(1, epochs // POINTS))
    x = (torch.arange(epochs, device="cpu") * per_epoch)[keep].numpy()
    for axis, chosen, title in zip(axes, (norms[:1], norms), ("run 1", f"mean over {len(norms)} runs"), strict=True):
        old = _old_layers(chosen, place[: len(chosen)], time)
        new = torch.stack([values[:, int(p) + 1] for values, p in zip(chosen, place, strict=False)])
        new = new.masked_fill(torch.arange(epochs, device="cpu") < time, float("nan"))
        for layer in range(old.shape[2]):
            label = f"layer {layer + 1}" if layer < old.shape[2] - 1 else "last layer"
            axis.plot(x, old[:, keep, layer].mean(0).numpy(), color=COLOURS[1 + layer % 4], linewidth=1.2, label=label)
        axis.plot(x, new[:, keep].mean(0).numpy(), color=COLOURS[0], linewidth=1.4, label="new layer")
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_ylabel("gradient norm")
        axis.axvline(time * per_epoch, color="0.4", linestyle=":", linewidth=1.0)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("iteration")
    axes[0].legend(frameon=False, fontsize=8, loc="upper right")
    _title(figure, plan, smoothed=False)
    return figure


def heatmaps(plan: Plan, results: Results) -> Figure:
    """Gradient of the new weights in the first three iterations after the first insertion, in one run."""
    result = next(result for result in results.values() if "new_gradient" in result.runs)
    gradient = result.runs["new_gradient"][:, 0].nan_to_num()  # [runs, iterations, weights, out, in]
    alive = gradient.flatten(1).abs().amax(1) > 0
    run = int(alive.long().argmax())  # the first run that has something to show
    names = ("W",) if gradient.shape[2] == 1 else ("W1", "W2")
    rows, columns = len(names), gradient.shape[1]
    figure = new_figure(6.6, 2.1 * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False)
    for row, name in enumerate(names):
        top = float(gradient[run, :, row].abs().max()) or 1.0
        for column in range(columns):
            axis = grid[row][column]
            image = axis.imshow(gradient[run, column, row].numpy(), cmap="RdBu_r", vmin=-top, vmax=top)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(f"{name}, iteration {column + 1}", fontsize=9)
        bar = figure.colorbar(image, ax=list(grid[row]), fraction=0.025, pad=0.01)
        bar.ax.tick_params(labelsize=7)
    figure.suptitle(
        f"Experiment {plan.experiment.name} ({plan.words}): gradient of the new weights, run {run + 1}", fontsize=9
    )
    return figure


def _old_layers(norms: torch.Tensor, place: torch.Tensor, time: int) -> torch.Tensor:
    """Gradient norms of the layers that were there from the start, [runs, epochs, layers - 1]."""
    rows = []
    for values, p in zip(norms, place.tolist(), strict=True):
        others = [layer for layer in range(values.shape[1]) if layer != p + 1]
        rows.append(torch.cat((values[:time, :-1], values[time:, others])))
    return torch.stack(rows)


def _panels(height: float = 5.6) -> tuple[Figure, list[Axes]]:
    figure = new_figure(7.0, height)
    axes = list(figure.subplots(2, 1, sharex=True))
    open_axes(axes)
    return figure, axes


def _colours(results: Results) -> dict[str, str]:
    return {arm: COLOURS[place % len(COLOURS)] for place, arm in enumerate(results)}


def _per_epoch(result: Result) -> int:
    """Iterations of an epoch."""
    return int(result.axes["iteration"][1])


def _line(axis: Axes, plan: Plan, result: Result, curve: str, label: str, *, shade: bool = True, **style: Any) -> None:
    if "step_loss" in result.runs:  # recorded step by step: the window counts steps, and the test error needs none
        by_step = curve == "train_loss"
        window = min(plan.experiment.smoothing, _per_epoch(result))  # the paper's, and never over more than an epoch
        values = smooth(result.runs["step_loss"], window) if by_step else result.runs[curve]
        points = torch.arange(1, values.shape[1] + 1, device="cpu") if by_step else result.axes["iteration"]
    else:
        values, points = smooth(result.runs[curve], plan.experiment.smoothing), result.axes["iteration"]
    last = values.shape[1] - 1
    keep = torch.tensor(sorted({*range(0, last + 1, max(1, (last + 1) // POINTS)), last}), device="cpu")
    mean, half = band(values[:, keep])
    x = points[keep]
    axis.plot(x.numpy(), mean.numpy(), label=label, **{"linewidth": 1.5, **style})
    if shade and len(values) > 1:
        low = torch.minimum(mean, (mean - half).clamp(min=mean * 0.05))  # stays on a logarithmic axis
        axis.fill_between(x.numpy(), low.numpy(), (mean + half).numpy(), color=style["color"], alpha=0.16, linewidth=0)


def _spans_orders(results: Results) -> bool:
    """Whether the training loss falls so far that only a logarithmic axis shows it all."""
    ends = [result.final("train_loss").mean().item() for result in results.values()]
    starts = [result.runs["train_loss"].mean(0).max().item() for result in results.values()]
    return min(ends) > 0 and max(starts) > 50 * min(ends)


def _title(figure: Figure, plan: Plan, how: str = "", *, smoothed: bool = True) -> None:
    runs = "One run" if plan.runs == 1 else f"{plan.runs} runs" + (how and f", {how}")
    window, average = plan.experiment.smoothing, ""
    if smoothed and window > 1:
        by_step = presets.apply_to(next(iter(plan.arms.values())))
        average = f", moving average over {f'up to {window} iterations' if by_step else f'{window} epochs'}"
    text = f"Experiment {plan.experiment.name} ({plan.words}): {plan.experiment.title}. {runs}{average}"
    figure.suptitle(text, fontsize=9, wrap=True)


# ---- The figures that only a CNN has: what the training cost, and the five norms at every place.

COSTS = {"seconds": "seconds of training and looking", "flops": "FLOPs per training image"}


def cost(plan: Plan, results: Results) -> Figure:
    """Training loss and test accuracy over time and over FLOPs, every run a line, a dot at each insertion."""
    figure = new_figure(9.0, 6.0)
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for column, (axis_name, words) in enumerate(COSTS.items()):
        for arm, colour in _colours(results).items():
            _paths(grid[0][column], results[arm], axis_name, "train_loss", colour, arm)
            _paths(grid[1][column], results[arm], axis_name, "test_error", colour, arm)
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
            grid[0][column].set_title(f"{both[0]} / {both[1]}: {format_number(quotient.mean)}", fontsize=9, loc="left")
    _title(figure, plan, "a line each, dots at insertions", smoothed=False)
    return figure


def _paths(axis: Axes, result: Result, along: str, curve: str, colour: str, arm: str) -> None:
    for run in range(len(result.runs[curve])):
        x, y = result.runs[along][run].double(), result.runs[curve][run].double()
        y = 1 - y if curve == "test_error" else y
        axis.plot(x.numpy(), y.numpy(), color=colour, linewidth=1.2, alpha=0.85, label=arm if run == 0 else None)
        if "place" in result.runs:
            looks = zip(result.settings.insert_at, result.runs["place"][run], strict=True)
            times = [time for time, place in looks if place >= 0]
            axis.plot(x[times].numpy(), y[times].numpy(), "o", color=colour, markersize=4)


def norms(plan: Plan, results: Results) -> Figure:
    """The five squared norms of the new kernel's gradient at every place, one line per run."""
    result = next(result for result in results.values() if "norms" in result.runs)
    values = result.runs["norms"][:, 0]  # [runs, places, norms]
    values = values[:, ~values[0, :, 0].isnan()]
    figure = new_figure(9.0, 2.9)
    axes = figure.subplots(1, len(NORMS))
    for k, (axis, name) in enumerate(zip(axes, NORMS, strict=True)):
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


DRAWERS: dict[str, Callable[[Plan, Results], Any]] = {
    drawer.__name__: drawer for drawer in (curves, times, gradients, heatmaps, cost, norms)
}
