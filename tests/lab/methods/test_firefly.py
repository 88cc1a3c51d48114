"""Firefly: the gates of the candidates against networks that are really grown, with the perturbation a little larger and smaller."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rivals import data, mean_loss, mlp
from sensli import find_sites
from sensli.moves.width.width import Width
from sensli_lab.methods.pairs import pairs_of
from sensli_lab.methods.splitting import Extended, Firefly, split_site


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)
    ).double()  # fmt: skip


def extended(model: nn.Module, batches: Any) -> Extended:
    sites = find_sites(model, batches[0][0], what="units", units=1, init="net2net")
    return Extended(model, pairs_of(model, sites), torch.Generator().manual_seed(0))


def slow_loss(model: nn.Module, found: Extended, batches: Any, parts: Any) -> float:
    """The loss of the network that has really grown at all widths, one after the other, with all candidates."""
    wide = copy.deepcopy(model).eval()
    for pair, free in zip(found.pairs, parts, strict=True):
        site = split_site(pair, range(pair.width.units), *free).by_path()
        edit = site.move.plan(wide, site)
        edit.build()
        edit.apply()
    return mean_loss(wide, batches).item()


@pytest.mark.parametrize(("model", "batches"), [(mlp(), data()), (normed(), data((2, 6, 6), 2))])
def test_gates_are_the_change_of_the_loss_with_the_size_of_the_perturbation(model: nn.Module, batches: Any) -> None:
    found = extended(model, batches)
    gates = found.gates(batches, F.cross_entropy)
    whole = [tuple(part.detach() for part in free) for free in found.free]
    assert mean_loss(model.eval(), batches).item() != pytest.approx(slow_loss(model, found, batches, whole))
    small = 1e-5
    for number, (moved, rows, columns) in enumerate(whole):
        for index in (0, len(moved) - 1, len(moved), len(moved) + len(rows) - 1):
            losses = []
            for factor in (1 + small, 1 - small):
                gate = torch.ones(len(moved) + len(rows), 1).double()
                gate[index] = factor
                parts = list(whole)
                parts[number] = (moved * gate[: len(moved)], rows, columns * gate[len(moved) :])
                losses.append(slow_loss(model, found, batches, parts))
            assert gates[number][index].item() == pytest.approx(
                (losses[0] - losses[1]) / (2 * small), rel=1e-4, abs=1e-9
            )


def test_training_moves_candidates_alone_and_downhill() -> None:
    model, batches = mlp(), data()
    before = copy.deepcopy(model.state_dict())
    found = extended(model, batches)
    first = sum(found.loss(batch, 0, F.cross_entropy).item() for batch in batches)
    for _ in range(20):
        found.train(batches, F.cross_entropy)
    assert sum(found.loss(batch, 0, F.cross_entropy).item() for batch in batches) < first
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_best_of_all_layers_are_taken_splits_and_new_ones() -> None:
    model, batches = mlp(), data()
    sites = find_sites(model, batches[0][0], what="units", units=1, init="net2net")
    merits = Firefly(units=6).score(model, sites, batches, F.cross_entropy)
    found = Extended(model, pairs_of(model, sites), torch.Generator().manual_seed(0))
    found.train(batches, F.cross_entropy)
    gates = torch.cat(found.gates(batches, F.cross_entropy))
    best = gates.sort().values[:6]
    assert (best < 0).all()
    assert sum(merit.value for merit in merits) == pytest.approx(-best.sum().item())
    sources = [source for merit in merits if isinstance(merit.site.move, Width) for source in merit.site.move.sources]
    split = int((gates.split([5, 5, 6, 6])[0] <= best[-1]).sum() + (gates.split([5, 5, 6, 6])[2] <= best[-1]).sum())
    assert sum(source >= 0 for source in sources) == split
