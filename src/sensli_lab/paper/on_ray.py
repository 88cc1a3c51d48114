"""The pieces of an experiment as Ray tasks, on one machine or many.

Only this process writes to the store: results, progress and the states of unfinished trainings come back as the stream that each
task yields, so the machines need no shared disk. A piece is the same as without Ray (a stack of thirty small networks takes hardly
longer than one of five, so an arm is not split), and its numbers are the same to the bit on the same processor with as many threads.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import platform
import re
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from sensli import __version__
from sensli.errors import MissingExtra, SensliError
from sensli.text.terminal import Reach, how_to_get
from sensli_lab.errors import BadExperiment, PaperError
from sensli_lab.paper.engine import TrainingJob, engine
from sensli_lab.paper.machine import Machine
from sensli_lab.paper.runner import Compute, Piece, Place, job_of, keep, train
from sensli_lab.paper.settings import Settings
from sensli_lab.paper.store import Store

# ---- What a Ray task does on its machine: train a job, and yield the progress, the states and the result as they come.


TELL_EVERY = 0.5  # seconds
News = tuple[str, Any]  # ("share", how much is done), ("state", packed), ("done", packed), ("failed", the error)


def work(version: str, payload: bytes) -> Iterator[News]:
    """Train jobs, or only check those that have no runs. An error is one line, names the machine and can be sent back."""
    host = platform.node()
    if version != __version__:  # before anything is unpacked
        raise PaperError(
            f"on {host}: sensli is {__version__} there and {version} here. Install the same version on every machine."
        )
    news: SimpleQueue[News] = SimpleQueue()
    cancelled = threading.Event()
    # The training calls back while a stream is asked, so a thread runs between them.
    threading.Thread(target=_train, args=(unpacked(payload), host, news, cancelled), daemon=True).start()
    kind = ""
    try:
        while kind != "done":
            with suppress(Empty):  # time to notice that Ray cancels this task: it does not wake a waiting thread
                kind, value = news.get(timeout=TELL_EVERY)
                if kind == "failed":
                    raise value
                yield kind, value
    finally:
        cancelled.set()


def _train(given: dict[str, Any], host: str, news: SimpleQueue[News], cancelled: threading.Event) -> None:
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if cancelled.is_set():
            sys.exit()  # of this thread
        if time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            news.put(("share", share))

    try:
        torch.set_num_threads(given["threads"])
        if not given["may_fetch"]:
            os.environ["SENSLI_OFFLINE"] = "1"
        result = None
        for job in given["jobs"]:
            engine(job.settings).ready(job.settings, job.machine)
            if job.runs:
                tell(0.0)
                result = train(replace(job, save=lambda state: news.put(("state", packed(state))), tell=tell))
        news.put(("done", packed((result, host))))
    except SensliError as error:
        news.put(("failed", type(error)(f"on {host}: {error}")))
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"on {host}: {type(error).__name__}: {one_line(error)} ({frame.filename}, line {frame.lineno})"
        hint = "Run the same command without --on ray to see the full traceback."
        failure = PaperError(f"{text}. {hint}")
        failure.__cause__ = error
        news.put(("failed", failure))


def one_line(error: object) -> str:
    """The first lines of a longer text, as one."""
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else words[:300].rsplit(" ", 1)[0] + " ..."


def packed(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """On the CPU, wherever it was made: this process may have no GPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


# ---- Connecting to Ray: one on this machine, or the cluster at an address; every failure is one line.


PATIENCE = 10.0  # seconds for a machine to answer
_LOCAL = {"RAY_USAGE_STATS_ENABLED": "0"}
# If something other than Ray answers, these end the attempt after half a minute instead of minutes.
_REMOTE = {"RAY_py_gcs_connect_timeout_s": "10", "RAY_NUM_REDIS_GET_RETRIES": "1"}


class RayError(PaperError):
    """Ray cannot be started or reached, or cannot give what is asked for."""


