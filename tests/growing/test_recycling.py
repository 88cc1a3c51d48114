"""A Grower that recycles dead units at its looks, and those that a new layer inherits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import sensli
from sensli import Grower, triggers
from sensli.moves.dead import Recycle

X = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(32) % 3
DATA = [(X[:16], Y[:16]), (X[16:], Y[16:])]
DEAD = [2, 5]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def with_dead() -> nn.Sequential:
    model = small()
    with torch.no_grad():
        model[0].bias[DEAD] = -100.0
    return model


def grower(model: nn.Module, **options: Any) -> tuple[Grower, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = {"example": X[:2], "trigger": triggers.Every(1), "tau": 0.0, "recycle": True, "max_factor": None}
    return Grower(model, optimizer, preset="paper", **{**given, **options}), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in DATA:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return values, gradients, copy.deepcopy(optimizer.state_dict()["state"])


def recycled(grower: Grower) -> list[tuple[int, ...]]:
    return [growth.site.move.which for growth in grower.history if isinstance(growth.site.move, Recycle)]


def test_a_look_recycles_and_then_grows_without_changing_the_function() -> None:
    looks: list[Any] = []
    model = with_dead()
    growing, optimizer = grower(model, trigger=triggers.Every(2) & triggers.Limit(growths=2), log=looks.append)
    train(model, optimizer)
    assert growing.step(DATA, cross_entropy) is None and not recycled(growing)  # no look, no change
    expected = model(X)
    growth = growing.step(DATA, cross_entropy)
    assert torch.equal(model(X), expected)
    assert growth is not None and growth.parameters and growth is growing.history[1]
    assert recycled(growing) == [tuple(DEAD)] and growing.history[0].details == {"epoch": 2}
    assert looks[-1].reason.endswith("; dead units recycled: 2") and looks[-1].growths == (2,)
    train(model, optimizer)
    assert model[-1].weight[:, DEAD].abs().min() > 0
    # What is recycled does not count: one more layer is allowed, and no third.
    for _ in range(4):
        growing.step(DATA, cross_entropy)
    assert growing.history.additions == 2


def test_without_the_option_dead_units_stay() -> None:
    model = with_dead()
    growing, _ = grower(model, recycle=False)
    assert growing.step(DATA, cross_entropy) is not None
    assert not recycled(growing) and bool((model[0].bias[DEAD] == -100).all())


def positive() -> nn.Sequential:
    """Features that are never positive: nothing in the model makes them, so that only a layer after the ReLU has dead units."""
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(), nn.Linear(4, 3)).double()


def test_dead_units_that_a_new_layer_inherits_get_new_rows() -> None:
    x = torch.cat([X[:, :2], -X[:, 2:].abs()], 1)
    model = positive()
    growing, optimizer = grower(model, example=x[:2])
    expected = model(x)
    growth = growing.step([(x, Y)], cross_entropy)
    assert growth is not None and "ReLU" in str(growth.site)
    assert [each.number for each in growing.history] == [1, 2] and growth.number == 1
    assert recycled(growing) == [(2, 3)] and growing.history[1].name.startswith(growth.name)
    assert torch.equal(model(x), expected)
    assert not model[-1].weight[:, 2:].any()
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(x), Y).backward()
        optimizer.step()
    assert model[-1].weight[:, 2:].any()
    plain = positive()
    without, _ = grower(plain, example=x[:2], recycle=False)
    without.step([(x, Y)], cross_entropy)
    assert plain[-1].weight[:, 2:].any() and len(without.history) == 1


def test_batches_that_can_be_taken_only_once_do() -> None:
    model = with_dead()
    growing, _ = grower(model)
    growing.step(iter(DATA), cross_entropy)
    assert recycled(growing) == [tuple(DEAD)] and len(growing.history) == 2


class Late(triggers.Every):
    """Fails when all has happened that it is told of."""

    def grown(self) -> None:
        raise RuntimeError("after the growth")


@pytest.mark.parametrize("average", [False, True])
def test_a_step_that_fails_leaves_everything_as_it_was(average: bool) -> None:
    model = with_dead()
    averaged = AveragedModel(model) if average else None
    growing, optimizer = grower(model, averaged=averaged, trigger=Late(1))
    train(model, optimizer)
    if averaged is not None:
        averaged.update_parameters(model)
    before, text = everything(model, optimizer), str(model)
    means = None if averaged is None else copy.deepcopy(averaged.module.state_dict())

    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("no loss")

    for loss, reason in ((fails, "no loss"), (cross_entropy, "after the growth")):
        with pytest.raises(RuntimeError, match=reason):
            growing.step(DATA, loss)
        torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)
        assert len(growing.history) == 0 and growing.calls == 0 and str(model) == text
        if averaged is not None:
            torch.testing.assert_close(averaged.module.state_dict(), means, rtol=0, atol=0)


def test_an_average_gets_the_new_rows_too() -> None:
    model = with_dead()
    averaged = AveragedModel(model)
    growing, _ = grower(model, averaged=averaged)
    growing.step(DATA, cross_entropy)
    assert torch.equal(averaged.module[0].weight, model[0].weight) and len(recycled(growing)) == 1


def test_a_training_that_recycles_resumes_to_the_bit(tmp_path: Path) -> None:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    model = with_dead()
    growing, optimizer = grower(model, trigger=triggers.Every(2))
    for _ in range(3):
        train(model, optimizer)
        growing.step(DATA, cross_entropy)
    assert recycled(growing)
    sensli.save_checkpoint(tmp_path / "a", model, optimizer=optimizer, grower=growing)
    again = sensli.load_checkpoint(tmp_path / "a", small, made, make_grower=again_grower)
    other = again.grower
    assert other is not None and other.history == growing.history
    for net, opt, each in ((model, optimizer, growing), (again.model, again.optimizer, other)):
        for _ in range(3):
            train(net, opt)
            each.step(DATA, cross_entropy)
    theirs = again.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def again_grower(model: nn.Module, optimizer: Any, _: Any) -> Grower:
    options = {"example": X[:2], "trigger": triggers.Every(2), "tau": 0.0, "recycle": True, "max_factor": None}
    return Grower(model, optimizer, preset="paper", **options)


def test_two_looks_draw_different_rows() -> None:
    model = with_dead()
    growing, _ = grower(model)
    growing.step(DATA, cross_entropy)
    first = model[0].weight[DEAD].detach().clone()
    with torch.no_grad():
        model[0].bias[DEAD] = -100.0
    growing.step(DATA, cross_entropy)
    assert not torch.isclose(model[0].weight[DEAD], first).any()
