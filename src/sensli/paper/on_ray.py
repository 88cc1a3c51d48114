"""The pieces of an experiment as Ray tasks, on one machine or many.

Only this process writes to the store: results, progress and the states of unfinished trainings come back through Ray, so the
machines need no common disk. A piece is the same as without Ray (a stack of thirty small networks takes hardly longer than
one of five, so an arm is not split), and its numbers are the same to the bit on the same processor with as many threads.
"""

from __future__ import annotations

import io
import os
import pickle
import platform
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sensli._version import __version__
from sensli.errors import SensliError
from sensli.paper.cluster import PATIENCE, Cluster, RayError, connected, one_line
from sensli.paper.config import Settings
from sensli.paper.engines import engine
from sensli.paper.errors import BadExperiment, PaperError
from sensli.paper.machine import Machine
from sensli.paper.pieces import Order, Piece, keep, order, train
from sensli.paper.runner import Compute, Place
from sensli.paper.store import Store
from sensli.terminal import Reach

POLL = 0.5  # seconds between two looks at the mailbox
LOSSES = 3  # so often may the worker of one piece be lost
SAVE_EVERY = 20.0  # seconds; a state travels, so less often than to a disk


def ray_place(address: str | None = None, cpus: int | None = None, save_every: float = SAVE_EVERY) -> Place:
    """A place for `runner.run`: Ray at `address` (default: one on this machine), `cpus` for each task."""

    @contextmanager
    def place(work: Sequence[Piece], machine: Machine) -> Iterator[Compute]:
        with connected(address) as cluster:
            tasks = _Tasks(cluster, _shares(work, machine, cluster, cpus), save_every)
            try:
                tasks.check(work)
                yield lambda store, reach: _Driver(tasks, store, list(work)).compute(reach)
            finally:
                tasks.close()

    return place


# --- what a task may take ---


@dataclass(frozen=True)
class Share:
    """What a task takes of its machine."""

    machine: Machine
    cpus: int = 1
    gpus: int = 0


