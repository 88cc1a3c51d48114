"""Computing what is missing: arm by arm, each result on disk before the next begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sensli.paper.config import Plan
from sensli.paper.engines import Job, engine
from sensli.paper.machine import Machine
from sensli.paper.progress import Progress, progress
from sensli.paper.store import Store


@dataclass(frozen=True)
class Piece:
    """Runs of one arm that are trained together."""

    plan: Plan
    arm: str
    runs: list[int]
    cost: float  # estimated seconds

    def __str__(self) -> str:
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        if len(self.runs) == 1 and self.plan.runs > 1:
            runs = f"run {self.runs[0] + 1} of {self.plan.runs}"
        return f"experiment {self.plan.experiment.name} ({self.plan.words}), {self.arm}: {runs}"


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


def run(plans: Sequence[Plan], store: Store, machine: Machine = Machine()) -> int:  # noqa: B008 (frozen)
    """Compute all that is missing and return how many pieces that were. May be stopped at any moment."""
    store.check_writable()
    damaged = [bad for plan in plans for arm in plan.arms for bad in store.parts(plan, arm)[1]]
    work = pieces(plans, store)
    for piece in work:
        settings = piece.plan.arms[piece.arm]
        engine(settings).ready(settings, machine)
    with progress(sum(piece.cost for piece in work)) as bar:
        for path, reason in damaged:
            bar.note(f"{path}: damaged ({reason}); computing these runs again")
            store.discard(path)
        for piece in work:
            _compute(piece, store, bar, machine)
    return len(work)


def _compute(piece: Piece, store: Store, bar: Progress, machine: Machine) -> None:
    plan, arm, runs = piece.plan, piece.arm, piece.runs
    bar.start(str(piece), piece.cost)
    state = store.load_state(plan, arm, runs)
    if state is not None and state["runs"] != runs:
        state = None  # left by another choice of runs
    before = state["seconds"] if state else 0.0
    began = time.perf_counter()

    def spent() -> float:
        return float(before) + time.perf_counter() - began

    def save(inner: dict[str, Any]) -> None:
        store.save_state(plan, arm, runs, {"engine": inner, "seconds": spent(), "runs": runs})

    inner = state["engine"] if state else None
    grown = store.recorded(plan, plan.grown(arm), runs[0]) if plan.arms[arm].from_start else None
    job = Job(plan.arms[arm], plan.seed, tuple(runs), inner, save, bar.advance, machine, grown)
    outcome = engine(plan.arms[arm]).train(job)
    store.save(plan, arm, runs, outcome, spent(), machine)
    went_on = ", went on from where it was stopped" if state else ""
    bar.note(f"{piece}, {spent():.1f} s{went_on}")
