"""One way to compute: items of work, in this process, in several, or (`on_ray`) as Ray tasks.

Only the process that asks writes to a store: the progress of an item, its states and its result come back as news of its worker.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from sensli.cli.terminal import Reach
from sensli.errors import SensliError
from sensli_lab.errors import PaperError

Tell = Callable[[float], None]  # the share that is done, 0 to 1
Save = Callable[[Any], None]  # a state to resume from


def ignore(_: object) -> None:
    """Nobody wants to know. A function with a name, so that it can be sent to another process."""


@dataclass(frozen=True)
class WorkCall:
    """What a worker is given: a function that it can import by its name, the argument, and what it uses of its machine."""

    function: Callable[[Any, Tell, Save], Any]
    given: Any
    cpus: int = 1  # and threads
    gpus: int = 0
    may_fetch: bool = False  # several workers would download into the same file


class Work(Protocol):
    """Items, whose text is their name, in an order in which none needs a later one."""

    # with `cost`, estimated seconds, and `needs(other)`, whether it begins only when the other is stored
    items: Sequence[Any]

    def call(self, item: Any) -> WorkCall: ...  # with what is known of the item by now

    def save(self, item: Any, state: Any) -> None: ...

    def done(self, item: Any, result: Any, where: str) -> None: ...


TELL_EVERY = 0.5  # seconds
News = tuple[str, Any]  # ("share", how much is done), ("state", packed), ("done", packed), ("failed", the error)


def perform(
    payload: bytes, put: Callable[[News], None], where: str = "in another process", option: str = "--jobs", note: str = "",
    cancelled: threading.Event | None = None,
) -> None:  # fmt: skip
    """Make a packed call and put its news. An error is one line, says where and can be sent; without `option` there is a traceback."""
    told = time.monotonic()

    def tell(share: float) -> None:
        nonlocal told
        if cancelled is not None and cancelled.is_set():
            sys.exit()  # of this thread
        if share == 0 or time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            put(("share", share))

    try:
        call: WorkCall = unpack(payload)
        torch.set_num_threads(call.cpus)
        if not call.may_fetch:
            os.environ["SENSLI_OFFLINE"] = "1"
        result = call.function(call.given, tell, lambda state: put(("state", pack(state))))
        put(("done", pack((result, note))))
    except SensliError as error:
        put(("failed", type(error)(f"{where}: {error}")))
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{where}: {type(error).__name__}: {one_line(error)} ({frame.filename}, line {frame.lineno})"
        failure = PaperError(f"{text}. Run the same command without {option} to see the full traceback.")
        failure.__cause__ = error
        put(("failed", failure))


def one_line(error: object) -> str:
    """The first lines of a longer text, as one."""
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else words[:300].rsplit(" ", 1)[0] + " ..."


def pack(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> Any:
    """On the CPU, wherever it was made: this process may have no GPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


# ---- Who computes. Workers in other processes and on other machines differ only in how they are reached.

LOSSES = 3  # how often the worker of one item may be lost


class Lost(PaperError):
    """A worker has ended before its task, for this reason."""


