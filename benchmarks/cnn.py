"""The CNN experiments: what the input pipeline costs, what looking costs, and the ratios of experiment 1 from stored results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from benchmarks.figure import Figure
from benchmarks.measuring import interleaved
from benchmarks.networks import paper_cnn
from sensli.merits.measuring import measure
from sensli.moves.finding import find_sites
from sensli_lab.errors import NoResults
from sensli_lab.paper import cnn, datasets, evidence, planning
from sensli_lab.paper.image_sets import FACTS, Raw
from sensli_lab.paper.planning import Plan, RunOptions, plan
from sensli_lab.paper.store import Store
from sensli_lab.work.statistics import interval

BATCH = 128
ROUNDS = 9
TRAINS = "trains"
LAPTOP = RunOptions(preset="laptop")


def _images() -> tuple[datasets.Images, str]:
    """The paper's training images where they are, else noise of the same shape: the cost is the same."""
    facts = FACTS["cifar10"]
    wanted = plan(planning.find_experiment("1"), TRAINS, LAPTOP).arms["CNN LI"].data
    if os.environ.get("SENSLI_DATA"):
        return cnn.cached_images(wanted, None, torch.device("cpu"), torch.float32).train, "CIFAR-10"
    noise = torch.randint(0, 256, (wanted.train + wanted.validation, 32, 32, 3), dtype=torch.uint8)
    labels = torch.arange(len(noise)) % 10
    raw = Raw(noise, labels, noise[:BATCH], labels[:BATCH])
    return datasets.split_images(
        raw, facts, wanted, torch.device("cpu"), torch.float32
    ).train, "noise in the shape of CIFAR-10"


def pipeline_cost() -> list[Figure]:
    """A training step with random crops and flips against the same step on one fixed batch."""
    images, source = _images()
    step, _ = _steps(images)
    generator, order = torch.Generator().manual_seed(0), torch.randperm(len(images))
    fixed = images.batch(order[:BATCH])
    turn = 0

    def fed() -> None:
        nonlocal turn
        turn = (turn + BATCH) % (len(order) - BATCH)
        step(*images.augmented(order[turn : turn + BATCH], generator))

    seconds = interleaved({"bare": lambda: step(*fixed), "fed": fed}, ROUNDS)
    alone = interleaved({"data": lambda: images.augmented(order[:BATCH], generator)}, ROUNDS)["data"]
    how = f"paper's CNN, batch {BATCH}, {source}, median of {ROUNDS} interleaved rounds; the batch alone takes"
    return [
        Figure(
            "step with input pipeline / bare step",
            seconds["fed"] / seconds["bare"],
            1.05,
            f"{how} {alone * 1e3:.1f} ms",
        ),
        Figure("input pipeline alone / bare step", alone / seconds["bare"], 0.05, "the same, not by a difference"),
    ]


def look_cost() -> list[Figure]:
    """Share of the looks in the training time, from step and look times measured here and the lengths of experiment 1.

    A look with confidence costs what four half batches cost if the best place is clear then, the least it can. A full look costs
    the norms once, and the rest for every batch: the difference between three batches and one tells them apart. The networks between the
    looks are those of the paper's table: none, one, one and two layers more.
    """
    images, source = _images()
    facts, network = FACTS["cifar10"], plan(planning.find_experiment("1"), TRAINS, RunOptions()).arms["CNN LI"].network
    step, model = _steps(images)
    sites = find_sites(model, images.batch(torch.arange(1))[0], form="relu", where="conv")
    order = torch.randperm(len(images))
    one, three = (images.batches(BATCH, order[: count * BATCH]) for count in (1, 3))
    halves = images.batches(BATCH // 2, order[: 2 * BATCH])
    seconds = interleaved(
        {
            "step": lambda: step(*images.batch(order[:BATCH])),
            "one": lambda: measure(model, sites, one, cross_entropy, norm="operator"),
            "three": lambda: measure(model, sites, three, cross_entropy, norm="operator"),
            "short": lambda: measure(
                model, sites, [*halves, *halves], cross_entropy, norm="operator", confidence=0.99, max_batches=4
            ),
        },
        ROUNDS,
    )
    base = cnn.cnn_flops(network, facts, [1, 1, 1])
    figures = []
    for name, options, bars in (("laptop", LAPTOP, (0.01,)), ("paper", RunOptions(), (0.002, 0.03))):
        settings = plan(planning.find_experiment("1"), TRAINS, options).arms["CNN LI"]
        steps = settings.data.train / settings.batch * settings.epochs
        layers = sum(cnn.cnn_flops(network, facts, [1 + k, 1, 1]) / base for k in (0, 1, 1, 2)) / 4
        training = seconds["step"] * steps * layers
        looks = len(settings.insert_at) * layers  # a look at a larger network costs more in the same proportion
        detail = f"{source}; step {seconds['step'] * 1e3:.0f} ms, four half batches {seconds['short'] * 1e3:.0f} ms; computed"
        figures.append(
            Figure(
                f"looking with confidence, at best / training, {name}",
                looks * seconds["short"] / training,
                bars[0],
                detail,
            )
        )
        if len(bars) > 1:
            each = (seconds["three"] - seconds["one"]) / 2
            exact = seconds["one"] + each * (settings.data.train / BATCH - 1)
            detail = (
                f"{source}; a batch {each * 1e3:.0f} ms, the norms {(seconds['one'] - each) * 1e3:.0f} ms; computed"
            )
            figures.append(Figure(f"exact looking / training, {name}", looks * exact / training, bars[1], detail))
    return figures


def exp1(results: Path = Path("results")) -> list[Figure]:
    """Ratios of experiment 1 at the laptop preset, from stored results."""
    one = plan(planning.find_experiment("1"), TRAINS, LAPTOP)
    names = ("Exp1: |FLOPs ratio - ratio of the insertions|", "Exp1: |time ratio - ratio of the insertions|",
             "Exp1: share of looking", "Exp1: test error, grown - extended")  # fmt: skip
    bars = (0.03, 0.03, 0.01, 0.0)
    try:
        grown, whole = (Store(results).load(one, arm) for arm in ("CNN LI", "CNN"))
    except NoResults:
        missing = f"not computed yet: {_command(one)}"
        return [Figure(name, None, bar, missing) for name, bar in zip(names, bars, strict=True)]
    found = evidence.ratios(grown, whole)
    difference = interval(grown.final("test_error") - whole.final("test_error"))
    detail = f"{found} ({_command(one)}, {grown.facts['device']})"
    values = (
        abs(found.computed.mean - found.chosen.mean),
        abs(found.steady.mean - found.chosen.mean),
        found.looking.mean,
        difference.mean,
    )
    details = (detail, "time from median epochs", "measured with the results", f"difference {difference}")
    return [Figure(*entry) for entry in zip(names, values, bars, details, strict=True)]


def _command(one: Plan) -> str:
    return f"sensli paper run 1 --as {one.recipe} --preset {one.preset}"


def _steps(images: datasets.Images) -> tuple[Callable[[torch.Tensor, torch.Tensor], None], torch.nn.Module]:
    model = paper_cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(x), y))
        optimizer.step()

    return step, model
