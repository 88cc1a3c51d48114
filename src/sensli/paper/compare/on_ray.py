"""Runs of a comparison as Ray tasks, one each, on one machine or many.

Only this process writes to the store: progress, the states of unfinished runs and results come back as the stream that each task
yields, so the machines need no shared disk. A run is the same as without Ray, to the bit on the same processor.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sensli import __version__
from sensli.errors import CheckpointError, SensliError
from sensli.growing.terminal import Reach
from sensli.paper.compare.errors import BadComparison, failure
from sensli.paper.compare.job import Job
from sensli.paper.compare.methods import named
from sensli.paper.compare.run import Run
from sensli.paper.compare.store import Store
from sensli.paper.compare.tasks import find
from sensli.paper.compare.training import Training
from sensli.paper.errors import PaperError, StoreError
from sensli.paper.running.cluster import connected
from sensli.paper.running.ray_worker import TELL_EVERY, News
from sensli.paper.running.streams import SAVE_EVERY, Streams
from sensli.text.writing import write_bytes

# News of a task: ("share", how much is done), ("state", a checkpoint), ("done", the run), ("refused", why).


@dataclass(frozen=True)
class Ray:
    """Where to compute: ``address`` None is a Ray on this machine, ``cpus`` are those of each run, and its threads."""

    address: str | None = None
    cpus: int = 1
    save_every: float = SAVE_EVERY


def compute(
    jobs: Sequence[Job], store: Store, folder: Path | None, reach: Reach, place: Ray
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
    streams: Streams, jobs: Sequence[Job], store: Store, folder: Path | None, reach: Reach, place: Ray
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
        yield from _train(Training(job, data), given["state"], given["save_every"])
    except SensliError as error:
        yield "refused", str(error)
    except Exception as error:
        yield "refused", failure(error)


def _train(training: Training, state: bytes | None, save_every: float) -> Iterator[News]:
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
