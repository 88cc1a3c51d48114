"""`sensli demo`: a small, a growing and a large network learn two spirals side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sensli.cli.terminal import Reach, paint_decision, progress, require_plots
from sensli.growing import triggers
from sensli.growing.grower import Grower
from sensli.modules.flops import count_flops
from sensli.modules.running import fit_threads
from sensli.moves.finding import find_sites
from sensli.page import Curve, Film, page_data, write_page
from sensli.surgery.history import History
from sensli.text.files import check_writable, replacing
from sensli.text.records import dumps as strict_json
from sensli.text.tables import text_table
from sensli_lab.compare.task import plain_network
from sensli_lab.paper import datasets

WIDTH, HIDDEN, EPOCHS, LOOKS, RATE, TAU = 10, 2, 1000, (150, 300, 450), 0.1, 1.0
# The largest norm of a gradient: a deeper network has a few far larger ones, and would jump. Chosen on other seeds than the default.
CLIP = 0.5
FRAMES = 70  # pictures of the film, in addition to those of the decisions


@dataclass
class Arm:
    """One of the three networks, and its results."""

    name: str
    model: nn.Sequential
    looks: tuple[int, ...] = ()
    losses: list[float] = field(default_factory=list)
    history: History = field(default_factory=History)
    flops: int = 0  # per training sample, over all epochs
    costs: list[int] = field(default_factory=list)  # the same after each epoch
    film: Film = field(init=False)

    def __post_init__(self) -> None:
        self.film = Film(self.name)


def build_network(hidden: int, seed: int) -> nn.Sequential:
    """A ReLU network with so many hidden layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return plain_network(datasets.FEATURES, WIDTH, hidden, datasets.CLASSES)


def demo(out: Path, *, seed: int, as_json: bool = False) -> None:
    """Train the three networks, print every decision and a table, draw a picture, write the growth page."""
    require_plots()
    picture, page, history = (out / name for name in ("demo.png", "growth.html", "history.json"))
    for path in (picture, page, history):
        check_writable(path)
    data = datasets.split_spirals()
    x, y, x_test, y_test = data.train_x, data.train_y, data.test_x, data.test_y
    baseline, grown = Arm("baseline", build_network(HIDDEN, seed)), Arm("grown", build_network(HIDDEN, seed), LOOKS)
    if not as_json:
        print(
            f"Two spirals, {len(x)} points. The growing network starts with {HIDDEN} hidden layers of {WIDTH} units; its sites now:"
        )
        print(find_sites(grown.model, x[:1]).explain(), end="\n\n")
    with fit_threads(), progress("training", EPOCHS * 3) as reach:
        _train(baseline, x, y, reach, 0, quiet=as_json)
        _train(grown, x, y, reach, EPOCHS, quiet=as_json)
        # from the start as large as the grown one became: a look may have inserted nothing
        extended = Arm("extended", build_network(HIDDEN + len(grown.history), seed))
        _train(extended, x, y, reach, 2 * EPOCHS, quiet=as_json)
    arms = [baseline, grown, extended]
    results = [_result(arm, x, y, x_test, y_test) for arm in arms]
    rows = [
        [
            str(result["network"]),
            f"{result['parameters']}",
            f"{result['FLOPs per sample']:,}",
            f"{result['training loss']:.4f}",
            f"{result['test error']:.1%}",
        ]
        for result in results
    ]
    header = list(results[0])
    _draw(arms, x, y, picture)
    write_page(page, _page(arms, [dict(zip(header, row, strict=True)) for row in rows], x, y))
    arms[1].history.save(history)
    if as_json:
        looks = [look.to_dict() for look in arms[1].history.record.decisions]
        print(strict_json({"results": results, "looks": looks, "page": str(page), "picture": str(picture)}, indent=1))
        return
    print("\n" + text_table(header, rows))
    print(f"\nanimation: {page}   (open it in a browser)\npicture: {picture}")
    print("This is one run of many; try another with --seed. FLOPs count all training steps and all measurements.")


