"""A learning rate of its own for a new layer, and only the new layer training, under every scheduler of torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from models import residual
from schedules import EACH, KINDS, STEPS, Make, rates, state, step
from sensli import Growth, History, find_sites, insert, load_checkpoint, save_checkpoint, undo
from sensli.errors import OptimizerError, UnsupportedSite
from sensli.moves.stacking import find_stack_copies

AT = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2)).double()


def two_groups(model: nn.Module, kind: Callable[..., Optimizer]) -> Optimizer:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return kind([{"params": weights}, {"params": biases, "lr": 0.05}], lr=0.1)


@pytest.mark.parametrize(
    "kind", [pytest.param(KINDS[0], id="SGD", marks=pytest.mark.slow), pytest.param(KINDS[1], id="AdamW")]
)
@pytest.mark.parametrize("make", EACH)
def test_its_own_rate_follows_the_schedule_at_its_own_height(make: Make, kind: Callable[..., Optimizer]) -> None:
    plain = two_groups(network(), kind)
    reference = make(plain)
    expected = [step(plain, reference) for _ in range(STEPS)]

    model = network()
    optimizer = two_groups(model, kind)
    scheduler = make(optimizer)
    seen = [step(optimizer, scheduler) for _ in range(AT)]
    site = find_sites(model, torch.randn(5, 3).double())[1]
    growth = insert(model, site, optimizer=optimizer, scheduler=scheduler, new_lr_factor=0.25)
    new = {id(p) for name, p in model.named_parameters() if name in growth.parameters}
    assert [{id(p) for p in group["params"]} <= new for group in optimizer.param_groups] == [False, False, True, True]
    grown = []
    for _ in range(STEPS - AT):
        rate = step(optimizer, scheduler)
        seen.append(rate[:2])
        grown.append(rate[2:])
    assert seen == expected  # the others as without growth
    values: list[Any] = [v for each in (scheduler, *getattr(scheduler, "_schedulers", ())) for v in _floors(each)]
    if not any(values):
        for own, neighbours in zip(grown, expected[AT:], strict=True):
            assert own == pytest.approx([0.25 * rate for rate in neighbours], rel=1e-9)
    assert all(rate >= 0 for own in grown for rate in own)


def _floors(scheduler: LRScheduler) -> list[float]:
    floors = [
        getattr(scheduler, "eta_min", 0),
        getattr(scheduler, "default_min_lr", 0) or 0,
        *getattr(scheduler, "min_lrs", ()),
    ]
    # a change below eps is not made, which a quarter of the rate reaches first
    return [*floors, float(getattr(scheduler, "eps", 0) > 1e-6)]


@pytest.mark.parametrize("make", EACH)
def test_undo_takes_groups_and_entries_out_again(make: Make) -> None:
    model = network()
    optimizer = two_groups(model, KINDS[0])
    scheduler = make(optimizer)
    for _ in range(AT):
        step(optimizer, scheduler)
    before, weights = state(optimizer, [scheduler]), copy.deepcopy(model.state_dict())
    site = find_sites(model, torch.randn(5, 3).double())[0]
    growth = insert(
        model, site, optimizer=optimizer, scheduler=scheduler, new_lr_factor=3.0, lr_factor=0.5, freeze_rest=True
    )
    growth = Growth.from_dict(json.loads(json.dumps(growth.to_dict())))
    undo(model, growth, optimizer=optimizer, scheduler=scheduler)
    assert repr(state(optimizer, [scheduler])) == repr(before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_only_the_new_layer_trains() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    x, y = torch.randn(8, 3).double(), torch.randint(0, 2, (8,))
    nn.functional.cross_entropy(model(x), y).backward()  # a gradient from before must not be stepped along
    model[0].bias.requires_grad_(False)
    growth = insert(model, find_sites(model, x)[0], optimizer=optimizer, freeze_rest=True)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(growth.parameters)
    undo(model, growth, optimizer=optimizer)
    assert not model[0].bias.requires_grad and model[0].weight.requires_grad  # what rested before rests on


def trains(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def fit(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    x, y = torch.randn(8, 3).double(), torch.randint(0, 2, (8,))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def new_in(*growths: Growth) -> set[str]:
    """The names of today, of growths that are all that a model has: places of the first ones may have moved since."""
    names: set[str] = set()
    for growth in growths:
        names = {growth.renames.get(name, name) for name in names} | set(growth.parameters)
    return names


@pytest.mark.parametrize("steps", [0, 3])
def test_all_layers_that_came_to_train_alone_do(steps: int, tmp_path: Path) -> None:
    """LLaMA-Pro by hand: the first block must not rest with an output of zero when the second one comes."""
    torch.manual_seed(0)
    model, x = residual(4), torch.randn(5, 3).double()
    optimizer = AdamW(model.parameters(), lr=0.1)
    before, history = trains(model), History()
    for index in (1, 4):
        history.append(insert(model, find_sites(model, x)[index], optimizer=optimizer, freeze_rest=True))
        assert trains(model) == new_in(*history)
        fit(model, optimizer, steps)
    save_checkpoint(tmp_path / "a", model, optimizer=optimizer, history=history)
    run = load_checkpoint(tmp_path / "a", lambda: residual(4), lambda net: AdamW(net.parameters(), lr=0.1))
    for net, its in ((model, optimizer), (run.model, run.optimizer)):
        assert trains(net) == new_in(*history)
        third = insert(net, find_sites(net, x)[0], optimizer=its, freeze_rest=True)
        assert trains(net) == new_in(*history, third)
        fit(net, its, 2)
        zeros = [name for name in trains(net) if not net.get_parameter(name).any()]
        assert not zeros  # all have trained
        for _ in range(2):
            undo(net, optimizer=its)
            assert not trains(net) & before
        undo(net, optimizer=its)
        assert trains(net) == before


def test_layers_that_have_trained_with_the_rest_rest_with_it() -> None:
    torch.manual_seed(0)
    model, x = residual(4), torch.randn(5, 3).double()
    optimizer = AdamW(model.parameters(), lr=0.1)
    first = insert(model, find_sites(model, x)[1], optimizer=optimizer)
    fit(model, optimizer)
    before = trains(model)
    second = insert(model, find_sites(model, x)[3], optimizer=optimizer)  # has not trained
    third = insert(model, find_sites(model, x)[0], optimizer=optimizer, freeze_rest=True)
    assert trains(model) == new_in(first, second, third) - new_in(
        first, replace(second, parameters=()), replace(third, parameters=())
    )
    undo(model, optimizer=optimizer)
    undo(model, optimizer=optimizer)
    assert trains(model) == before


def test_units_that_have_no_effect_yet_do_not_rest() -> None:
    torch.manual_seed(0)
    model, x = network(), torch.randn(5, 3).double()
    optimizer = AdamW(model.parameters(), lr=0.1)
    insert(model, find_sites(model, x, what="units", units=2)[0], optimizer=optimizer)
    site, before = find_sites(model, x)[0], (copy.deepcopy(model.state_dict()), trains(model), state(optimizer, []))
    with pytest.raises(
        UnsupportedSite, match=r"the units of growth 1 .* have no effect yet, and a part of a parameter"
    ):
        insert(model, site, optimizer=optimizer, freeze_rest=True)
    assert repr((model.state_dict(), trains(model), state(optimizer, []))) == repr(before)
    fit(model, optimizer)
    growth = insert(model, site, optimizer=optimizer, freeze_rest=True)
    assert trains(model) == set(growth.parameters)


def test_only_the_new_layer_trains_after_a_stack_was_copied() -> None:
    """A growth that made several modules is known by one record."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
    model, x = nn.Sequential(nn.Linear(3, 4), *blocks, nn.Linear(4, 2)).double(), torch.randn(5, 3).double()
    insert(model, find_stack_copies(model, x)[0])
    growth = insert(model, find_sites(model, x)[0], freeze_rest=True)
    assert trains(model) == set(growth.parameters)


