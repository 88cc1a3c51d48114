"""Computing what is missing; each result is on disk before it is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sensli.text.terminal import Reach, progress
from sensli_lab.paper.engine import TrainingJob, TrainingOutcome, engine
from sensli_lab.paper.machine import Machine
from sensli_lab.paper.planning import Plan
from sensli_lab.paper.settings import Settings
from sensli_lab.paper.store import Store, origin

# ---- The work of an experiment in pieces: which runs are trained together, from where, and what becomes of the outcome.


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


def job_of(piece: Piece, store: Store, machine: Machine) -> TrainingJob:
    """A piece with what the store knows of it by now."""
    plan, arm, runs = piece.plan, piece.arm, piece.runs
    kept = store.load_state(plan, arm, runs)
    if kept is None or kept["runs"] != runs:  # left by another choice of runs
        kept = {"engine": None, "seconds": 0.0}
    grown = store.recorded(plan, plan.grown(arm), runs[0]) if piece.settings.from_start else None
    return TrainingJob(
        piece.settings, plan.seed, tuple(runs), kept["engine"], machine=machine, grown=grown, seconds=kept["seconds"]
    )


def train(job: TrainingJob) -> TrainingOutcome:
    """Train from the start or from the job's state; what is saved can be given to `Store.save_state`."""
    began = time.perf_counter()

    def spent() -> float:
        return job.seconds + time.perf_counter() - began

    def save(state: dict[str, Any]) -> None:
        job.save({"engine": state, "seconds": spent(), "runs": list(job.runs)})

    outcome = engine(job.settings).train(replace(job, save=save))
    known = origin(job.settings, job.machine)
    return replace(outcome, seconds=spent(), origin=known, resumed=job.state is not None)


def keep(piece: Piece, outcome: TrainingOutcome, store: Store, where: str = "") -> None:
    """Store what a training gave, and report it in one line."""
    store.save(piece.plan, piece.arm, piece.runs, outcome)
    print(f"{piece}, {outcome.seconds:.1f} s{where}{', resumed' if outcome.resumed else ''}")


Compute = Callable[[Store, Reach], None]
# Where the work is done: checks that it can be done there, and gives the function that does it.
Place = Callable[[Sequence[Piece], Machine], AbstractContextManager[Compute]]


@contextmanager
def here(work: Sequence[Piece], machine: Machine) -> Iterator[Compute]:
    """In this process, one piece after another."""
    for piece in work:
        engine(piece.settings).ready(piece.settings, machine)

    def compute(store: Store, reach: Reach) -> None:
        before = 0.0
        for piece in work:
            _compute(piece, store, machine, reach, before)
            before += piece.cost

    yield compute


def run(
    plans: Sequence[Plan],
    store: Store,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
    place: Place = here,
) -> int:
    """Compute all that is missing and return how many pieces that were. May be interrupted at any moment."""
    store.check_writable()
    damaged = [bad for plan in plans for arm in plan.arms for bad in store.parts(plan, arm)[1]]
    work = pieces(plans, store)
    if not work:
        return 0
    with place(work, machine) as compute, progress("computing", sum(piece.cost for piece in work)) as reach:
        for path, reason in damaged:
            print(f"{path}: damaged ({reason}); computing these runs again")
            store.discard(path)
        compute(store, reach)
    return len(work)


def _compute(piece: Piece, store: Store, machine: Machine, reach: Reach, before: float) -> None:
    reach(before, str(piece))
    job = replace(
        job_of(piece, store, machine),
        save=lambda state: store.save_state(piece.plan, piece.arm, piece.runs, state),
        tell=lambda share: reach(before + share * piece.cost, str(piece)),
    )
    keep(piece, train(job), store)
