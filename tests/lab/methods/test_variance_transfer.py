"""Variance transfer: pairs that cancel, what is rescaled, and separate rates for what came with each growth."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rivals import data, mean_loss, mlp
from sensli import Grower, History, find_sites, grow, load_checkpoint, save_checkpoint, undo
from sensli.growing.triggers import Every
from sensli_lab.methods.variance_transfer import GenerationRates


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2),
    ).double()  # fmt: skip
    for _ in range(5):
        model(torch.randn(20, 2, 6, 6).double())
    return model


def growing(model: nn.Module, optimizer: Any, batches: Any, **options: Any) -> Grower:
    return Grower(
        model, optimizer, preset="paper", example=batches[0][0], trigger=Every(1), strategy="variance-transfer", max_factor=None,
        **{"units": 3, **options},
    )  # fmt: skip


def test_pairs_cancel_and_the_reader_is_rescaled() -> None:
    model, batches = mlp(), data()
    old = copy.deepcopy(model)
    told: list[Any] = []
    grower = growing(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, log=told.append)
    grower.step(batches, F.cross_entropy)
    assert len(grower.history) == 2 and "not kept" in str(told[0])  # all widths, four units each: three are not pairs
    hidden, output = (5 / 9) ** 0.5, 6 / 10
    torch.testing.assert_close(model[2].weight[:6, :5], hidden * old[2].weight)
    torch.testing.assert_close(model[4].weight[:, :6], output * old[4].weight)
    for maker, reader, units in ((0, 2, 5), (2, 4, 6)):
        rows, columns = model[maker].weight[units:], model[reader].weight[:6, units:]
        assert torch.equal(rows[:2], rows[2:]) and rows.abs().min(1).values.max() >= 0
        assert torch.equal(columns[:, :2], -columns[:, 2:]) and (columns != 0).all()
        assert torch.equal(model[maker].bias[units:], torch.zeros(4).double())
    # To what the network is with the old weights rescaled, nothing was added.
    with torch.no_grad():
        old[2].weight.mul_(hidden)
        old[4].weight.mul_(output)
    torch.testing.assert_close(model(batches[0][0]), old(batches[0][0]))


def test_variances_of_what_is_drawn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 40), nn.Tanh(), nn.Linear(40, 30)).double()
    batches = data((50,), 30)
    growing(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, units=100).step(batches, F.cross_entropy)
    assert model[0].weight[100:].std().item() == pytest.approx(50**-0.5, rel=0.05)
    assert model[2].weight[:40, 100:].std().item() == pytest.approx(200**-0.5, rel=0.05)
    assert model[4].weight[:, 40:].std().item() == pytest.approx(1 / 140, rel=0.1)


@pytest.mark.parametrize("training", [True, False])
def test_with_a_batch_norm_after_the_reader_the_function_stays(training: bool) -> None:
    model, batches = normed(), data((2, 6, 6), 2)
    old = copy.deepcopy(model)
    grower = growing(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, where="0")
    grower.step(batches, F.cross_entropy)
    by = (4 / 8) ** 0.5
    torch.testing.assert_close(model[4].running_mean, by * old[4].running_mean)
    torch.testing.assert_close(model[4].running_var, by**2 * old[4].running_var)
    torch.testing.assert_close(model[3].weight[:, :4], by * old[3].weight)
    x = batches[0][0]
    torch.testing.assert_close(model.train(training)(x), old.train(training)(x), rtol=1e-3, atol=1e-4)


def test_what_was_rescaled_comes_back() -> None:
    for steps in (0, 1):
        model, batches = normed(), data((2, 6, 6), 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        before = copy.deepcopy(model.state_dict())
        grower = growing(model, optimizer, batches)
        grower.step(batches, F.cross_entropy)
        assert len(grower.history) == 2
        model.eval()
        for _ in range(steps):
            with torch.no_grad():  # what a step would do to the one layer
                model[0].weight.add_(1.0)
        for growth in reversed(grower.history):
            undo(model, growth, optimizer=optimizer)
        for name, value in model.state_dict().items():
            if steps == 0:
                assert torch.equal(value, before[name]), name
            elif name != "0.weight":
                torch.testing.assert_close(value, before[name])


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_each_generation_learns_with_its_own_rate(kind: str) -> None:
    """As the whole step of an optimizer times the ratio of the norms, entry by entry."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), data()
    make = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2),
        "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    }[kind]
    optimizer = make(model)
    grower = growing(model, optimizer, batches)
    for _ in range(2):
        grower.step(batches, F.cross_entropy)
    other, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    plain = make(other)  # without hooks
    for one, its in ((model, optimizer), (other, plain)):
        mean_loss(one, batches).backward()
        its.step()
    for name, dim in (("0.weight", 0), ("2.weight", 1)):
        old = start[name]
        full, own = other.state_dict()[name] - old, model.state_dict()[name] - old
        parts = [each.split([5, 4, 4], dim) for each in (old, full, own)]
        for part, whole, scaled in zip(*parts, strict=True):
            torch.testing.assert_close(scaled, part.norm() / parts[0][0].norm() * whole)
    assert torch.equal(model[0].bias, other[0].bias)


def test_rates_survive_a_checkpoint(tmp_path: Path) -> None:
    batches = data()

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        mean_loss(model, batches).backward()
        optimizer.step()

    model = mlp()
    optimizer = make_optimizer(model)
    grower = growing(model, optimizer, batches)
    grower.step(batches, F.cross_entropy)
    step(model, optimizer)
    save_checkpoint(tmp_path / "a.pt", model, optimizer=optimizer, grower=grower)
    found = load_checkpoint(
        tmp_path / "a.pt",
        mlp,
        make_optimizer,
        make_grower=lambda model, optimizer, _: growing(model, optimizer, batches),
    )
    for one, its, own in ((model, optimizer, grower), (found.model, found.optimizer, found.grower)):
        for _ in range(2):
            step(one, its)
            assert own is not None
            own.step(batches, F.cross_entropy)
        step(one, its)
    for name, value in model.state_dict().items():
        assert torch.equal(value, found.model.state_dict()[name]), name


@pytest.mark.parametrize("popped", [True, False])
def test_rates_of_generations_follow_undo_and_another_growth_of_the_same_number(popped: bool) -> None:
    """The second growth has the number, the layer and not the units of the first."""
    model, x = mlp(), data()[0][0]
    optimizer, history, rates_of = torch.optim.SGD(model.parameters(), lr=0.1), History(), GenerationRates()
    rates_of.attend(model, [optimizer], history)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for units in (2, 3):
        history.append(grow(model, find_sites(model, x, what="units", units=units)[0], optimizer=optimizer))
        step()
        if units == 2:
            undo(model, history[-1], optimizer=optimizer)
            if not popped:  # a step before the history is told
                step()
            history.pop()
    weight = model[0].weight
    ((_, generation),) = [(p, its) for p, its in rates_of.maps() if p is weight]
    assert generation.shape == weight.shape == (8, 4) and (generation[5:] == 1).all() and not generation[:5].any()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    old, gradient = weight.detach().clone(), weight.grad.clone()
    optimizer.step()
    factor = torch.ones_like(old)
    factor[5:] = old[5:].norm() / old[:5].norm()
    torch.testing.assert_close(weight.detach(), old - 0.1 * factor * gradient)
