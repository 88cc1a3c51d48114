"""ConvSENN: its value against the Fisher matrix of gradients of single samples, and what is taken by it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rivals import convolutions, data, mean_loss, mlp
from sensli import Grower
from sensli.growing.triggers import Every
from sensli.moves.width.width import Width
from sensli_lab.methods.convsenn import SPREAD, ConvSenn, natural_gradient
from sensli_lab.methods.searching import grown_copy


def slow(model: nn.Module, batches: Any) -> float:
    """g' F^-1 g with the diagonal of F, from the matrix of all gradients."""
    gradients = []
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    for one, its in zip(x.split(1), y.split(1), strict=True):
        loss = F.cross_entropy(model(one), its)
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
        gradients.append(torch.cat([each.flatten() for each in found]))
    rows = torch.stack(gradients)
    mean, fisher = rows.mean(0), rows.square().mean(0)
    alive = fisher > 0
    return float(mean[alive] @ torch.diag(1 / fisher[alive]) @ mean[alive])


@pytest.mark.parametrize(("model", "batches"), [(mlp(nn.ReLU), data()), (convolutions(), data((2, 6, 6), 2, 1))])
def test_the_value_is_that_of_the_formula_for_the_network_that_has_grown(model: nn.Module, batches: Any) -> None:
    strategy = ConvSenn(tau=0.0, price=1e-4)
    sites = strategy.propose(model, batches[0][0])
    before = copy.deepcopy(model.state_dict())
    merits = strategy.score(model, sites, batches, F.cross_entropy)
    assert {merit.site.kind for merit in merits} >= {"units"} and len({merit.site.kind for merit in merits}) > 1
    now = slow(copy.deepcopy(model), batches)
    assert natural_gradient(copy.deepcopy(model), batches, F.cross_entropy) == pytest.approx(now)
    for merit in merits:
        expected = slow(grown_copy(model, merit.site), batches) * 2.718281828459045 ** (
            -1e-4 * merit.site.parameters**2
        )
        assert merit.value == pytest.approx(expected) and merit.ratio == pytest.approx(expected / now)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Depends(nn.Module):
    """What it computes depends on the value of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) if x.sum() > 0 else self.second(x)
        return y


def test_samples_that_cannot_be_taken_at_once_are_taken_one_by_one() -> None:
    batches = [(torch.randn(5, 4).double(), torch.randint(0, 3, (5,))) for _ in range(3)]
    model = Depends().double()
    assert natural_gradient(model, batches, F.cross_entropy) == pytest.approx(slow(copy.deepcopy(model), batches))


def test_a_model_that_computes_its_own_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> Any:
            assert scale.shape == (3,) and len(x) == len(labels) == 1
            loss = F.cross_entropy(self.layer(x) * scale, labels)
            return type("Output", (), {"loss": loss})()

    x, y, scale = torch.randn(200, 4).double(), torch.randint(0, 3, (200,)), torch.ones(3).double()
    model = Own().double()
    expected = slow(copy.deepcopy(model.layer), [(x, y)])
    found = natural_gradient(model, [{"x": x, "labels": y, "scale": scale}], None)
    assert found == pytest.approx(expected), "in two parts, and what is the same for all samples as a whole"


def test_the_best_candidate_is_taken_if_it_is_worth_it() -> None:
    batches = data()
    for tau, taken in ((0.0, 1), (2.0, 0)):
        model, told = mlp(), list[Any]()
        grower = Grower(
            model, torch.optim.SGD(model.parameters(), lr=0.1), preset="paper",
                example=batches[0][0], trigger=Every(1), strategy="convsenn", tau=tau,
            units=2, max_factor=None, log=told.append,
        )  # fmt: skip
        before = mean_loss(model, batches).item()
        grower.step(batches, F.cross_entropy)
        assert len(grower.history) == taken
        merits = grower.last_merits
        assert merits is not None and 1 < merits.best.ratio < 2  # type: ignore[operator]
        assert f"tau = {tau:g}" in str(told[0].reason)
        assert mean_loss(model, batches).item() == pytest.approx(before, abs=1e-3)
        if taken:
            assert str(grower.history[0].site) == str(merits.best.site) and "not kept" in str(told[0])


def test_units_begin_small_on_both_sides() -> None:
    model, batches = mlp(), data()
    strategy = ConvSenn(units=3)
    for site in strategy.propose(model, batches[0][0]):
        move = strategy._started(site).move
        if isinstance(move, Width):
            assert move._entries is not None
            for axis, value in zip(move.axes, move._entries.values, strict=True):
                assert (axis.fill in ("row", "column")) == (value is not None)
                assert value is None or 0 < value.abs().max() < 5 * SPREAD
