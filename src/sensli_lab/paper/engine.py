"""What an engine is: it trains some runs of one arm and hands back their curves and growths.

The runner, the store, the figures and the report know engines only through this file; a new kind of network needs a
module with `AT_ONCE` and the functions of `Engine`, and a line in `ENGINES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sensli.errors import SensliError, brief_text
from sensli_lab.errors import BadExperiment, StoreError
from sensli_lab.paper.machine import Machine
from sensli_lab.paper.reading import unknown_name
from sensli_lab.paper.settings import Settings
from sensli_lab.work.workers import Save, Tell, ignore

SHOWN = 3  # iterations after an insertion whose gradient of the new weights is kept for the heatmaps
ENGINES = {"stacked": "sensli_lab.paper.stacked", "cnn": "sensli_lab.paper.cnn"}


@dataclass(frozen=True)
class TrainingJob:
    """Everything that a training needs, in this process or on another machine: what to train, where to resume, whom to tell."""

    settings: Settings
    seed: int
    runs: tuple[int, ...]
    state: dict[str, Any] | None = None  # what `save` was last given, after an interruption
    save: Save = ignore
    tell: Tell = ignore  # the share that is done, 0 to 1
    machine: Machine = Machine()  # noqa: RUF009 (frozen)
    grown: dict[str, Tensor] | None = None  # what the arm recorded whose grown network this one trains from scratch
    seconds: float = 0.0  # spent before the interruption
    save_every: float = 5.0  # seconds


@dataclass(frozen=True)
class TrainingOutcome:
    """Results of some runs. Every tensor in `runs` has the runs in front; `axes` are shared by all runs.

    Curves share the axis `iteration`: `train_loss`, `test_loss`, `test_error`. Insertions have `place`, `merits`,
    `ratios`, `dead` (units at the chosen place) and `new_gradient`; `gradient_norm` only where it was asked for. An engine
    whose cost means something adds `seconds` and `flops` (both summed up, by epoch); place -1: nothing has grown.
    The time it took and where it comes from are not the engine's to say: `runner.train_piece` fills them in.
    """

    runs: dict[str, Tensor]
    axes: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    origin: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False


@dataclass(frozen=True)
class Counts:
    """Exact counts of an arm: parameters before the first and after each insertion, FLOPs per training sample."""

    parameters: tuple[int, ...]
    flops: int
    measuring: int
    flops_printed: int | None = None  # by the paper's count of places, where that differs
    measuring_printed: int | None = None


class Engine(Protocol):
    """How many runs are trained together (None: all), and the five functions."""

    AT_ONCE: int | None

    def check_settings(self, settings: Settings) -> None: ...

    def check_machine(self, settings: Settings, machine: Machine) -> None: ...

    def estimate_seconds(self, settings: Settings, runs: int) -> float: ...

    def count_arm(self, settings: Settings, accepted: tuple[int, ...] | None = None) -> Counts: ...

    def train_runs(self, job: TrainingJob) -> TrainingOutcome: ...


def engine(settings: Settings) -> Engine:
    name = settings.engine
    if name not in ENGINES:
        raise BadExperiment(unknown_name("engine", name, ENGINES))
    module = cast(Engine, importlib.import_module(ENGINES[name]))
    module.check_settings(settings)
    return module


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A record in which nothing is known yet."""
    return torch.full(shape, float("nan"), dtype=dtype, device="cpu")


# ---- Resuming from the state of an interrupted training: one with the right checksum may still come from other code.


@contextmanager
def resuming() -> Iterator[None]:
    """Say what to do about a state that cannot be used."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, SensliError) as error:
        why = " ".join(str(error).split())
        raise StoreError(
            f"the state of an interrupted training cannot be used ({type(error).__name__}: {why}). Delete the files unfinished-*.pt in "
            "the results folder and run the same command again."
        ) from error


def check_like(saved: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Raise unless the saved tensors are such as this training has."""
    if saved.keys() != mine.keys():
        raise ValueError(f"its records are {sorted(saved)}, expected {sorted(mine)}")
    for name, value in saved.items():
        if value.shape != mine[name].shape or value.dtype != mine[name].dtype:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, expected {tuple(mine[name].shape)}")


def check_count(value: Any, most: int) -> int:
    """Raise unless it is a whole number from 0."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"a count must be a whole number from 0 to {most}, got {brief_text(value)}")
    return value
