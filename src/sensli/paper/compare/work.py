"""Computing what is missing, in this process, in several or on Ray; each run is on disk before it is reported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import torch

from sensli.errors import CheckpointError, SensliError
from sensli.growing.terminal import Reach, progress
from sensli.paper.compare import on_ray
from sensli.paper.compare.errors import FAILED, failure
from sensli.paper.compare.job import Job
from sensli.paper.compare.methods import named
from sensli.paper.compare.on_ray import Ray
from sensli.paper.compare.store import Store
from sensli.paper.compare.tasks import find
from sensli.paper.compare.training import Tell, train
from sensli.paper.engines.stacked import one_thread


def compute(
    jobs: Sequence[Job], store: Store, folder: Path | None = None, processes: int = 1, ray: Ray | None = None
) -> list[str]:
    """Compute the runs that the store lacks; what a method refuses to do, or fails at, is said and left out, and is returned.

    Data that cannot be had stop everything, before the first run.
    """
    store.check_writable()
    work = store.missing(jobs)
    if not work:
        return []
    for task in {job.task.name: job.task for job in work}.values():
        task.load(folder, 0)
    with progress("comparing", sum(job.seconds() for job in work)) as reach:
        done: Iterator[str]
        if ray is not None:
            done = (_told(job, refused) for job, refused in on_ray.compute(work, store, folder, reach, ray))
        else:
            done = (
                _here(work, store, folder, reach) if processes == 1 else _apart(work, store, folder, reach, processes)
            )
        return [line for line in done if line]


def _here(work: Sequence[Job], store: Store, folder: Path | None, reach: Reach) -> Iterator[str]:
    before = 0.0
    with one_thread():
        for job in work:
            cost = job.seconds()

            def tell(share: float, job: Job = job, before: float = before, cost: float = cost) -> None:
                reach(before + share * cost, str(job))

            yield _told(job, one(job, store, folder, tell))
            before += cost


def _apart(work: Sequence[Job], store: Store, folder: Path | None, reach: Reach, processes: int) -> Iterator[str]:
    """One thread each: networks this small gain nothing from more. Fresh processes: a fork would inherit torch's threads."""
    before = 0.0
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(processes, len(work)), multiprocessing.get_context("spawn"), _begin) as pool:
        waiting: dict[Future[str], Job] = {
            pool.submit(_apart_one, job.task.name, job.method.name, job.seed, job.budget, store.root, folder): job
            for job in work
        }
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    job = waiting.pop(future)
                    yield _told(job, future.result())
                    before += job.seconds()
                    reach(before, f"{len(waiting)} runs left")
        except BaseException:  # Ctrl-C, or a process that was killed: what is unfinished resumes from its state
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _begin() -> None:
    """In a new process: one thread, and an end without a traceback when the terminal sends Ctrl-C to all or the first one is killed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    first = multiprocessing.parent_process()
    assert first is not None

    def end_with_it() -> None:
        first.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()


def _apart_one(task: str, method: str, seed: int, budget: float, root: Path, folder: Path | None) -> str:
    """By name: networks and losses are functions, which do not travel to another process."""
    known = find(task)
    return one(Job(known, named(known, method), seed, budget), Store(root), folder)


def one(job: Job, store: Store, folder: Path | None, tell: Tell | None = None) -> str:
    """Train and store one run, from where it was interrupted; returns why it cannot be done, or nothing.

    A fault of one method must not cost the other runs of a night: it is returned too, and the state stays, for whoever mends it.
    """
    data = job.task.load(folder, job.seed)
    state = store.state(job)
    try:
        try:
            run = train(job, data, state=state, tell=tell)
        except CheckpointError:  # a damaged state, or one of other code: from the start
            state.unlink(missing_ok=True)
            run = train(job, data, state=state, tell=tell)
    except SensliError as error:
        state.unlink(missing_ok=True)
        return str(error)
    except (OSError, MemoryError):  # of the machine, which the next run would meet too
        raise
    except Exception as error:
        return failure(error)
    store.save(job, run)
    return ""


def _told(job: Job, refused: str) -> str:
    if refused.startswith(FAILED):
        print(refused, file=sys.stderr)
        refused = refused.splitlines()[0]
        print(f"{job}: {refused}", flush=True)
    else:
        print(f"{job}: {f'left out: {refused}' if refused else 'done'}", flush=True)
    return f"{job}: {refused}" if refused else ""