def _train(arm: Arm, x: Tensor, y: Tensor, reach: Reach, before: int, *, quiet: bool) -> None:
    """Full-batch gradient descent; growing is two lines of it."""
    optimizer = torch.optim.SGD(arm.model.parameters(), lr=RATE)
    grower = Grower(
        arm.model, optimizer, preset="paper", example=x[:1], trigger=triggers.At(*arm.looks or (EPOCHS + 1,)), tau=TAU
    )
    frames = _frames()
    arm.film.take(0, arm.model)
    forward = count_flops(arm.model, x[:1])
    for epoch in range(1, EPOCHS + 1):
        optimizer.zero_grad()
        loss = cross_entropy(arm.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(arm.model.parameters(), CLIP)
        optimizer.step()
        arm.losses.append(loss.item())
        arm.flops += 3 * forward
        arm.costs.append(arm.flops)
        grower.step([(x, y)], cross_entropy, metric=arm.losses[-1])
        if epoch in arm.looks:
            look = grower.history.record.decisions[-1]
            # by the paper's rule a measurement costs one step of the network with a layer at every site
            arm.flops += 3 * (forward + sum(merit.flops for merit in look.merits))
            forward = count_flops(arm.model, x[:1])
            if not quiet:
                print(paint_decision(look))
        if epoch in frames:
            arm.film.take(epoch, arm.model)
        reach(before + epoch, f"{arm.name}, loss {arm.losses[-1]:.3f}")
    arm.history = grower.history


def _frames() -> set[int]:
    """Epochs of the film: many at first, where most happens, and both sides of every look."""
    early = min(EPOCHS, LOOKS[-1] + LOOKS[0])
    frames = set(range(0, early, max(1, early * 3 // (2 * FRAMES)))) | set(
        range(early, EPOCHS, max(1, (EPOCHS - early) * 3 // FRAMES))
    )
    return frames | {EPOCHS} | {look + step for look in LOOKS for step in (-1, 0)}


def _result(arm: Arm, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        loss = cross_entropy(arm.model(x), y).item()
        wrong = (arm.model(x_test).argmax(dim=1) != y_test).float().mean().item()
    parameters = sum(p.numel() for p in arm.model.parameters())
    return {
        "network": arm.name,
        "parameters": parameters,
        "FLOPs per sample": arm.flops,
        "training loss": loss,
        "test error": wrong,
    }


def _page(arms: list[Arm], results: list[dict[str, Any]], x: Tensor, y: Tensor) -> dict[str, Any]:
    epochs = list(range(1, EPOCHS + 1))
    looks = ", ".join(map(str, LOOKS[:-1])) + f" and {LOOKS[-1]}"
    return page_data(
        arms[1].history,
        title="A network grows on two spirals",
        intro=f"It starts with {HIDDEN} hidden layers of {WIDTH} units. At epochs {looks} it measures what a new layer would "
        f"be worth at each site, and inserts the best one as an identity if it passes the threshold tau = {TAU:g}. For comparison: the "
        "same network that never grows (baseline), and one that has the size of the grown one from the start (extended).",
        measure="training loss",
        curves=[Curve(arm.name, epochs, arm.losses, arm.name, arm.costs) for arm in arms],
        films=[arm.film for arm in arms],
        results=results,
        points=[(round(a, 3), round(b, 3), int(label)) for (a, b), label in zip(x.tolist(), y.tolist(), strict=True)],
    )


def _draw(arms: list[Arm], x: Tensor, y: Tensor, path: Path) -> None:
    """Decision boundaries above, losses below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"baseline": "#7f7f7f", "grown": "#d95f02", "extended": "#1b6ca8"}
    figure, axes = plt.subplot_mosaic(
        [[arm.name for arm in arms], ["loss"] * len(arms)],
        figsize=(11, 7.6),
        layout="constrained",
        height_ratios=[3, 2.2],
    )
    ticks = torch.linspace(-1.75, 1.75, 300, device="cpu")
    grid = torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), dim=-1)
    for arm in arms:
        with torch.no_grad():
            share = arm.model(grid.view(-1, 2)).softmax(dim=1)[:, 1].view(300, 300)
        panel = axes[arm.name]
        panel.contourf(ticks, ticks, share, levels=20, cmap="RdBu_r", vmin=0, vmax=1, alpha=0.75)
        panel.contour(ticks, ticks, share, levels=[0.5], colors="black", linewidths=1)
        for label, colour in ((0, "#123e6b"), (1, "#7a0c1c")):
            panel.plot(*x[y == label].T, ".", markersize=3.5, color=colour)
        hidden = sum(isinstance(module, nn.Linear) for module in arm.model.modules()) - 1
        layers = f"{hidden} hidden layer" + ("s" if hidden > 1 else "")
        panel.set_title(f"{arm.name}: {layers}, loss {arm.losses[-1]:.3f}", fontsize=11)
        panel.set(xticks=[], yticks=[], aspect="equal")
        axes["loss"].plot(arm.losses, label=arm.name, color=colours[arm.name], linewidth=1.8)
    for epoch in (growth.details["epoch"] for growth in arms[1].history):
        axes["loss"].axvline(epoch, linestyle=":", color=colours["grown"])
        axes["loss"].annotate(
            "layer inserted",
            (epoch, 0.97),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            fontsize=8,
        )
    axes["loss"].set(xlabel="epoch", ylabel="training loss", ylim=(0, 0.8), xlim=(0, EPOCHS))
    axes["loss"].legend(frameon=False)
    axes["loss"].spines[["top", "right"]].set_visible(False)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)
    plt.close(figure)
