"""A `Grower` whose best site is a width: optimizer, schedule, average, record and checkpoint follow, and a failed step is put back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from sensli import Grower, Rates, load_checkpoint, replay, save_checkpoint, triggers
from widths import normal

X, Y = normal(32, 4, seed=1), torch.arange(32) % 3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def make_optimizer(model: nn.Module) -> Any:
    return torch.optim.NAdam(model.parameters(), lr=0.01)


def make_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)


def make_grower(model: nn.Module, optimizer: Any, scheduler: Any, **options: Any) -> Grower:
    settings: dict[str, Any] = {
        "trigger": triggers.Every(2),
        "tau": 0.0,
        "rates": Rates(lr_factor=0.9),
        "what": "units",
        **options,
    }
    return Grower(model, optimizer, preset="paper", example=X[:2], scheduler=scheduler, **settings)


def epoch(
    model: nn.Module, optimizer: Any, scheduler: Any, grower: Grower, average: AveragedModel | None = None
) -> None:
    optimizer.zero_grad()
    cross_entropy(model(X), Y).backward()
    optimizer.step()
    scheduler.step()
    if average is not None:
        average.update_parameters(model)
    grower.step([(X, Y)], cross_entropy)


def whole(model: nn.Module, optimizer: Any, grower: Grower, average: AveragedModel) -> Any:
    states = {id(p): dict(state) for p, state in optimizer.state.items()}
    gradients = [p.grad for p in model.parameters()]
    parts = dict(model.state_dict()), dict(average.state_dict()), states, gradients, grower.state_dict()
    return copy.deepcopy(parts)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_the_average_follows_and_the_record_replays() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler, average = make_scheduler(optimizer), AveragedModel(model)
    grower = make_grower(model, optimizer, scheduler, averaged=average)
    for _ in range(6):
        epoch(model, optimizer, scheduler, grower, average)
        assert [p.shape for p in average.module.parameters()] == [p.shape for p in model.parameters()]
    assert len(grower.history) == 3 and all(growth.resized for growth in grower.history)
    assert [p.shape for p in replay(make_model(), grower.history).parameters()] == [p.shape for p in model.parameters()]


def test_a_run_with_widenings_resumes_to_the_bit(tmp_path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    run = [model, optimizer, scheduler := make_scheduler(optimizer), grower := make_grower(model, optimizer, scheduler)]
    for _ in range(3):
        epoch(*run)
    save_checkpoint(tmp_path / "a", model, optimizer=optimizer, scheduler=scheduler, grower=grower)
    found = load_checkpoint(
        tmp_path / "a", make_model, make_optimizer, make_scheduler=make_scheduler, make_grower=make_grower
    )
    again = [found.model, found.optimizer, found.scheduler, found.grower]
    for _ in range(4):
        epoch(*run)
        epoch(*again)
    assert len(grower.history) == 3 and grower.history == again[3].history
    assert same(dict(model.state_dict()), dict(again[0].state_dict()))
    moments = [[each.state[p] for p in net.parameters()] for net, each in ((model, optimizer), again[:2])]
    assert same(*moments)


@pytest.mark.parametrize("what", ["units", "both"])
def test_a_separate_rate_for_units_is_refused_at_once(what: str) -> None:
    """Not at the first look, after hours of training."""
    model = make_model()
    optimizer = make_optimizer(model)
    with pytest.raises(ValueError, match=f"new_lr_factor must be None with what='{what}', got 0.1"):
        make_grower(model, optimizer, make_scheduler(optimizer), what=what, rates=Rates(new_lr_factor=0.1))


class Fails(triggers.Trigger):
    """Fires at every call, and raises after the growth if it is asked to."""

    failing = False

    def fires(self, context: triggers.TriggerContext) -> bool:
        return True

    def grown(self) -> None:
        if self.failing:
            raise ZeroDivisionError("after the growth")


def test_a_step_that_fails_after_a_widening_is_put_back_to_the_bit() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler, average, trigger = make_scheduler(optimizer), AveragedModel(model), Fails()
    grower = make_grower(model, optimizer, scheduler, averaged=average, trigger=trigger, max_growths=2)
    for failing in (False, True, False):
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()
        average.update_parameters(model)
        before, trigger.failing = whole(model, optimizer, grower, average), failing
        if failing:
            with pytest.raises(ZeroDivisionError):
                grower.step([(X, Y)], cross_entropy)
            assert same(before, whole(model, optimizer, grower, average))
        else:
            assert grower.step([(X, Y)], cross_entropy) is not None
    assert len(grower.history) == 4
