"""GradMax's student and teacher: a network of one hidden layer learns from another one that has twice as many units.

The teacher is 10-10-10 without biases, its weights uniform in [-1, 1]; the student begins with 5 units. Growth by one unit at a time. The
publication's student has no biases either, and a ReLU with the slope 1 at 0. torch's has the slope 0 there, so GradMax, whose rows begin at
zero, needs a bias of a rounding error: students have biases, for all methods.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from sensli_lab.compare.methods import at_shares, when_triggered
from sensli_lab.compare.task import Task, TaskData, TaskPart, plain_network, sizes_of
from sensli_lab.paper.machine import generator

FEATURES, HIDDEN, SAMPLES = 10, 10, 1000


def student(units: int, layers: int = 1) -> nn.Module:
    """A plain network on the inputs."""
    return plain_network(FEATURES, units, layers, FEATURES)


def load_samples(folder: Path | None, seed: int) -> TaskData:
    """Inputs of the normal distribution, and what the teacher of this seed makes of them."""
    source = generator(seed, 0, "teacher")
    first, last = (2 * torch.rand(FEATURES, HIDDEN, generator=source, device=source.device) - 1 for _ in range(2))

    def part() -> TaskPart:
        x = torch.randn(SAMPLES, FEATURES, generator=source, device=source.device)
        return TaskPart(x, (x @ first).relu() @ last)

    return TaskData(part(), part(), part())


TEACHER = Task(
    name="teacher",
    title="student and teacher, 10 inputs, 10 outputs",
    sizes=sizes_of(student, small=(5,), middle=(7,), deep=(5, 3), large=(10,)),
    load=load_samples,
    example=((FEATURES,), torch.float32),
    loss=mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    recipe="SGD 0.1",
    batch=None,
    steps=1500,
    looks=(0.1, 0.2, 0.3, 0.4, 0.5),
    units=1,
    looked_at=SAMPLES,
    counts_errors=False,
)

_UNITS: dict[str, Any] = {"what": "units", "select": "largest"}
_ONE = "a unit where its merit is largest, five times"
_SLOWLY = "as units, the updates of new units warm up for 100 steps"

STUDENT = replace(
    TEACHER,
    arms=(
        *(
            at_shares("units", _ONE, *percents, **_UNITS)
            for percents in ((1, 2, 3, 4, 5), (2, 5, 10, 15, 20), (10, 20, 30, 40, 50))
        ),
        at_shares("once", "five units at once", 5, **{**_UNITS, "units": 5}),
        at_shares("warmup", _SLOWLY, 2, 5, 10, 15, 20, what="units", warmup=100),
        when_triggered("saturating", "a unit, when the loss is near the end that its curve tells", what="units"),
        when_triggered("slow", "a unit, when training on brings little for its FLOPs", what="units"),
    ),
    name="student",
    title="student and teacher, 10 inputs, 10 outputs, long",
    steps=10_000,
    warmup=0.01,
    decay=0.2,
    calls=200,
    until=0.8,
    long=True,
)
