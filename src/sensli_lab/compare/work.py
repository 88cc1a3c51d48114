"""The runs that a comparison lacks, as work for `sensli_lab.work`; each is on disk before it is reported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sensli.cli.terminal import progress
from sensli.errors import SensliError
from sensli.modules.running import fit_threads
from sensli.text.files import write_bytes
from sensli_lab.compare.jobs import Job, Run, RunStore
from sensli_lab.compare.training import train
from sensli_lab.errors import FAILED, StoreError, failure
from sensli_lab.work.workers import HERE, Place, Save, Tell, WorkCall


@dataclass(frozen=True)
class Given:
    """A run to train, the state to resume from, the folder of the data, and the seconds between states."""

    job: Job
    state: bytes | None = None
    folder: Path | None = None
    save_every: float | None = None


def compute_run(given: Given, tell: Tell, save: Save) -> Run | str:
    """What a worker does: the run, or why it cannot be done.

    A fault of one method must not cost the other runs of a night: it is returned too.
    """
    data = given.job.task.load(given.folder, given.job.seed)
    try:
        return train(given.job, data, state=given.state, tell=tell, save=save, save_every=given.save_every)
    except (OSError, MemoryError, StoreError):  # of the machine, which the next run would meet too
        raise
    except SensliError as error:
        return str(error)
    except Exception as error:
        return failure(error)


@dataclass
class Runs:
    """The runs as work."""

    items: Sequence[Job]
    store: RunStore
    folder: Path | None = None
    cpus: int = 1
    save_every: float | None = None
    left_out: list[str] = field(default_factory=list)

    def call(self, job: Job) -> WorkCall:
        state = self.store.state(job)
        given = Given(job, state.read_bytes() if state.exists() else None, self.folder, self.save_every)
        return WorkCall(compute_run, given, self.cpus)

    def save(self, job: Job, state: bytes) -> None:
        write_bytes(self.store.state(job), state, StoreError)

    def done(self, job: Job, result: Run | str, where: str) -> None:
        """Store the run, or say why there is none; the state of one that failed stays, for whoever mends it."""
        if isinstance(result, Run):
            self.store.save(job, result)
            print(f"{job}: done", flush=True)
            return
        failed = result.startswith(FAILED)
        if failed:
            print(result, file=sys.stderr)
            result = result.splitlines()[0]
        else:
            self.store.state(job).unlink(missing_ok=True)
        print(f"{job}: {'' if failed else 'left out: '}{result}", flush=True)
        self.left_out.append(f"{job}: {result}")


def compute_runs(jobs: Sequence[Job], store: RunStore, folder: Path | None = None, place: Place = HERE) -> list[str]:
    """Compute the runs that the store lacks; what a method refuses to do, or fails at, is said and left out, and is returned.

    Data that cannot be had stop everything, before the first run.
    """
    store.check_writable()
    missing = store.missing(jobs)
    if not missing:
        return []
    for task in {job.task.name: job.task for job in missing}.values():
        task.load(folder, 0)
    with place as workers, progress("comparing", sum(job.cost for job in missing)) as reach, fit_threads():
        runs = Runs(missing, store, folder.absolute() if folder else None, workers.cpus or 1, workers.save_every)
        workers.compute(runs, reach)
    return runs.left_out
