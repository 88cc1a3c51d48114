"""Computing what is missing, in this process, in several or on Ray; each run is on disk before it is reported."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sensli import __version__
from sensli.errors import CheckpointError, SensliError
from sensli.text.files import write_bytes
from sensli.text.terminal import Reach, progress
from sensli_lab.compare.jobs import Job, Run, RunStore
from sensli_lab.compare.methods import named
from sensli_lab.compare.tasks.registry import find
from sensli_lab.compare.training import JobTraining, Tell, train
from sensli_lab.errors import FAILED, BadComparison, PaperError, StoreError, failure
from sensli_lab.paper.on_ray import SAVE_EVERY, TELL_EVERY, News, Streams, connected
from sensli_lab.paper.stacked import one_thread

# ---- Runs of a comparison as Ray tasks, one each, on one machine or many.
#
# Only this process writes to the store: progress, the states of unfinished runs and results come back as the stream
# that each task yields, so the machines need no shared disk. A run is the same as without Ray, to the bit on the same
# processor.


# News of a task: ("share", how much is done), ("state", a checkpoint), ("done", the run), ("refused", why).


@dataclass(frozen=True)
class Ray:
    """Where to compute: ``address`` None is a Ray on this machine, ``cpus`` are those of each run, and its threads."""

    address: str | None = None
    cpus: int = 1
    save_every: float = SAVE_EVERY


def compute_on_ray(
    jobs: Sequence[Job], store: RunStore, folder: Path | None, reach: Reach, place: Ray
) -> Iterator[tuple[Job, str]]:
    """Each job when its run is stored, with why it cannot be done, or nothing."""
    with connected(place.address) as (ray, _):
        largest = int(max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0))
        if not 1 <= place.cpus <= largest:
            raise BadComparison(
                f"--ray-cpus must be between 1 and {largest} (the CPUs of the largest machine), got {place.cpus}."
            )
        streams = Streams(ray, work)
        with streams.open():
            yield from _compute(streams, jobs, store, folder.absolute() if folder else None, reach, place)


def _compute(
    streams: Streams, jobs: Sequence[Job], store: RunStore, folder: Path | None, reach: Reach, place: Ray
) -> Iterator[tuple[Job, str]]:
    def send(number: int) -> None:
        job = jobs[number]
        state = store.state(job)
        given = {
            "task": job.task.name, "method": job.method.name, "seed": job.seed, "budget": job.budget, "digest": job.digest,
            "state": state.read_bytes() if state.exists() else None, "folder": folder, "threads": place.cpus,
            "save_every": place.save_every,
        }  # fmt: skip
        streams.send(number, given, place.cpus)

    shares: dict[int, float] = {}
    for number in range(len(jobs)):
        send(number)
    while streams.running:
        number, kind, value = streams.next(jobs.__getitem__)
        job = jobs[number]
        if kind == "share":
            shares[number] = value
        elif kind == "state":
            write_bytes(store.state(job), value, StoreError)
        elif kind == "lost":
            shares.pop(number, None)
            send(number)
        else:
            shares[number] = 1.0
            if kind == "done":
                store.save(job, Run.from_dict(value))
            yield job, value if kind == "refused" else ""
        reach(sum(share * jobs[one].seconds() for one, share in shares.items()), f"{len(streams.running)} runs left")


def work(version: str, given: dict[str, Any]) -> Iterator[News]:
    """One run, on whatever machine this is. By name: networks and losses are functions, which do not travel."""
    host = platform.node()
    if version != __version__:
        raise PaperError(
            f"on {host}: sensli is {__version__} there and {version} here. Install the same version on every machine."
        )
    torch.set_num_threads(given["threads"])
    os.environ["SENSLI_OFFLINE"] = "1"  # several tasks on one machine would download into the same file
    task = find(given["task"])
    job = Job(task, named(task, given["method"]), given["seed"], given["budget"])
    if job.digest != given["digest"]:
        raise PaperError(
            f"on {host}: {task.name} is configured in another way there. Install the same version on every machine."
        )
    try:
        data = task.load(given["folder"], job.seed)
    except SensliError as error:
        raise type(error)(f"on {host}: {error}") from None
    try:
        yield from _train(JobTraining(job, data), given["state"], given["save_every"])
    except SensliError as error:
        yield "refused", str(error)
    except Exception as error:
        yield "refused", failure(error)


def _train(training: JobTraining, state: bytes | None, save_every: float) -> Iterator[News]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.ckpt"
        if state is not None:
            path.write_bytes(state)
            with suppress(CheckpointError):  # a damaged state, or one of other code: from the start
                training.restore(path)
        told = saved = time.monotonic()
        while not training.finished:
            training.advance()
            now = time.monotonic()
            if now - told >= TELL_EVERY:
                told = now
                yield "share", training.share
            if now - saved >= save_every:
                training.save(path)
                saved = time.monotonic()
                yield "state", path.read_bytes()
    yield "done", training.ended().to_dict()


def compute(
    jobs: Sequence[Job], store: RunStore, folder: Path | None = None, processes: int = 1, ray: Ray | None = None
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
            done = (_told(job, refused) for job, refused in compute_on_ray(work, store, folder, reach, ray))
        else:
            done = (
                _here(work, store, folder, reach) if processes == 1 else _apart(work, store, folder, reach, processes)
            )
        return [line for line in done if line]


def _here(work: Sequence[Job], store: RunStore, folder: Path | None, reach: Reach) -> Iterator[str]:
    before = 0.0
    with one_thread():
        for job in work:
            cost = job.seconds()

            def tell(share: float, job: Job = job, before: float = before, cost: float = cost) -> None:
                reach(before + share * cost, str(job))

            yield _told(job, one(job, store, folder, tell))
            before += cost


def _apart(work: Sequence[Job], store: RunStore, folder: Path | None, reach: Reach, processes: int) -> Iterator[str]:
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
    return one(Job(known, named(known, method), seed, budget), RunStore(root), folder)


def one(job: Job, store: RunStore, folder: Path | None, tell: Tell | None = None) -> str:
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