@contextmanager
def connected(address: str | None) -> Iterator[tuple[Any, bool]]:
    """The module, and whether its Ray was started here. If so, it is shut down at the end; one that the caller had started stays."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _check(address)
    with _environment(_LOCAL if address == "local" else _REMOTE):  # some of it is read when Ray is imported
        ray = _module()
        if ray.is_initialized():
            yield ray, False
            return
        try:
            _start(ray, address)
            yield ray, address == "local"
        finally:
            ray.shutdown()


def _module() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(
            f"--on ray needs Ray, which is not installed ({error}). Get it with: {how_to_get('ray')}"
        ) from None


def _start(ray: Any, address: str) -> None:
    local = address == "local"
    options = {"include_dashboard": False} if local else {}
    try:
        ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False, **options)
    except Exception as error:  # of many kinds, some of them bare RuntimeErrors
        where = "Ray on this machine" if local else f"--ray-address {address}"
        advice = "Run the command on a machine of the cluster, with the same versions of Ray and Python."
        if local:
            advice = "Leave out --on ray to compute in this process."
        raise RayError(f"{where}: cannot connect ({one_line(error)}). {advice}") from None


def _check(address: str) -> None:
    """Ray waits for minutes if nobody answers, and then says little."""
    if address in ("local", "auto"):
        return
    found = re.fullmatch(r"(\[[^\]]+\]|[^:/\s]+):(\d+)", address)
    if not found or not 0 < int(found[2]) < 65536:
        raise RayError(
            f"--ray-address must be HOST:PORT of the cluster's head (the port is 6379 unless `ray start --head` was given another "
            f"one) or 'auto' on a machine of the cluster, got {address}. Leave it out to start a Ray on this machine."
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), PATIENCE).close()
    except OSError as error:
        raise RayError(
            f"--ray-address {address}: no answer ({error.strerror or error}). Start the cluster (`ray start --head` on its first "
            "machine), and check that this machine can reach it."
        ) from None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Settings that Ray reads only from the environment; what the user has set there takes precedence."""
    new = values.keys() - os.environ.keys()
    os.environ.update({name: values[name] for name in new})
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


# ---- Ray tasks that yield news as they come: which one has some, what failed, whose worker was lost.
#
# A task yields ``("share", how much is done)`` and ``("state", ...)`` on its way, and anything else at its end.


LOSSES = 3  # how often the worker of one task may be lost
SAVE_EVERY = 20.0  # seconds; a state is sent over the network, so less often than to a disk
ON_THE_WAY = ("share", "state")


