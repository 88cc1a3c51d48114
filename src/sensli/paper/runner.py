"""Computing what is missing: arm by arm, each result on disk before the next begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sensli.paper.config import Plan
from sensli.paper.engines import Job, engine
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
        return f"experiment {self.plan.experiment.name} ({self.plan.recipe}), {self.arm}: {runs}"


def pieces(plans: Sequence[Plan], store: Store) -> list[Piece]:
    """What the store lacks, in the order in which it will be computed."""
    work = []
    for plan in plans:
        for arm, settings in plan.arms.items():
            machine = engine(settings)
            missing = store.missing(plan, arm)
            step = machine.AT_ONCE or max(len(missing), 1)
            for start in range(0, len(missing), step):
                runs = missing[start : start + step]
                work.append(Piece(plan, arm, runs, machine.estimate(settings, len(runs))))
    return work


def run(plans: Sequence[Plan], store: Store) -> int:
    """Compute all that is missing and return how many pieces that were. May be stopped at any moment."""
    store.check_writable()
    damaged = [bad for plan in plans for arm in plan.arms for bad in store.parts(plan, arm)[1]]
    work = pieces(plans, store)
    with progress(sum(piece.cost for piece in work)) as bar:
        for path, reason in damaged:
            bar.note(f"{path}: damaged ({reason}); computing these runs again")
            store.discard(path)
        for piece in work:
            _compute(piece, store, bar)
    return len(work)


def _compute(piece: Piece, store: Store, bar: Progress) -> None:
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
    job = Job(plan.arms[arm], plan.seed, tuple(runs), inner, save, bar.advance)
    outcome = engine(plan.arms[arm]).train(job)
    store.save(plan, arm, runs, outcome, spent())
    went_on = ", went on from where it was stopped" if state else ""
    bar.note(f"{piece}, {spent():.1f} s{went_on}")