def test_refusals_change_nothing() -> None:
    class Own(LRScheduler):
        def __init__(self, optimizer: Optimizer) -> None:
            self.heights = [1.0 for _ in optimizer.param_groups]
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            return [base * height for base, height in zip(self.base_lrs, self.heights, strict=True)]

    model = network()
    optimizer = two_groups(model, SGD)
    site = find_sites(model, torch.randn(5, 3).double())[0]
    names, before = list(model.state_dict()), rates(optimizer)
    with pytest.raises(OptimizerError, match="must be a positive number"):
        insert(model, site, optimizer=optimizer, new_lr_factor=0.0)
    with pytest.raises(OptimizerError, match="needs optimizer="):
        insert(model, site, new_lr_factor=0.5)
    scheduler = Own(optimizer)
    with pytest.raises(OptimizerError, match="without the scheduler of SGD"):
        insert(model, site, optimizer=optimizer, new_lr_factor=0.5)
    with pytest.raises(OptimizerError, match=r"Own\.heights is as long a list"):
        insert(model, site, optimizer=optimizer, scheduler=scheduler, new_lr_factor=0.5)
    assert list(model.state_dict()) == names and rates(optimizer) == before

    scheduler = StepLR(optimizer, 3)
    growth = insert(model, site, optimizer=optimizer, scheduler=scheduler, new_lr_factor=0.5)
    optimizer.param_groups[2]["params"].append(nn.Parameter(torch.ones(1)))
    with pytest.raises(OptimizerError, match="not the one that the growth added"):
        undo(model, growth, optimizer=optimizer, scheduler=scheduler)