class Workers:
    """How one is reached, by a key, is said by those who inherit."""

    most: float = math.inf  # that can work at once
    nodes: Sequence[Mapping[str, float]] = ()  # what each machine of a cluster has
    cpus: int | None = None  # for each call, if that was said
    save_every: float | None = None  # seconds between states, unless it is as the work has it
    may_fetch = True  # whether a download by one of them serves all
    relief: str  # what helps if memory runs out
    send: Callable[[WorkCall], Any]  # let a worker begin, and return its key
    ready: Callable[[], Any]  # wait for news of those that run, and return the key of one that has some
    # The next news of a worker. What failed there is raised, as one line that begins with the name, or it is Lost.
    news: Callable[[Any, str], News]

    def __init__(self) -> None:
        self.running: dict[Any, int] = {}  # the number of the item that each key stands for

    def ask(self, name: str, call: WorkCall) -> None:
        """Make one call before all others."""
        worker = self.send(call)
        self.running[worker] = -1
        try:
            while self.news(worker, name)[0] != "done":
                pass
        except Lost as lost:
            raise PaperError(f"{name}: its worker was lost ({lost}). Run the same command again.") from None
        del self.running[worker]

    def compute(self, work: Work, reach: Reach) -> None:
        """Do all items; one whose worker is lost is sent again, from its last state."""
        items, running = work.items, self.running
        waiting = list(range(len(items)))
        shares: dict[int, float] = {}  # how much is done of each item that has begun
        losses: Counter[int] = Counter()
        self._send(work, waiting)
        while running:
            worker = self.ready()
            number = running[worker]
            item = items[number]
            try:
                kind, value = self.news(worker, str(item))
            except Lost as lost:
                kind, value = "lost", None
                losses[number] += 1
                if losses[number] >= LOSSES:
                    raise PaperError(
                        f"{item}: its worker was lost {LOSSES} times ({lost}). If it runs out of memory, {self.relief}."
                    ) from None
                print(f"{item}: its worker was lost ({str(lost).split(':')[0]}); running it again")
            if kind == "share":
                shares[number] = value
            elif kind == "state":
                work.save(item, unpack(value))
            else:
                del running[worker]
                if kind == "done":
                    work.done(item, *unpack(value))
                    shares[number] = 1.0
                else:
                    shares.pop(number, None)
                    waiting.insert(0, number)
                self._send(work, waiting)
            begun = sum(number in shares for number in running.values())
            rest = len(waiting) + len(running) - begun
            reach(sum(share * items[n].cost for n, share in shares.items()), f"{begun} at work, {rest} waiting")

    def _send(self, work: Work, waiting: list[int]) -> None:
        """Send what does not need an unfinished item."""
        for number in list(waiting):
            if len(self.running) >= self.most:
                return
            item = work.items[number]
            if not any(item.needs(work.items[other]) for other in (*waiting, *self.running.values())):
                self.running[self.send(work.call(item))] = number
                waiting.remove(number)


Place = AbstractContextManager[Workers]  # entered, its workers can be reached; left, none of them works


class _Here(Workers):
    """This process, one item after another; what fails is raised as it is."""

    def ask(self, name: str, call: WorkCall) -> None:
        call.function(call.given, ignore, ignore)

    def compute(self, work: Work, reach: Reach) -> None:
        before = 0.0
        for item in work.items:

            def tell(share: float, item: Any = item, before: float = before) -> None:
                reach(before + share * item.cost, str(item))

            tell(0.0)
            call = work.call(item)
            work.done(item, call.function(call.given, tell, partial(work.save, item)), "")
            before += item.cost


HERE: Place = nullcontext(_Here())


class _Processes(Workers):
    """Fresh ones, since a fork would inherit torch's threads; each is used again. A key is the pipe to a process."""

    relief = "use fewer processes with --jobs"

    def __init__(self, count: int) -> None:
        super().__init__()
        self.most = count
        self.started: dict[Connection, BaseProcess] = {}

    def send(self, call: WorkCall) -> Connection:
        pipe = next((pipe for pipe in self.started if pipe not in self.running), None)
        if pipe is None:
            context = multiprocessing.get_context("spawn")
            pipe, theirs = context.Pipe()
            self.started[pipe] = context.Process(target=_serve, args=(theirs,))
            with _interrupts_blocked():
                self.started[pipe].start()
            theirs.close()  # so that the pipe ends with the process
        with suppress(OSError):  # it was killed meanwhile, which its news will say
            pipe.send(pack(call))
        return pipe

    def ready(self) -> Any:
        return wait(list(self.running))[0]

    def news(self, worker: Connection, name: str) -> News:
        try:
            kind, value = worker.recv()
        except (EOFError, OSError):
            process = self.started.pop(worker)
            process.join()
            raise Lost(f"exit code {process.exitcode}") from None
        if kind == "failed":
            raise type(value)(f"{name}, {value}")
        return kind, value


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that is started inherits it: Ctrl-C while its Python still imports would print a traceback."""
    mask = getattr(signal, "pthread_sigmask", None)  # not on Windows
    before = mask(signal.SIG_BLOCK, {signal.SIGINT}) if mask else None
    try:
        yield
    finally:
        if mask:
            mask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection) -> None:
    """In a new process: tasks, until the first one has no more or is killed. Ctrl-C is sent to all, and the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first = multiprocessing.parent_process()
    assert first is not None

    def end_with_it() -> None:
        first.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()
    while True:
        perform(pipe.recv(), pipe.send)


@contextmanager
def processes(count: int) -> Iterator[Workers]:
    """Several on this machine, each with one thread; none outlives this one, whatever happens."""
    workers = _Processes(count)
    try:
        yield workers
    finally:  # Ctrl-C too: what is unfinished resumes from its last state
        for process in workers.started.values():
            process.terminate()
            process.join()
