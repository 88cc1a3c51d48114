"""The work of an experiment in pieces: what one training needs, and what it gives.

An order carries all that a piece needs, so that it can be trained in this process or on another machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sensli.paper.config import Plan, Settings
from sensli.paper.engines import Job, Outcome, engine
from sensli.paper.machine import Machine
from sensli.paper.origin import origin
from sensli.paper.store import Store


@dataclass(frozen=True)
class Piece:
    """Runs of one arm that are trained together."""

    plan: Plan
    arm: str
    runs: list[int]
    cost: float  # estimated seconds

    @property
    def settings(self) -> Settings:
        return self.plan.arms[self.arm]

    def needs(self, other: Piece) -> bool:
        """Whether this piece trains the network that the other one grows."""
        if not self.settings.from_start or other.plan is not self.plan or other.arm != self.plan.grown(self.arm):
            return False
        return self.runs[0] in other.runs

    def __str__(self) -> str:
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        if len(self.runs) == 1 and self.plan.runs > 1:
            runs = f"run {self.runs[0] + 1} of {self.plan.runs}"
        return f"experiment {self.plan.experiment.name} ({self.plan.words}), {self.arm}: {runs}"


@dataclass(frozen=True)
class Order:
    settings: Settings
    seed: int
    runs: tuple[int, ...]
    machine: Machine
    state: dict[str, Any] | None  # where a stopped training of these runs was
    grown: dict[str, Tensor] | None


@dataclass(frozen=True)
class Done:
    outcome: Outcome
    seconds: float
    origin: dict[str, Any]
    went_on: bool


def pieces(plans: Sequence[Plan], store: Store) -> list[Piece]:
    """What the store lacks, in the order in which it will be computed."""
    work = []
    for plan in plans:
        own = []
        for arm, settings in plan.arms.items():
            machine = engine(settings)
            missing = store.missing(plan, arm)
            step = machine.AT_ONCE or max(len(missing), 1)
            for start in range(0, len(missing), step):
                runs = missing[start : start + step]
                own.append(Piece(plan, arm, runs, machine.estimate(settings, len(runs))))
        # run by run, not arm by arm: what is stopped early has pairs to compare, and a busy hour hits all arms alike
        work += sorted(own, key=lambda piece: piece.runs[0])
    return work


def order(piece: Piece, store: Store, machine: Machine) -> Order:
    """What the store knows of a piece by now."""
    plan, arm, runs = piece.plan, piece.arm, piece.runs
    state = store.load_state(plan, arm, runs)
    if state is not None and state["runs"] != runs:
        state = None  # left by another choice of runs
    grown = store.recorded(plan, plan.grown(arm), runs[0]) if piece.settings.from_start else None
    return Order(piece.settings, plan.seed, tuple(runs), machine, state, grown)


def train(given: Order, save: Callable[[dict[str, Any]], None], tell: Callable[[float], None], **timing: float) -> Done:
    """Train from the start or from the order's state; `timing` goes to the job (`save_every`)."""
    before = float(given.state["seconds"]) if given.state else 0.0
    began = time.perf_counter()

    def spent() -> float:
        return before + time.perf_counter() - began

    def save_all(inner: dict[str, Any]) -> None:
        save({"engine": inner, "seconds": spent(), "runs": list(given.runs)})

    inner = given.state["engine"] if given.state else None
    job = Job(given.settings, given.seed, given.runs, inner, save_all, tell, given.machine, given.grown, **timing)
    outcome = engine(given.settings).train(job)
    return Done(outcome, spent(), origin(given.settings, given.machine), given.state is not None)


def keep(piece: Piece, done: Done, store: Store, where: str = "") -> None:
    """Store what a training gave, and say so in one line."""
    store.save(piece.plan, piece.arm, piece.runs, done.outcome, done.seconds, done.origin)
    went_on = ", resumed" if done.went_on else ""
    print(f"{piece}, {done.seconds:.1f} s{where}{went_on}")
