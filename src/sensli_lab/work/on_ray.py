"""Ray tasks as workers, on one machine or many.

News come back as the stream that each task yields, so the machines need no shared disk. The numbers are the same as without Ray, to the
bit on the same processor with as many threads.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from sensli import __version__
from sensli.cli.terminal import how_to_get
from sensli.errors import MissingExtra, SensliError
from sensli_lab.errors import PaperError
from sensli_lab.work.workers import TELL_EVERY, Lost, News, WorkCall, Workers, one_line, pack, perform


def stream(version: str, payload: bytes) -> Iterator[News]:
    """What a Ray task does on its machine: the news of a packed task, as they come."""
    host = platform.node()
    if version != __version__:  # before anything is unpacked
        raise PaperError(
            f"on {host}: sensli is {__version__} there and {version} here. Install the same version on every machine."
        )
    news: SimpleQueue[News] = SimpleQueue()
    cancelled = threading.Event()
    # The task calls back while a stream is asked, so a thread runs between them.
    given = (payload, news.put, f"on {host}", "--on ray", f" on {host}", cancelled)
    threading.Thread(target=perform, args=given, daemon=True).start()
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


class _Tasks(Workers):
    """Each task has a worker of its own; Ray keeps the queue. A key is the stream of a task."""

    relief = "give each task more CPUs with --ray-cpus, so that fewer run in parallel"

    def __init__(self, ray: Any, ours: bool, cpus: int | None, save_every: float) -> None:
        super().__init__()
        self.ray, self.may_fetch, self.cpus, self.save_every = ray, ours, cpus, save_every
        # Ray would repeat a lost task from its beginning; it is to be repeated from its last state.
        self._task = ray.remote(max_retries=0, num_returns="streaming", scheduling_strategy="SPREAD")(stream)
        self.nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        largest = int(max((node.get("CPU", 0) for node in self.nodes), default=0))
        if largest < 1:
            raise RayError(
                "this Ray has no CPUs. Add a machine that has some: ray start --address HOST:PORT --num-cpus N"
            )
        if cpus is not None and not 1 <= cpus <= largest:
            raise RayError(f"--ray-cpus must be between 1 and {largest} (the CPUs of the largest machine), got {cpus}.")

    def send(self, call: WorkCall) -> Any:
        task = self._task.options(num_cpus=call.cpus, num_gpus=call.gpus, name="sensli")
        return task.remote(__version__, pack(call))

    def ready(self) -> Any:
        return self.ray.wait(list(self.running))[0][0]

    def news(self, worker: Any, name: str) -> News:
        try:
            return self.ray.get(next(worker))  # type: ignore[no-any-return]
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SensliError):
                raise type(error.cause)(f"{name}, {error.cause}") from error
            advice = f"Is sensli {__version__} installed on every machine?"
            raise PaperError(f"{name}: the task failed ({one_line(error.cause or error)}). {advice}") from error
        except self.ray.exceptions.RayError as error:
            raise Lost(f"{type(error).__name__}: {one_line(error)}") from None


@contextmanager
def ray_place(address: str | None = None, cpus: int | None = None, save_every: float = 20.0) -> Iterator[Workers]:
    """Ray at `address` (default: one on this machine), `cpus` for each task. In the end none is left in a cluster that stays."""
    with connected(address) as (ray, ours):
        tasks = _Tasks(ray, ours, cpus, save_every)  # a state goes over the network: less often than to a disk
        try:
            yield tasks
        except ray.exceptions.RayError as error:
            raise RayError(
                f"the connection to Ray was lost ({one_line(error)}). Run the same command again to resume."
            ) from None
        finally:
            with suppress(Exception):  # the connection may be what was lost
                for task in tasks.running:
                    ray.cancel(task)  # with force=True Ray ends this process if the task has just finished
