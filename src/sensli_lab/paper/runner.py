"""Computing what is missing; each result is on disk before it is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sensli.cli.terminal import progress
from sensli_lab.errors import BadExperiment
from sensli_lab.paper.engine import TrainingJob, TrainingOutcome, engine
from sensli_lab.paper.machine import Machine
from sensli_lab.paper.planning import Plan
from sensli_lab.paper.settings import Settings
from sensli_lab.paper.store import Store
from sensli_lab.work.store import provenance
from sensli_lab.work.workers import HERE, Place, Save, Tell, WorkCall, Workers

Share = Callable[[Settings], tuple[Machine, int, int]]


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
        if not self.settings.from_start or other.plan is not self.plan or other.arm != self.plan.grown_arm(self.arm):
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
                own.append(Piece(plan, arm, runs, machine.estimate_seconds(settings, len(runs))))
        # run by run, not arm by arm: what is stopped early has pairs to compare, and a busy hour hits all arms alike
        work += sorted(own, key=lambda piece: piece.runs[0])
    return work


def train_piece(job: TrainingJob) -> TrainingOutcome:
    """Train from the start or from the job's state; what is saved can be given to `Store.save_state`."""
    began = time.perf_counter()

    def spent() -> float:
        return job.seconds + time.perf_counter() - began

    def save(state: dict[str, Any]) -> None:
        job.save({"engine": state, "seconds": spent(), "runs": list(job.runs)})

    outcome = engine(job.settings).train_runs(replace(job, save=save))
    device = {"device": str(job.machine)} if job.settings.engine == "cnn" else {}
    return replace(outcome, seconds=spent(), origin={**provenance(), **device}, resumed=job.state is not None)


def compute_job(job: TrainingJob, tell: Tell, save: Save) -> TrainingOutcome:
    """What a worker does."""
    check_jobs([job], tell, save)
    tell(0.0)
    return train_piece(replace(job, tell=tell, save=save))


def check_jobs(jobs: Sequence[TrainingJob], tell: Tell, save: Save) -> None:
    """Find out what is missing (a device, the images), before the first hour of work."""
    for job in jobs:
        engine(job.settings).check_machine(job.settings, job.machine)


def _shares(pieces: Sequence[Piece], machine: Machine, workers: Workers) -> Share:
    """Machine, CPUs and GPUs of a piece by its settings. What is not available is refused here, since Ray would wait for it forever."""
    if not workers.nodes:
        return lambda settings: (machine, 1, 0)
    total, graphics = (int(sum(node.get(kind, 0) for node in workers.nodes)) for kind in ("CPU", "GPU"))
    if machine.device == "cuda" and not graphics:
        raise BadExperiment(
            "--device cuda is not available: no machine of this Ray has a GPU. Leave the option out, or add a machine that has one."
        )
    # All runs count, not only the missing ones: a resumed run should have as many threads as before.
    plans = {id(piece.plan): piece.plan for piece in pieces}.values()
    runs = sum(one.runs for one in plans for settings in one.arms.values() if engine(settings).AT_ONCE)
    data = machine.data.absolute() if machine.data else None
    on_gpu = graphics > 0 and machine.device in ("auto", "cuda")
    largest = int(max(node.get("CPU", 0) for node in workers.nodes))
    even = min(max(total // (graphics if on_gpu else max(runs, 1)), 1), largest)
    alone = Machine(data, "cuda" if on_gpu else machine.device, machine.compile), workers.cpus or even, int(on_gpu)
    together = Machine(data, "cpu", machine.compile), workers.cpus or 1, 0
    return lambda settings: alone if engine(settings).AT_ONCE else together


@dataclass
class Pieces:
    """The pieces as work. An arm is not split: a stack of thirty small networks takes hardly longer than one of five."""

    items: Sequence[Piece]
    store: Store
    share: Share
    save_every: float | None

    def check(self, workers: Workers) -> None:
        alone = dict.fromkeys(piece.settings for piece in self.items if engine(piece.settings).AT_ONCE)
        jobs = [TrainingJob(settings, 0, (), machine=self.share(settings)[0]) for settings in alone]
        if jobs:
            _, cpus, gpus = self.share(jobs[0].settings)
            workers.ask("before the first run", WorkCall(check_jobs, jobs, cpus, gpus, workers.may_fetch))

    def call(self, piece: Piece) -> WorkCall:
        """With what the store knows of the piece by now."""
        plan, arm, runs = piece.plan, piece.arm, piece.runs
        kept = self.store.load_state(plan, arm, runs)
        if kept is None or kept["runs"] != runs:  # left by another choice of runs
            kept = {"engine": None, "seconds": 0.0}
        grown = self.store.recorded(plan, plan.grown_arm(arm), runs[0]) if piece.settings.from_start else None
        machine, cpus, gpus = self.share(piece.settings)
        state, seconds = kept["engine"], kept["seconds"]
        job = TrainingJob(piece.settings, plan.seed, tuple(runs), state, machine=machine, grown=grown, seconds=seconds)
        job = job if self.save_every is None else replace(job, save_every=self.save_every)
        return WorkCall(compute_job, job, cpus, gpus)

    def save(self, piece: Piece, state: dict[str, Any]) -> None:
        self.store.save_state(piece.plan, piece.arm, piece.runs, state)

    def done(self, piece: Piece, outcome: TrainingOutcome, where: str) -> None:
        """Store what a training gave, and report it in one line."""
        self.store.save(piece.plan, piece.arm, piece.runs, outcome)
        print(f"{piece}, {outcome.seconds:.1f} s{where}{', resumed' if outcome.resumed else ''}")


def run_plans(
    plans: Sequence[Plan],
    store: Store,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
    place: Place = HERE,
) -> int:
    """Compute all that is missing and return how many pieces that were. May be interrupted at any moment."""
    store.check_writable()
    damaged = [bad for plan in plans for arm in plan.arms for bad in store.parts(plan, arm)[1]]
    work = pieces(plans, store)
    if not work:
        return 0
    with place as workers:
        there = Pieces(work, store, _shares(work, machine, workers), workers.save_every)
        there.check(workers)
        with progress("computing", sum(piece.cost for piece in work)) as reach:
            for path, reason in damaged:
                print(f"{path}: damaged ({reason}); computing these runs again")
                store.discard(path)
            workers.compute(there, reach)
    return len(work)
