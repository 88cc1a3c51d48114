"""The figures of an experiment from its stored results, as PNG and PDF."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sensli.errors import MissingExtra
from sensli.merits.norms import NORMS
from sensli.text.files import write_bytes
from sensli_lab.errors import StoreError
from sensli_lab.paper import presets
from sensli_lab.paper.planning import Plan
from sensli_lab.paper.statistics import band, number, pair, ratios, smooth
from sensli_lab.paper.store import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f5fbf", "#d9822b", "#2e8b57", "#8e44ad", "#6b7780")
POINTS = 600  # a curve needs no more than a figure has columns
DPI = 110

Results = Mapping[str, Result]


def draw(plan: Plan, results: Results, folder: Path, formats: tuple[str, ...] = ("png", "pdf")) -> list[Path]:
    """Draw all figures the experiment asks for; returns the files of the first format."""
    check_available()
    written = []
    for kind in plan.experiment.figures:
        figure = DRAWERS[kind](plan, results)
        figure.draw_without_rendering()  # finds the layout, which would be found twice more for each file
        figure.set_layout_engine(None)
        for suffix in formats:
            path = folder / f"exp-{plan.key}-{kind}.{suffix}"
            save(figure, path)
            if suffix == formats[0]:
                written.append(path)
    return written


def check_available() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("figures need matplotlib. Install it with: pip install 'sensli[plots]'") from None


def curves(plan: Plan, results: Results) -> Figure:
    """Training loss and test error over iterations: mean over the runs with a 95 % band, dotted at insertions."""
    figure, (top, bottom) = _panels(2)
    for colour, (arm, result) in zip(_cycle(len(results)), results.items(), strict=True):
        _line(top, plan, result, "train_loss", arm, color=colour)
        _line(bottom, plan, result, "test_error", arm, color=colour)
    _finish(plan, results, figure, top, bottom, "mean with 95\N{NO-BREAK SPACE}% band")
    return figure


def times(plan: Plan, results: Results) -> Figure:
    """As `curves`, for many insertion times: light to dark from early to late, arms without insertion in black."""
    figure, (top, bottom) = _panels(2)
    moments = sorted({result.settings.insert_at[0] for result in results.values() if result.settings.insert_at})
    shades = _shades(len(moments))
    fixed = iter(("-", "--", ":"))
    for arm, result in results.items():
        style: dict[str, Any] = {"shade": False, "linewidth": 1.1}
        if result.settings.insert_at:
            style["color"] = shades[moments.index(result.settings.insert_at[0])]
            style["linestyle"] = "--" if result.settings.wake else "-"
        else:
            style.update(color="black", linestyle=next(fixed, ":"), linewidth=1.6)
        _line(top, plan, result, "train_loss", arm, **style)
        _line(bottom, plan, result, "test_error", arm, **style)
    _finish(plan, results, figure, top, bottom, "mean")
    return figure


def gradients(plan: Plan, results: Results) -> Figure:
    """Frobenius norm of each layer's weight gradient in the arm that recorded it: one run, and the mean of all."""
    figure, axes = _panels(2, height=5.4)
    recorded = (result for result in results.values() if result.settings.record_gradients)
    result = next(result for result in recorded if len(result.settings.insert_at) == 1)
    norms, place = result.runs["gradient_norm"].double(), result.runs["place"][:, 0]
    time, epochs = result.settings.insert_at[0], norms.shape[1]
    per_epoch = int(result.axes["iteration"][1])
    keep = slice(None, None, max(1, epochs // POINTS))
    x = (torch.arange(epochs, device="cpu") * per_epoch)[keep].numpy()
    for axis, run in zip(axes, (0, None), strict=True):
        chosen = norms[:1] if run == 0 else norms
        old = _old_layers(chosen, place[: len(chosen)], time)
        new = torch.stack([values[:, int(p) + 1] for values, p in zip(chosen, place, strict=False)])
        new = new.masked_fill(torch.arange(epochs, device="cpu") < time, float("nan"))
        for layer in range(old.shape[2]):
            label = f"layer {layer + 1}" if layer < old.shape[2] - 1 else "last layer"
            axis.plot(x, old[:, keep, layer].mean(0).numpy(), color=COLOURS[1 + layer % 4], linewidth=1.2, label=label)
        axis.plot(x, new[:, keep].mean(0).numpy(), color=COLOURS[0], linewidth=1.4, label="new layer")
        axis.set_title("run 1" if run == 0 else f"mean over {len(norms)} runs", fontsize=9, loc="left")
        axis.set_ylabel("gradient norm")
        axis.axvline(time * per_epoch, color="0.4", linestyle=":", linewidth=1.0)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("iteration")
    axes[0].legend(frameon=False, fontsize=8, loc="upper right")
    _title(figure, plan, smoothed=False)
    return figure


def heatmaps(plan: Plan, results: Results) -> Figure:
    """Gradient of the new weights in the first three iterations after the first insertion, in one run."""
    from matplotlib.figure import Figure

    result = next(result for result in results.values() if "new_gradient" in result.runs)
    gradient = result.runs["new_gradient"][:, 0].nan_to_num()  # [runs, iterations, weights, out, in]
    alive = gradient.flatten(1).abs().amax(1) > 0
    run = int(alive.long().argmax())  # the first run that has something to show
    names = ("W",) if gradient.shape[2] == 1 else ("W1", "W2")
    rows, columns = len(names), gradient.shape[1]
    figure = Figure(figsize=(6.6, 2.1 * rows + 0.5), dpi=DPI, layout="constrained")
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


def _panels(count: int, height: float = 5.6) -> tuple[Figure, list[Axes]]:
    # a separate Figure, not one of pyplot: nothing global is changed and no window can open
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height), dpi=DPI, layout="constrained")
    axes = list(figure.subplots(count, 1, sharex=True))
    open_axes(axes)
    return figure, axes