def _shares(work: Sequence[Piece], machine: Machine, cluster: Cluster, cpus: int | None) -> Callable[[Settings], Share]:
    """The share of a task by its settings; all that cannot be had is refused here, since Ray would wait for it for ever."""
    largest, graphics = cluster.largest("CPU"), cluster.total("GPU")
    if cpus is not None and not 1 <= cpus <= largest:
        raise BadExperiment(
            f"--ray-cpus {cpus}: the largest machine of this Ray has {largest}. Choose from 1 to {largest}."
        )
    if largest < 1:
        raise RayError(
            "this Ray has no CPU to give. Start a machine with CPUs: ray start --address HOST:PORT --num-cpus N"
        )
    if machine.device == "cuda" and not graphics:
        raise BadExperiment(
            "--device cuda: no machine of this Ray has a GPU. Leave the option out, or add a machine that has one."
        )
    # All runs count, not only the missing ones: what goes on after a stop should go on with as many threads.
    plans = {id(piece.plan): piece.plan for piece in work}.values()
    runs = sum(one.runs for one in plans for settings in one.arms.values() if engine(settings).AT_ONCE)
    data = machine.data.absolute() if machine.data else None
    on_gpu = graphics > 0 and machine.device in ("auto", "cuda")
    device = "cuda" if on_gpu else machine.device
    shared = graphics if on_gpu else max(runs, 1)
    many = cpus or min(max(cluster.total("CPU") // shared, 1), largest)
    alone = Share(Machine(data, device, machine.compile), many, int(on_gpu))
    together = Share(Machine(data, "cpu", machine.compile), cpus or 1)
    return lambda settings: alone if engine(settings).AT_ONCE else together


# --- on the machine of the worker ---


@dataclass(frozen=True)
class Failed:
    """A training ended with an error; text, because not every error can travel."""

    kind: type[SensliError] | None
    text: str
    trace: str


def work_on(payload: bytes, put: Callable[..., None]) -> bytes:
    """Train an order, or only check it if it has no runs; `put(share=)` and `put(state=)` report meanwhile."""
    given: dict[str, Any] = pickle.loads(payload)
    torch.set_num_threads(given["threads"])
    if not given["may_fetch"]:
        os.environ["SENSLI_OFFLINE"] = "1"
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if time.monotonic() - told >= POLL:
            told = time.monotonic()
            put(share=share)

    result: Any = None
    try:
        for one in given["orders"]:
            engine(one.settings).ready(one.settings, one.machine)
            if one.runs:
                tell(0.0)
                result = train(one, lambda state: put(state=_packed(state)), tell, save_every=given["save_every"])
    except SensliError as error:
        result = Failed(type(error), str(error), "")
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {one_line(error)} ({frame.filename}, line {frame.lineno})"
        result = Failed(None, text, traceback.format_exc())
    return _packed(result)


def _packed(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    """On the CPU, wherever it was made: this process may have no GPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


# --- between the two ---


class _Tasks:
    """The tasks of this run and the mailbox that they report to."""

    def __init__(self, cluster: Cluster, share: Callable[[Settings], Share], save_every: float) -> None:
        self.ray, self.share, self.save_every, self.ours = cluster.ray, share, save_every, cluster.ours
        # Made here and not above, so that they travel by value: the mailbox then needs no torch, and a machine without sensli can say so.
        ray, version = cluster.ray, __version__

        class Mailbox:
            """Keeps the last share and the last state of each piece until they are collected."""

            def __init__(self) -> None:
                self.mail: dict[int, dict[str, Any]] = {}

            def put(self, number: int, news: dict[str, Any]) -> None:
                self.mail.setdefault(number, {}).update(news)

            def collect(self) -> dict[int, dict[str, Any]]:
                mail, self.mail = self.mail, {}
                return mail

        def task(number: int, payload: bytes, box: Any) -> tuple[str, bytes | str]:
            host = platform.node()
            try:
                from sensli._version import __version__ as found
                from sensli.paper.on_ray import work_on
            except ImportError as error:
                return (
                    host,
                    f"sensli cannot be imported there ({error}). Install sensli {version} on every machine of the cluster.",
                )
            if found != version:
                return host, f"sensli is {found} there and {version} here. Install the same version on every machine."
            return host, work_on(payload, lambda **news: box.put.remote(number, news))

        # Ray would do a lost task again from where it began; we do, from its last state.
        self.task = ray.remote(max_retries=0, scheduling_strategy="SPREAD")(task)
        beside = ray.get_runtime_context().get_node_id()
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(beside, soft=True)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": near}
        self.box = ray.remote(**options)(Mailbox).remote()
        self.sent: list[Any] = []

    def send(self, number: int, orders: Sequence[Order]) -> Any:
        share = self.share(orders[0].settings)
        fetch = self.ours and number < 0  # several on one machine would write the same file
        content = {"orders": orders, "threads": share.cpus, "save_every": self.save_every, "may_fetch": fetch}
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "name": "sensli"}
        answer = self.task.options(**options).remote(number, pickle.dumps(content), self.box)
        self.sent.append(answer)
        return answer

    def answer(self, reference: Any, what: str) -> tuple[Any, str]:
        """What came back and from which machine; what failed there is raised here, in one line."""
        host, content = self.ray.get(reference)
        if isinstance(content, str):
            raise RayError(f"{host}: {content}")
        result = _unpacked(content)
        if isinstance(result, Failed):
            if result.kind is not None:
                raise result.kind(f"{what}, on {host}: {result.text}")
            hint = "Without --on ray the same command shows the whole traceback."
            raise PaperError(f"{what}, on {host}: {result.text}. {hint}") from RuntimeError(result.trace)
        return result, host

    def check(self, work: Sequence[Piece]) -> None:
        """Find out on one machine what is missing (a device, the images), before the first hour of work."""
        alone = {piece.settings: piece for piece in work if engine(piece.settings).AT_ONCE}
        if not alone:
            return
        orders = [Order(settings, 0, (), self.share(settings).machine, None, None) for settings in alone]
        try:
            self.answer(self.send(-1, orders), "before the first run")
        except self.ray.exceptions.RayError as error:
            raise RayError(f"the first task was lost ({one_line(error)}).") from None

    def news(self) -> dict[int, dict[str, Any]]:
        try:
            mail: dict[int, dict[str, Any]] = self.ray.get(self.box.collect.remote(), timeout=PATIENCE)
            return mail
        except self.ray.exceptions.RayError:  # it is being started again elsewhere; the tasks go on
            return {}

    def close(self) -> None:
        """Nothing of ours goes on in a cluster that does."""
        for reference in self.sent:
            self.ray.cancel(reference, force=True)
        self.ray.kill(self.box)


# --- in this process ---


@dataclass
class _Driver:
    tasks: _Tasks
    store: Store
    waiting: list[Piece]
    running: dict[Any, int] = field(default_factory=dict)  # by what Ray will answer
    losses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.work = list(self.waiting)
        self.done = dict.fromkeys(range(len(self.work)), 0.0)  # the share of each piece
        self.begun: set[int] = set()

    def compute(self, reach: Reach) -> None:
        try:
            while self.waiting or self.running:
                self._send()
                ready, _ = self.tasks.ray.wait(list(self.running), num_returns=1, timeout=POLL)
                self._collect()
                for reference in ready:
                    self._finish(reference, self.running.pop(reference))
                self._tell(reach)
        except BaseException:  # an error or Ctrl-C: what the others have reached is kept
            self._collect()
            raise

    def _send(self) -> None:
        """Everything that no unfinished piece stands before; Ray has the queue."""
        open_pieces = [*self.waiting, *(self.work[number] for number in self.running.values())]
        for piece in [one for one in self.waiting if not any(one.needs(other) for other in open_pieces)]:
            machine = self.tasks.share(piece.settings).machine
            number = self.work.index(piece)
            self.running[self.tasks.send(number, [order(piece, self.store, machine)])] = number
            self.waiting.remove(piece)

    def _collect(self) -> None:
        current = set(self.running.values())
        for number, news in self.tasks.news().items():
            if number not in current:
                continue  # it has finished, or was lost and starts again
            self.begun.add(number)
            self.done[number] = news.get("share", self.done[number])
            if "state" in news:
                piece = self.work[number]
                self.store.save_state(piece.plan, piece.arm, piece.runs, _unpacked(news["state"]))

    def _finish(self, reference: Any, number: int) -> None:
        piece, lost = self.work[number], self.tasks.ray.exceptions
        self.begun.discard(number)
        try:
            result, host = self.tasks.answer(reference, str(piece))
        except lost.RayTaskError as error:
            raise PaperError(f"{piece}: the task failed ({one_line(error.cause or error)}).") from error
        except lost.RayError as error:
            self.losses[number] += 1
            reason = type(error).__name__
            if self.losses[number] >= LOSSES:
                raise RayError(
                    f"{piece}: its worker was lost {LOSSES} times ({reason}: {one_line(error)}). Enough memory there?"
                ) from None
            print(f"{piece}: its worker was lost ({reason}); doing it again")
            self.done[number] = 0.0
            self.waiting.append(piece)
            return
        keep(piece, result, self.store, f" on {host}")
        self.done[number] = 1.0

    def _tell(self, reach: Reach) -> None:
        costs = (piece.cost for piece in self.work)
        total = sum(share * cost for share, cost in zip(self.done.values(), costs, strict=True))
        rest = len(self.waiting) + len(self.running) - len(self.begun)
        reach(total, f"{len(self.begun)} at work, {rest} waiting")