class Streams:
    """The running tasks, each with a number of the caller's."""

    def __init__(self, ray: Any, work: Callable[..., Iterator[News]]) -> None:
        self.ray = ray
        # Ray would repeat a lost task from its beginning; the caller repeats it from its last state.
        self._task = ray.remote(max_retries=0, num_returns="streaming", scheduling_strategy="SPREAD")(work)
        self._losses: Counter[int] = Counter()
        self.running: dict[Any, int] = {}

    def send(self, number: int, given: Any, cpus: int, gpus: int = 0) -> Any:
        stream = self._task.options(num_cpus=cpus, num_gpus=gpus, name="sensli").remote(__version__, given)
        self.running[stream] = number
        return stream

    def next(self, name: Callable[[int], object]) -> tuple[int, str, Any]:
        """The number of a task that has news, and these; ``("lost", None)`` if its worker was lost and it must be sent again."""
        (stream,), _ = self.ray.wait(list(self.running))
        number = self.running[stream]
        try:
            kind, value = self.news(stream, str(name(number)))
        except self.ray.exceptions.RayError as error:
            self._lost(number, str(name(number)), error)
            kind, value = "lost", None
        if kind not in ON_THE_WAY:
            del self.running[stream]
        return number, kind, value

    def news(self, stream: Any, name: str) -> News:
        """The next news of a task; what failed there is raised here, as one line."""
        try:
            news: News = self.ray.get(next(stream))
            return news
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SensliError):
                raise type(error.cause)(f"{name}, {error.cause}") from error
            advice = f"Is sensli {__version__} installed on every machine?"
            raise PaperError(f"{name}: the task failed ({one_line(error.cause or error)}). {advice}") from error

    def _lost(self, number: int, name: str, error: Exception) -> None:
        self._losses[number] += 1
        reason = type(error).__name__
        if self._losses[number] >= LOSSES:
            raise RayError(
                f"{name}: its worker was lost {LOSSES} times ({reason}: {one_line(error)}). If it runs out of memory, give each "
                "task more CPUs with --ray-cpus, so that fewer run in parallel."
            ) from None
        print(f"{name}: its worker was lost ({reason}); running it again")

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the tasks run. In the end none is left in a cluster that outlives this process."""
        try:
            yield
        except self.ray.exceptions.RayError as error:
            raise RayError(
                f"the connection to Ray was lost ({one_line(error)}). Run the same command again to resume."
            ) from None
        finally:
            with suppress(Exception):  # the connection may be what was lost
                for stream in self.running:
                    self.ray.cancel(stream)  # with force=True Ray ends this process if the task has just finished


@dataclass(frozen=True)
class Share:
    """What a task uses of its machine."""

    machine: Machine
    cpus: int
    gpus: int = 0


def ray_place(address: str | None = None, cpus: int | None = None, save_every: float = SAVE_EVERY) -> Place:
    """A place for `runner.run`: Ray at `address` (default: one on this machine), `cpus` for each task."""

    @contextmanager
    def place(pieces: Sequence[Piece], machine: Machine) -> Iterator[Compute]:
        with connected(address) as (ray, ours):
            tasks = _Tasks(Streams(ray, work), _shares(pieces, machine, ray, cpus), save_every)
            with tasks.streams.open():
                tasks.check(pieces, may_fetch=ours)
                yield lambda store, reach: tasks.compute(pieces, store, reach)

    return place


def _shares(pieces: Sequence[Piece], machine: Machine, ray: Any, cpus: int | None) -> Callable[[Settings], Share]:
    """The share of a task by its settings; what is not available is refused here, since Ray would wait for it forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = int(max((node.get("CPU", 0) for node in nodes), default=0))
    total, graphics = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
    if largest < 1:
        raise RayError("this Ray has no CPUs. Add a machine that has some: ray start --address HOST:PORT --num-cpus N")
    if cpus is not None and not 1 <= cpus <= largest:
        raise BadExperiment(
            f"--ray-cpus must be between 1 and {largest} (the CPUs of the largest machine), got {cpus}."
        )
    if machine.device == "cuda" and not graphics:
        raise BadExperiment(
            "--device cuda is not available: no machine of this Ray has a GPU. Leave the option out, or add a machine that has one."
        )
    # All runs count, not only the missing ones: a resumed run should have as many threads as before.
    plans = {id(piece.plan): piece.plan for piece in pieces}.values()
    runs = sum(one.runs for one in plans for settings in one.arms.values() if engine(settings).AT_ONCE)
    data = machine.data.absolute() if machine.data else None
    on_gpu = graphics > 0 and machine.device in ("auto", "cuda")
    even = min(max(total // (graphics if on_gpu else max(runs, 1)), 1), largest)
    alone = Share(Machine(data, "cuda" if on_gpu else machine.device, machine.compile), cpus or even, int(on_gpu))
    together = Share(Machine(data, "cpu", machine.compile), cpus or 1)
    return lambda settings: alone if engine(settings).AT_ONCE else together


@dataclass(frozen=True)
class _Tasks:
    """The pieces as tasks: what each is given, and what becomes of its news."""

    streams: Streams
    share: Callable[[Settings], Share]
    save_every: float

    def send(self, number: int, jobs: Sequence[TrainingJob], *, may_fetch: bool = False) -> Any:
        share = self.share(jobs[0].settings)
        given = {"jobs": jobs, "threads": share.cpus, "may_fetch": may_fetch}
        return self.streams.send(number, packed(given), share.cpus, share.gpus)

    def check(self, pieces: Sequence[Piece], *, may_fetch: bool) -> None:
        """Find out on one machine what is missing (a device, the images), before the first hour of work.

        Only this task may download: several on one machine would write the same file.
        """
        alone = dict.fromkeys(piece.settings for piece in pieces if engine(piece.settings).AT_ONCE)
        if not alone:
            return
        jobs = [TrainingJob(settings, 0, (), machine=self.share(settings).machine) for settings in alone]
        stream = self.send(-1, jobs, may_fetch=may_fetch)
        self.streams.news(stream, "before the first run")  # a task without runs only reports its end
        del self.streams.running[stream]

    def compute(self, pieces: Sequence[Piece], store: Store, reach: Reach) -> None:
        waiting, running = list(range(len(pieces))), self.streams.running
        shares: dict[int, float] = {}  # how much is done of each piece that has begun
        self._send(waiting, pieces, store)
        while running:
            number, kind, value = self.streams.next(pieces.__getitem__)
            piece = pieces[number]
            if kind == "share":
                shares[number] = value
            elif kind == "state":
                store.save_state(piece.plan, piece.arm, piece.runs, unpacked(value))
            else:
                if kind == "done":
                    outcome, host = unpacked(value)
                    keep(piece, outcome, store, f" on {host}")
                    shares[number] = 1.0
                else:
                    shares.pop(number, None)
                    waiting.append(number)
                self._send(waiting, pieces, store)
            begun = sum(number in shares for number in running.values())
            rest = len(waiting) + len(running) - begun
            reach(sum(share * pieces[n].cost for n, share in shares.items()), f"{begun} at work, {rest} waiting")

    def _send(self, waiting: list[int], pieces: Sequence[Piece], store: Store) -> None:
        """Send every piece that does not need an unfinished one; Ray keeps the queue."""
        unfinished = [pieces[number] for number in (*waiting, *self.streams.running.values())]
        for number in list(waiting):
            piece = pieces[number]
            if not any(piece.needs(other) for other in unfinished):
                job = job_of(piece, store, self.share(piece.settings).machine)
                self.send(number, [replace(job, save_every=self.save_every)])
                waiting.remove(number)
