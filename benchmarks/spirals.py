"""The spiral experiments: how much faster the stack is, and how long all nine take."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.figure import Figure
from sensli.modules.running import fit_threads
from sensli_lab.errors import NoResults
from sensli_lab.paper import planning, stacked
from sensli_lab.paper.datasets import split_spirals
from sensli_lab.paper.engine import TrainingJob
from sensli_lab.paper.machine import ORDER_BLOCK, order_block, run_seed
from sensli_lab.paper.planning import Plan, RunOptions, plan
from sensli_lab.paper.settings import Settings
from sensli_lab.paper.store import Store

BARS = {"2": 5.0, "4": 10.0}
ROUNDS = 3
SHARE = 0.05  # of the epochs; what one epoch costs does not depend on how many there are
MINUTES = 10.0


def spirals(results: Path = Path("results")) -> list[Figure]:
    """Stacked against one after another, and the time that the stored results took."""
    return [*(_speedup(name, bar) for name, bar in BARS.items()), _total(Store(results))]


def _speedup(name: str, bar: float) -> Figure:
    """All arms and runs of one experiment: stacked against one network after another.

    Both sides train a twentieth of the epochs, insertion included; the plain side trains one network per arm and round
    and is scaled to the number of runs. The two take turns in every round, so that a busy machine slows both alike.
    """
    one = plan(planning.find_experiment(name), "stated", RunOptions(epochs_scale=SHARE))
    together, alone = 0.0, 0.0
    with fit_threads():
        for settings in one.arms.values():  # the first optimizer and the first step of a process load code
            train_alone(settings, one.seed, 0)
        for turn in range(ROUNDS):
            for settings in one.arms.values():
                job = TrainingJob(settings, one.seed, tuple(range(one.runs)))
                together += _timed(stacked.train_runs, job)
                alone += _timed(train_alone, settings, one.seed, turn) * one.runs
    ratio = alone / together
    arms = len(one.arms)
    detail = (
        f"{arms} arms of {one.runs} runs, {SHARE:.0%} of the epochs, float32, one thread: {together / ROUNDS:.2f} s "
        f"stacked, {alone / ROUNDS:.1f} s one after another (one network per arm and round timed, times {one.runs}), "
        f"{ROUNDS} rounds in turn"
    )
    return Figure(f"Exp{name}: plain PyTorch / stacked, seconds", ratio, bar, detail, at_most=False)


def _timed(work: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def train_alone(settings: Settings, seed: int, run: int) -> list[float]:
    """One network in plain PyTorch: module, optimizer, cross_entropy; test error and training loss every epoch."""
    data = split_spirals(settings.data.train, settings.data.split_seed)
    model: nn.Sequential = stacked.build_small_network(settings.network, run_seed(seed, run, "weights"))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.optimizer.lr)
    losses = []
    everything = torch.arange(settings.data.train)
    for epoch in range(settings.epochs):
        with torch.no_grad():
            (model(data.test_x).argmax(1) != data.test_y).float().mean()
            if settings.batch < settings.data.train:
                losses.append(cross_entropy(model(data.train_x), data.train_y).item())
        order = everything
        if settings.batch < settings.data.train:
            block, within = divmod(epoch, ORDER_BLOCK)
            if within == 0:
                orders = order_block(seed, [run], block, settings.data.train)
            order = orders[within, 0]
        for batch in torch.split(order, settings.batch):
            optimizer.zero_grad()
            loss = cross_entropy(model(data.train_x[batch]), data.train_y[batch])
            torch.autograd.backward(loss)
            optimizer.step()
        if settings.batch == settings.data.train:
            losses.append(loss.item())
        if epoch + 1 in settings.insert_at:
            # the spiral networks of these experiments have one place; a layer there is a fresh Linear and ReLU
            width = settings.network.widths[0]
            new = nn.Linear(width, width)
            with torch.no_grad():
                new.weight.copy_(torch.eye(width))
                new.bias.zero_()
            first, *rest = model
            model = nn.Sequential(first, nn.ReLU(), new, *rest)
            optimizer = torch.optim.SGD(model.parameters(), lr=optimizer.param_groups[0]["lr"])
    return losses


def _total(store: Store) -> Figure:
    """Seconds of training that the store recorded for the paper's nine experiments, all recipes."""
    name = "the nine spiral experiments, minutes"
    try:
        seconds = sum(_seconds(one, store) for one in _plans())
    except NoResults as error:
        return Figure(name, None, MINUTES, f"not computed yet. {error}")
    detail = "training time as recorded with the results, one thread; figures and report take less than a minute more"
    return Figure(name, seconds / 60, MINUTES, detail)


def _plans() -> list[Plan]:
    found = [planning.find_experiment(name) for name in planning.GROUPS["spirals"]()]
    return [plan(one, recipe, RunOptions()) for one in found for recipe in one.recipes]


def _seconds(one: Plan, store: Store) -> float:
    return sum(result.seconds for result in store.load_all(one).values())
