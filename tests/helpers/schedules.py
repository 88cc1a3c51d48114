"""Every scheduler of torch, and a training step that shows its rates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

Make = Callable[[Optimizer], LRScheduler]


STEPS, AT = 40, 13


SCHEDULERS: dict[str, list[Make]] = {
    "LambdaLR": [
        lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
        lambda o: LambdaLR(o, [lambda t: 0.9**t, lambda t: 1.0]),
    ],
    "MultiplicativeLR": [lambda o: MultiplicativeLR(o, lambda t: 0.9)],
    "StepLR": [lambda o: StepLR(o, 5)],
    "MultiStepLR": [lambda o: MultiStepLR(o, [3, 20, 30])],
    "ConstantLR": [lambda o: ConstantLR(o, 0.5, 20)],
    "LinearLR": [lambda o: LinearLR(o, 0.1, total_iters=20)],
    "ExponentialLR": [lambda o: ExponentialLR(o, 0.9)],
    "PolynomialLR": [lambda o: PolynomialLR(o, 30, 2.0)],
    "CosineAnnealingLR": [lambda o: CosineAnnealingLR(o, 10), lambda o: CosineAnnealingLR(o, 10, eta_min=0.02)],
    "CosineAnnealingWarmRestarts": [lambda o: CosineAnnealingWarmRestarts(o, 4, 2, eta_min=0.01)],
    "CyclicLR": [
        lambda o: CyclicLR(o, 0.01, 0.2, step_size_up=5),
        lambda o: CyclicLR(o, [0.01, 0.02], [0.2, 0.3], 4, 3, mode="triangular2"),
        lambda o: CyclicLR(o, 0.01, 0.2, 4, mode="exp_range", gamma=0.9, cycle_momentum=False),
    ],
    "OneCycleLR": [
        lambda o: OneCycleLR(o, 0.5, total_steps=STEPS + 1),
        lambda o: OneCycleLR(o, [0.5, 0.2], total_steps=STEPS + 1, three_phase=True, anneal_strategy="linear"),
    ],
    "ReduceLROnPlateau": [
        lambda o: ReduceLROnPlateau(o, patience=5),
        lambda o: ReduceLROnPlateau(o, patience=5, factor=0.5, min_lr=0.01),
        lambda o: ReduceLROnPlateau(o, patience=5, factor=0.5, min_lr=[0.01, 0.02], eps=1e-2),
    ],
    "SequentialLR": [
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 20, 0.01)], [5]),
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=20), StepLR(o, 3), ExponentialLR(o, 0.9)], [20, 30]),
    ],
    "ChainedScheduler": [
        lambda o: ChainedScheduler([ConstantLR(o, 0.1, 20), ExponentialLR(o, 0.9)]),
        lambda o: ChainedScheduler([
            SequentialLR(o, [LinearLR(o, 0.5, total_iters=18), MultiplicativeLR(o, lambda t: 0.9)], [18]),
            StepLR(o, 7, 0.5),
        ]),
    ],
    "SWALR": [lambda o: SWALR(o, 0.01, anneal_epochs=20), lambda o: SWALR(o, [0.01, 0.3], 20, "linear")],
}  # fmt: skip


EACH = [pytest.param(make, id=f"{name}-{i}") for name, makes in SCHEDULERS.items() for i, make in enumerate(makes)]


# Optimizers with and without a momentum for CyclicLR and OneCycleLR to cycle.
KINDS: list[Callable[..., Optimizer]] = [lambda groups, lr: SGD(groups, lr=lr, momentum=0.9), AdamW]


def step(optimizer: Optimizer, scheduler: LRScheduler | None) -> list[float]:
    """One training step on the parameters' squares; the rates after it. The metric never improves."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = 2 * parameter.detach()
    optimizer.step()
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(1.0)
    elif scheduler is not None:
        scheduler.step()
    return rates(optimizer)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def state(optimizer: Optimizer, schedulers: list[LRScheduler]) -> Any:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    held = [
        {key: value for key, value in vars(each).items() if key not in ("optimizer", "_schedulers")}
        for outer in schedulers
        for each in (outer, *getattr(outer, "_schedulers", ()))
    ]
    return copy.deepcopy((groups, held))
