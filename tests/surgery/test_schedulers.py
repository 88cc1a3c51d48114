"""Schedulers go on after an insertion, and a learning-rate factor carries through every schedule of torch."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from schedules import AT, EACH, KINDS, SCHEDULERS, STEPS, Make, rates, state, step
from sensli.errors import OptimizerError
from sensli.moves.sites import New
from sensli.surgery.optimizers import leave_groups, plan_joining
from sensli.surgery.rates import RateScaling, plan_rate_scaling


def test_every_scheduler_of_torch_is_among_them() -> None:
    bases = {LRScheduler, lr_scheduler._LRScheduler}
    found = {
        cls.__name__
        for _, cls in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(cls, LRScheduler) and cls not in bases
    }
    assert found == SCHEDULERS.keys() - {"SWALR"}


def setup(kind: Callable[..., Optimizer] = KINDS[0], lr: Any = 0.1) -> tuple[list[nn.Parameter], Optimizer]:
    parameters = [nn.Parameter(torch.ones(2, 2, dtype=torch.float64)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": lr if torch.is_tensor(lr) else lr / 2}]
    return parameters, kind(groups, lr=lr)


@pytest.mark.parametrize("kind", KINDS, ids=["SGD", "AdamW"])
@pytest.mark.parametrize("make", EACH)
def test_a_schedule_goes_on_as_without_growth(make: Make, kind: Callable[..., Optimizer]) -> None:
    _, plain = setup(kind)
    scheduler = make(plain)
    expected = [step(plain, scheduler) for _ in range(STEPS)]

    parameters, grown = setup(kind)
    scheduler = make(grown)
    found = [step(grown, scheduler) for _ in range(AT)]
    new = [New(f"new{i}", nn.Parameter(p.detach().clone()), (p,)) for i, p in enumerate(parameters)]
    plan_joining(grown, new).apply()
    found += [step(grown, scheduler) for _ in range(AT, STEPS - 5)]
    leave_groups(grown, [newcomer.parameter for newcomer in new])
    found += [step(grown, scheduler) for _ in range(5)]
    assert found == expected
    assert scheduler.get_last_lr() == expected[-1]


@pytest.mark.parametrize(("kind", "factor"), list(zip(KINDS, (0.7, 3.0), strict=True)), ids=["SGD", "AdamW"])
@pytest.mark.parametrize("make", EACH)
def test_from_the_scaling_on_a_schedule_is_the_factor_times_what_it_was(
    make: Make, factor: float, kind: Callable[..., Optimizer]
) -> None:
    _, plain = setup(kind)
    scheduler = make(plain)
    expected = [step(plain, scheduler) for _ in range(STEPS)]
    assert len({first for first, _ in expected[AT:]}) > 1  # the schedule does move after the scaling

    _, scaled = setup(kind)
    scheduler = make(scaled)
    found = [step(scaled, scheduler) for _ in range(AT)]
    assert found == expected[:AT]
    plan_rate_scaling(scaled, scheduler, factor).apply(scaled, scheduler)
    assert rates(scaled) == [factor * rate for rate in expected[AT - 1]]
    assert scheduler.get_last_lr() == rates(scaled)
    for before in expected[AT:]:
        now = step(scaled, scheduler)
        assert now == pytest.approx([factor * rate for rate in before], rel=1e-12, abs=1e-16)
        assert scheduler.get_last_lr() == now


def test_floors_are_scaled_with_the_schedule() -> None:
    _, optimizer = setup()
    scheduler = CosineAnnealingLR(optimizer, 10, eta_min=0.02)
    plan_rate_scaling(optimizer, scheduler, 0.5).apply(optimizer, scheduler)
    assert scheduler.eta_min == 0.01
    assert min(step(optimizer, scheduler)[0] for _ in range(10)) == pytest.approx(0.01)

    _, optimizer = setup()
    plateau = ReduceLROnPlateau(optimizer, patience=0, min_lr=0.04, eps=1e-4)
    plan_rate_scaling(optimizer, plateau, 0.5).apply(optimizer, plateau)
    assert (plateau.min_lrs, plateau.default_min_lr, plateau.eps) == ([0.02, 0.02], 0.02, 5e-5)
    assert [step(optimizer, plateau) for _ in range(4)][-1] == [0.02, 0.02]


@pytest.mark.parametrize(("factor", "through_json"), [(0.7, False), (1 / 3, True), (1.1, False)])
@pytest.mark.parametrize("make", EACH)
def test_reverting_at_once_restores_every_bit(make: Make, factor: float, through_json: bool) -> None:
    _, optimizer = setup()
    scheduler = make(optimizer)
    for _ in range(AT):
        step(optimizer, scheduler)
    before = state(optimizer, [scheduler])
    scaling = plan_rate_scaling(optimizer, scheduler, factor)
    assert repr(state(optimizer, [scheduler])) == repr(before)  # a plan changes nothing
    scaling.apply(optimizer, scheduler)
    assert repr(state(optimizer, [scheduler])) != repr(before)
    if through_json:
        again = RateScaling.from_dict(json.loads(json.dumps(scaling.to_dict())))
        assert again == scaling
        scaling = again
    scaling.revert(optimizer, scheduler)
    assert repr(state(optimizer, [scheduler])) == repr(before)


@pytest.mark.parametrize("make", EACH)
def test_reverting_after_some_steps_brings_the_old_schedule_back(make: Make) -> None:
    _, plain = setup()
    scheduler = make(plain)
    expected = [step(plain, scheduler) for _ in range(STEPS)]

    _, optimizer = setup()
    scheduler = make(optimizer)
    for _ in range(AT):
        step(optimizer, scheduler)
    scaling = plan_rate_scaling(optimizer, scheduler, 0.7)
    scaling.apply(optimizer, scheduler)
    for _ in range(9):
        step(optimizer, scheduler)
    scaling.revert(optimizer, scheduler)
    assert rates(optimizer) == pytest.approx(expected[AT + 8], rel=1e-12)
    for rest in expected[AT + 9 :]:
        assert step(optimizer, scheduler) == pytest.approx(rest, rel=1e-12, abs=1e-16)


def test_reverting_in_another_process() -> None:
    """The rates come back in objects made anew from saved states, with the record read from JSON."""
    _, optimizer = setup()
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer, 0.1), CosineAnnealingLR(optimizer, 9)], [5])
    step(optimizer, scheduler)
    before = state(optimizer, [scheduler])
    scaling = plan_rate_scaling(optimizer, scheduler, 0.7)
    scaling.apply(optimizer, scheduler)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    record = json.dumps(scaling.to_dict())

    _, fresh = setup()
    resumed = SequentialLR(fresh, [LinearLR(fresh, 0.1), CosineAnnealingLR(fresh, 9)], [5])
    fresh.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    RateScaling.from_dict(json.loads(record)).revert(fresh, resumed)
    assert repr(state(fresh, [resumed])) == repr(before)


def test_scaling_twice_and_reverting_in_turn_is_exact() -> None:
    _, optimizer = setup()
    scheduler = CosineAnnealingLR(optimizer, 10)
    before = state(optimizer, [scheduler])
    scalings = []
    for factor in (0.7, 0.3):
        scalings.append(plan_rate_scaling(optimizer, scheduler, factor))
        scalings[-1].apply(optimizer, scheduler)
    for scaling in reversed(scalings):
        scaling.revert(optimizer, scheduler)
    assert repr(state(optimizer, [scheduler])) == repr(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [None, *(p for p in EACH if p.id in ("LambdaLR-0", "StepLR-0", "CyclicLR-0"))])
def test_a_rate_that_is_a_tensor_is_scaled_in_place_and_once(make: Make | None, dtype: torch.dtype) -> None:
    # torch lets groups without a rate of their own share the one tensor given: scaled per group, it would be squared.
    shared = torch.tensor(0.1, dtype=dtype)
    parameters = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    optimizer = SGD([{"params": [p]} for p in parameters], lr=shared, momentum=0.9)
    scheduler = make(optimizer) if make else None
    tensors = [group["lr"] for group in optimizer.param_groups]
    assert tensors[0] is tensors[1]
    old, before = shared.clone(), state(optimizer, [scheduler] if scheduler else [])
    scaling = plan_rate_scaling(optimizer, scheduler, 0.7)
    scaling.apply(optimizer, scheduler)
    assert all(group["lr"] is shared for group in optimizer.param_groups)
    torch.testing.assert_close(shared, old * 0.7)
    RateScaling.from_dict(json.loads(json.dumps(scaling.to_dict()))).revert(optimizer, scheduler)
    assert repr(state(optimizer, [scheduler] if scheduler else [])) == repr(before)
    assert torch.equal(shared, old)
    scaling.apply(optimizer, scheduler)
    shared.mul_(0.5)
    scaling.revert(optimizer, scheduler)
    torch.testing.assert_close(shared, old * 0.5)


def test_a_float32_rate_comes_back_to_the_bit_whatever_it_is() -> None:
    lrs = [torch.tensor(0.001 * i, dtype=torch.float32) for i in range(1, 200)]
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs])
    before = rates(optimizer)
    scaling = plan_rate_scaling(optimizer, None, 0.7)
    scaling.apply(optimizer)
    assert rates(optimizer) != before
    scaling.revert(optimizer)
    assert rates(optimizer) == before


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name not in ("ReduceLROnPlateau", "OneCycleLR")])
def test_schedules_of_tensor_rates_are_scaled_too(name: str) -> None:
    make = SCHEDULERS[name][0]

    def run(factor: float) -> list[list[float]]:
        parameters = [nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
        lrs = [torch.tensor(rate, dtype=torch.float64) for rate in (0.1, 0.05)]
        optimizer = SGD([{"params": [p], "lr": lr} for p, lr in zip(parameters, lrs, strict=True)], momentum=0.9)
        scheduler = make(optimizer)
        for _ in range(AT):
            step(optimizer, scheduler)
        plan_rate_scaling(optimizer, scheduler, factor).apply(optimizer, scheduler)
        found = [step(optimizer, scheduler) for _ in range(AT, STEPS)]
        assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, lrs, strict=True))
        return found

    for one, scaled in zip(run(1.0), run(0.7), strict=True):
        assert scaled == pytest.approx([0.7 * rate for rate in one], rel=1e-12, abs=1e-16)


def test_a_kept_state_dict_does_not_change_with_the_scaling() -> None:
    _, optimizer = setup()
    scheduler = StepLR(optimizer, 3)
    kept = scheduler.state_dict()
    copied = copy.deepcopy(kept)
    plan_rate_scaling(optimizer, scheduler, 0.7).apply(optimizer, scheduler)
    assert kept == copied


def test_without_a_scheduler_all_groups_of_all_optimizers_are_scaled() -> None:
    optimizers = [setup()[1], setup(AdamW, 0.2)[1], Adagrad([nn.Parameter(torch.ones(1))], lr=1)]
    scaling = plan_rate_scaling(optimizers, None, 0.5)
    scaling.apply(optimizers)
    assert [rates(each) for each in optimizers] == [[0.05, 0.025], [0.1, 0.05], [0.5]]
    scaling.revert(optimizers)
    assert [rates(each) for each in optimizers] == [[0.1, 0.05], [0.2, 0.1], [1]]
    assert type(optimizers[2].param_groups[0]["lr"]) is int


def test_several_optimizers_with_a_scheduler_each() -> None:
    (_, a), (_, b) = setup(), setup(AdamW)
    schedulers = [StepLR(b, 2), CosineAnnealingLR(a, 10)]
    plan_rate_scaling([a, b], schedulers, 0.5).apply([a, b], schedulers)
    assert schedulers[0].base_lrs == schedulers[1].base_lrs == [0.05, 0.025]


def test_a_factor_of_one_changes_nothing_and_needs_no_scheduler() -> None:
    _, optimizer = setup()
    scheduler = StepLR(optimizer, 3)
    before = state(optimizer, [scheduler])
    scaling = plan_rate_scaling(optimizer, None, 1)
    assert scaling == RateScaling(1.0)
    scaling.apply(optimizer)
    scaling.revert(optimizer)
    assert repr(state(optimizer, [scheduler])) == repr(before)
    plan_rate_scaling(None, None, 0.5).apply(None)


def test_a_wrapped_scheduler_is_unwrapped() -> None:
    class Wrapper:
        def __init__(self, scheduler: LRScheduler) -> None:
            self.scheduler = scheduler

    _, optimizer = setup()
    scheduler = StepLR(optimizer, 3)
    plan_rate_scaling(optimizer, Wrapper(scheduler), 0.5).apply(optimizer, Wrapper(scheduler))  # type: ignore[arg-type]
    assert scheduler.base_lrs == [0.05, 0.025]


@pytest.mark.parametrize("factor", [0, -0.5, math.inf, math.nan, "0.5", None])
def test_a_factor_must_be_a_positive_number(factor: Any) -> None:
    with pytest.raises(OptimizerError, match="positive number"):
        plan_rate_scaling(setup()[1], None, factor)


def test_errors_leave_all_rates_as_they_were() -> None:
    (_, optimizer), (_, other) = setup(), setup()
    scheduler, foreign = StepLR(optimizer, 3), StepLR(other, 3)
    before = state(optimizer, [scheduler, foreign])
    with pytest.raises(OptimizerError, match=r"SGD cannot be scaled by 0\.7 without its scheduler.*Pass scheduler="):
        plan_rate_scaling(optimizer, None, 0.7)
    with pytest.raises(OptimizerError, match="StepLR drives an optimizer"):
        plan_rate_scaling(optimizer, [scheduler, foreign], 0.7)
    with pytest.raises(OptimizerError, match="without its scheduler"):
        plan_rate_scaling([optimizer, other], scheduler, 0.7)
    with pytest.raises(OptimizerError, match=r"must be .*, got '"):
        plan_rate_scaling(optimizer, "cosine", 0.7)  # type: ignore[arg-type]
    with pytest.raises(OptimizerError, match=r"must be .*, got \d"):
        plan_rate_scaling(0.1, None, 0.7)  # type: ignore[arg-type]
    assert repr(state(optimizer, [scheduler, foreign])) == repr(before)

    scaling = plan_rate_scaling(optimizer, scheduler, 0.7)
    scaling.apply(optimizer, scheduler)
    after = state(optimizer, [scheduler])
    with pytest.raises(OptimizerError, match="base_lrs of scheduler 0 is missing"):
        scaling.revert(optimizer)
    with pytest.raises(OptimizerError, match="lr of optimizer 0 is missing"):
        scaling.revert(None, scheduler)
    with pytest.raises(OptimizerError, match="base_lrs of scheduler 0 is missing"):
        scaling.revert(optimizer, ReduceLROnPlateau(optimizer))
    assert repr(state(optimizer, [scheduler])) == repr(after)
