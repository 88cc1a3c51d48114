"""Ray tasks that yield news as they come: which one has some, what failed, whose worker was lost.

A task yields ``("share", how much is done)`` and ``("state", ...)`` on its way, and anything else at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sensli import __version__
from sensli.errors import SensliError
from sensli.paper.errors import PaperError
from sensli.paper.running.cluster import RayError
from sensli.paper.running.ray_worker import News, one_line

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
