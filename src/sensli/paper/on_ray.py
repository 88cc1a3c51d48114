"""The pieces of an experiment as Ray tasks, on one machine or many.

Only this process writes to the store: results, progress and the states of unfinished trainings come back through Ray, so the
machines need no common disk. A piece is the same as without Ray (a stack of thirty small networks takes hardly longer than
one of five, so an arm is not split), and its numbers are the same to the bit on the same processor with as many threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sensli.growing.terminal import Reach
from sensli.paper.cluster import PATIENCE, Cluster, RayError, connected, one_line
from sensli.paper.config import Settings
from sensli.paper.engines import engine
from sensli.paper.errors import BadExperiment, PaperError
from sensli.paper.machine import Machine
from sensli.paper.pieces import Piece, keep, order
from sensli.paper.ray_tasks import Share, Tasks
from sensli.paper.ray_worker import POLL, unpacked
from sensli.paper.runner import Compute, Place
from sensli.paper.store import Store

LOSSES = 3  # so often may the worker of one piece be lost
SAVE_EVERY = 20.0  # seconds; a state travels, so less often than to a disk


def ray_place(address: str | None = None, cpus: int | None = None, save_every: float = SAVE_EVERY) -> Place:
    """A place for `runner.run`: Ray at `address` (default: one on this machine), `cpus` for each task."""

    @contextmanager
    def place(work: Sequence[Piece], machine: Machine) -> Iterator[Compute]:
        with connected(address) as cluster:
            tasks = Tasks(cluster, _shares(work, machine, cluster, cpus), save_every)
            try:
                tasks.check(work)
                yield lambda store, reach: _Driver(tasks, store, work).compute(reach)
            finally:
                tasks.close()

    return place


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


class _Driver:
    """Which pieces wait, which are out, and what has come back."""

    def __init__(self, tasks: Tasks, store: Store, work: Sequence[Piece]) -> None:
        self.tasks, self.store, self.work = tasks, store, work
        self.waiting = list(range(len(work)))
        self.running: dict[Any, int] = {}  # by what Ray will answer
        self.shares = [0.0 for _ in work]  # how much of each is done
        self.begun: set[int] = set()
        self.losses: Counter[int] = Counter()

    def compute(self, reach: Reach) -> None:
        ray = self.tasks.ray
        try:
            while self.waiting or self.running:
                self._send()
                ready, _ = ray.wait(list(self.running), num_returns=1, timeout=POLL)
                self._collect()
                for reference in ready:
                    self._finish(reference, self.running.pop(reference))
                self._tell(reach)
        except ray.exceptions.RayError as error:
            raise RayError(f"Ray is gone ({one_line(error)}). The same command goes on from here.") from None
        except BaseException:  # an error or Ctrl-C: what the others have reached is kept
            self._collect()
            self._collect(PATIENCE)  # the first answer may have been asked for long ago
            raise

    def _send(self) -> None:
        """Everything that builds on no unfinished piece; Ray has the queue."""
        unfinished = [self.work[number] for number in (*self.waiting, *self.running.values())]
        for number in list(self.waiting):
            piece = self.work[number]
            if any(piece.needs(other) for other in unfinished):
                continue
            machine = self.tasks.share(piece.settings).machine
            self.running[self.tasks.send(number, [order(piece, self.store, machine)])] = number
            self.waiting.remove(number)

    def _collect(self, wait: float = 0.0) -> None:
        """Progress and states of what is out; what comes late, of a piece that has finished or was lost, is dropped."""
        out = set(self.running.values())
        for number, news in self.tasks.news(wait).items():
            if number not in out:
                continue
            self.begun.add(number)
            self.shares[number] = news.get("share", self.shares[number])
            if "state" in news:
                piece = self.work[number]
                self.store.save_state(piece.plan, piece.arm, piece.runs, unpacked(news["state"]))

    def _finish(self, reference: Any, number: int) -> None:
        piece, ray = self.work[number], self.tasks.ray
        self.begun.discard(number)
        try:
            done, host = self.tasks.answer(reference, str(piece))
        except ray.exceptions.RayTaskError as error:
            raise PaperError(f"{piece}: the task failed ({one_line(error.cause or error)}).") from error
        except ray.exceptions.RayError as error:
            self._lost(number, error)
            return
        keep(piece, done, self.store, f" on {host}")
        self.shares[number] = 1.0

    def _lost(self, number: int, error: Exception) -> None:
        piece, reason = self.work[number], type(error).__name__
        self.losses[number] += 1
        if self.losses[number] >= LOSSES:
            raise RayError(
                f"{piece}: its worker was lost {LOSSES} times ({reason}: {one_line(error)}). If memory is short there, give each "
                "task more CPUs with --ray-cpus, so that fewer run side by side."
            ) from None
        print(f"{piece}: its worker was lost ({reason}); doing it again")
        self.shares[number] = 0.0
        self.waiting.append(number)

    def _tell(self, reach: Reach) -> None:
        total = sum(share * piece.cost for share, piece in zip(self.shares, self.work, strict=True))
        rest = len(self.waiting) + len(self.running) - len(self.begun)
        reach(total, f"{len(self.begun)} at work, {rest} waiting")
