"""The stacked engine is the core's mathematics: the same seeds, one by one with `Grower`, give the same results."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import reference
from experiments import settings
from sensli import Grower, Rates, count_flops, triggers
from sensli_lab.paper import datasets, stacked
from sensli_lab.paper.engine import TrainingJob
from sensli_lab.paper.machine import run_seed
from sensli_lab.paper.settings import Network, Settings

RUNS = (0, 1, 4)
CASES = {
    "fnn, full batch": settings(lr_scale=0.8),
    "fnn, mini-batch, smallest": settings(batch=45, select="smallest", lr_scale=2.0),
    "resnet, full batch": settings(network=Network("resnet", (3, 3, 3)), lr_scale=0.7),
    "resnet, mini-batch, three insertions": settings(
        network=Network("resnet", (3, 3)), batch=30, insert_at=(5, 10, 15), epochs=20
    ),
    "resnet as run": settings(network=Network("resnet", (3, 3), True, True)),
}


def grow_alone(case: Settings, seed: int, run: int) -> tuple[list[float], list[int]]:
    """One network, trained as a user of the core would train it."""
    data = datasets.split_spirals(case.data.train, case.data.split_seed, torch.float64)
    model = stacked.build_small_network(case.network, run_seed(seed, run, "weights"), torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.optimizer.lr)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=data.train_x[:1],
        trigger=triggers.At(*case.insert_at),
        tau=0,
        norm="frobenius",
        select=case.select,
        form="relu" if case.network.kind == "fnn" else "residual",
        rates=Rates(lr_factor=case.lr_scale),
    )
    everything = [(data.train_x, data.train_y)]
    losses, places = [], []
    for epoch in range(case.epochs):
        losses.append(_loss(model, data))
        for batch in reference.batches(case, seed, run, epoch):
            optimizer.zero_grad()
            cross_entropy(model(data.train_x[batch]), data.train_y[batch]).backward()
            optimizer.step()
        growth = grower.step(everything, cross_entropy)
        if growth is not None:
            values = [merit.value for merit in grower.last_merits]
            wanted = max(values) if case.select == "largest" else min(values)
            places.append(values.index(wanted))
    return [*losses, _loss(model, data)], places


def _loss(model: torch.nn.Module, data: datasets.SpiralSplit) -> float:
    with torch.no_grad():
        return cross_entropy(model(data.train_x), data.train_y).item()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.slow
def test_same_insertions_and_same_loss_curves(case):
    together = stacked.train_runs(TrainingJob(case, 7, RUNS)).runs
    for row, run in enumerate(RUNS):
        losses, places = grow_alone(case, 7, run)
        assert together["place"][row].tolist() == places
        expected = torch.tensor(losses, dtype=torch.float64)
        torch.testing.assert_close(together["train_loss"][row], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("network", [Network("fnn", (5, 5)), Network("resnet", (3, 3, 3))], ids=("fnn", "resnet"))
def test_counts_agree_with_the_core(network):
    model = stacked.build_small_network(network, 0)
    assert stacked.network_flops(network) == count_flops(model, torch.zeros(1, 2))
    assert stacked.count_parameters(network) == sum(parameter.numel() for parameter in model.parameters())
