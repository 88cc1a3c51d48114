"""The pieces of an experiment as Ray tasks, on one machine or many.

Only this process writes to the store: results, progress and the states of unfinished trainings come back as the stream that each
task yields, so the machines need no shared disk. A piece is the same as without Ray (a stack of thirty small networks takes hardly
longer than one of five, so an arm is not split), and its numbers are the same to the bit on the same processor with as many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sensli.growing.terminal import Reach
from sensli.paper.engines.engine import Job, engine
from sensli.paper.errors import BadExperiment
from sensli.paper.plans.machine import Machine
from sensli.paper.plans.settings import Settings
from sensli.paper.running.cluster import RayError, connected
from sensli.paper.running.pieces import Piece, job_of, keep
from sensli.paper.running.ray_worker import packed, unpacked, work
from sensli.paper.running.runner import Compute, Place
from sensli.paper.running.store import Store
from sensli.paper.running.streams import SAVE_EVERY, Streams


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

    def send(self, number: int, jobs: Sequence[Job], *, may_fetch: bool = False) -> Any:
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
        jobs = [Job(settings, 0, (), machine=self.share(settings).machine) for settings in alone]
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