def open_axes(axes: Iterable[Axes]) -> None:
    """No frame above and on the right, and a light grid."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="0.92", linewidth=0.7)


def _line(axis: Axes, plan: Plan, result: Result, curve: str, label: str, *, shade: bool = True, **style: Any) -> None:
    if "step_loss" in result.runs:  # recorded step by step: the window counts steps, and the test error needs none
        by_step = curve == "train_loss"
        values = smooth(result.runs["step_loss"], window(plan, result)) if by_step else result.runs[curve]
        points = torch.arange(1, values.shape[1] + 1, device="cpu") if by_step else result.axes["iteration"]
    else:
        values, points = smooth(result.runs[curve], plan.experiment.smoothing), result.axes["iteration"]
    step = max(1, values.shape[1] // POINTS)
    keep = torch.unique(
        torch.cat(
            (torch.arange(0, values.shape[1], step, device="cpu"), torch.tensor([values.shape[1] - 1], device="cpu"))
        )
    )
    mean, half = band(values[:, keep])
    x = points[keep]
    axis.plot(x.numpy(), mean.numpy(), label=label, **{"linewidth": 1.5, **style})
    if shade and len(values) > 1:
        low = torch.minimum(mean, (mean - half).clamp(min=mean * 0.05))  # stays on a logarithmic axis
        axis.fill_between(x.numpy(), low.numpy(), (mean + half).numpy(), color=style["color"], alpha=0.16, linewidth=0)


def _finish(plan: Plan, results: Results, figure: Figure, top: Axes, bottom: Axes, how: str) -> None:
    moments: set[int] = set()
    for result in results.values():
        per_epoch = int(result.axes["iteration"][1])
        if "place" in result.runs:
            grew = (result.runs["place"] >= 0).any(0).tolist()  # with a threshold not every look inserts
            looks = zip(result.settings.insert_at, grew, strict=True)
            moments.update(time * per_epoch for time, inserted in looks if inserted)
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


def _spans_orders(results: Results) -> bool:
    """Whether the training loss falls so far that only a logarithmic axis shows it all."""
    ends = [result.final("train_loss").mean().item() for result in results.values()]
    starts = [result.runs["train_loss"].mean(0).max().item() for result in results.values()]
    return min(ends) > 0 and max(starts) > 50 * min(ends)


def window(plan: Plan, result: Result) -> int:
    """The moving average of a loss recorded step by step: the paper's, and never over more than an epoch."""
    return min(plan.experiment.smoothing, int(result.axes["iteration"][1]))


def _title(figure: Figure, plan: Plan, how: str = "", *, smoothed: bool = True) -> None:
    runs = "One run" if plan.runs == 1 else f"{plan.runs} runs" + (how and f", {how}")
    window, average = plan.experiment.smoothing, ""
    if smoothed and window > 1:
        by_step = presets.apply_to(next(iter(plan.arms.values())))
        average = f", moving average over {f'up to {window} iterations' if by_step else f'{window} epochs'}"
    text = f"Experiment {plan.experiment.name} ({plan.words}): {plan.experiment.title}. {runs}{average}"
    figure.suptitle(text, fontsize=9, wrap=True)


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _shades(count: int) -> list[Any]:
    from matplotlib import colormaps

    shades = colormaps["viridis_r"]
    return [shades(0.12 + 0.85 * i / max(count - 1, 1)) for i in range(count)]


def save(figure: Figure, path: Path) -> None:
    """Write a figure as its file name says; the same figure gives the same bytes."""
    buffer, kind = io.BytesIO(), path.suffix.removeprefix(".")
    # no date in the file: the same results give the same bytes
    figure.savefig(buffer, format=kind, metadata={"CreationDate": None} if kind == "pdf" else None)
    write_bytes(path, _palette(buffer) if kind == "png" else buffer.getvalue(), StoreError)


def _palette(picture: io.BytesIO) -> bytes:
    """A palette of 256 colours is enough for a plot and takes a third of the space."""
    from PIL import Image

    small = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(256, kmeans=1).save(small, format="png", optimize=True)
    return small.getvalue()


# ---- The figures that only a CNN has: what the training cost, and the five norms at every place.


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


DRAWERS: dict[str, Callable[[Plan, Results], Any]] = {
    "curves": curves,
    "times": times,
    "gradients": gradients,
    "heatmaps": heatmaps,
    "cost": cost,
    "norms": norms,
}
