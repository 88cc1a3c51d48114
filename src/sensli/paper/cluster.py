"""Getting hold of Ray: a local one of our own, or the cluster at an address; every failure is one line.

Ray is not a dependency, and noisy: it is imported here only, and what it would print goes to its own log files.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sensli.errors import MissingExtra
from sensli.growing.terminal import how_to_get
from sensli.paper.errors import PaperError

PATIENCE = 10.0  # seconds for a machine to answer
_LOCAL = {"RAY_USAGE_STATS_ENABLED": "0"}
# Where something answers that is no Ray, these end the attempt after half a minute instead of a quarter of an hour.
_REMOTE = {"RAY_py_gcs_connect_timeout_s": "10", "RAY_NUM_REDIS_GET_RETRIES": "1"}


class RayError(PaperError):
    """Ray cannot be started or reached, or cannot give what is asked for."""


@dataclass(frozen=True)
class Cluster:
    ray: Any  # the module: it has no types worth the time that reading them takes
    ours: bool  # started here, so it lives on this machine and ends with us

    def machines(self) -> list[dict[str, float]]:
        """What each machine has to give: CPU, GPU, memory."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def total(self, kind: str) -> int:
        return int(sum(machine.get(kind, 0) for machine in self.machines()))

    def largest(self, kind: str) -> int:
        return int(max((machine.get(kind, 0) for machine in self.machines()), default=0))


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """Ray, shut down at the end in all cases; one that the caller has started already is used as it is, and stays."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _check(address)
    ours = address == "local"
    with _environment(_LOCAL if ours else _REMOTE):
        ray = _module()
        if ray.is_initialized():
            with _no_messages(ray):
                yield Cluster(ray, ours=False)
            return
        try:
            _start(ray, address)
            with _no_messages(ray):
                yield Cluster(ray, ours)
        finally:
            ray.shutdown()


def _module() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(
            f"--on ray needs Ray, which is not installed ({error}). Get it with: {how_to_get('ray')}"
        ) from None


def _check(address: str) -> None:
    """Ray waits for minutes where nobody answers, and says little then."""
    if address in ("local", "auto"):
        return
    found = re.fullmatch(r"(?:ray://)?(\[[^\]]+\]|[^:/\s]+):(\d+)", address)
    if not found or not 0 < int(found[2]) < 65536:
        raise RayError(
            f"--ray-address {address}: not an address. Give HOST:PORT of the cluster's head (6379 where `ray start --head` was "
            "not told another port), 'auto' on a machine of the cluster, or nothing for a Ray on this machine."
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), PATIENCE).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RayError(
            f"--ray-address {address}: nobody answers there ({reason}). Is the cluster up (`ray start --head` on its first "
            "machine), and may this machine reach it?"
        ) from None


def _start(ray: Any, address: str) -> None:
    options = {"include_dashboard": False} if address == "local" else {}
    try:
        with _own_words():
            ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False, **options)
    except Exception as error:  # of many kinds, some of them bare RuntimeErrors
        place = "Ray on this machine" if address == "local" else f"--ray-address {address}"
        raise RayError(f"{place}: no connection ({one_line(error)}). {_advice(address, str(error))}") from None


def _advice(address: str, text: str) -> str:
    if "ersion mismatch" in text:
        return "Use the same versions of Ray and Python here and on the cluster."
    if address == "local":
        return "Leave out --on ray to compute in this process."
    if address == "auto":
        return "Start a cluster with `ray start --head`, or leave out --ray-address for a Ray of our own."
    return "This machine must be part of the cluster: `ray start --address HOST:PORT` first, or run the command on its head."


def one_line(error: object) -> str:
    """The first lines of a text of Ray's, as one."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    words = " ".join(text.split())
    return words if len(words) <= 300 else words[:300].rsplit(" ", 1)[0] + " ..."


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Settings of Ray that it takes from the environment only; what the user has set there counts."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextmanager
def _own_words() -> Iterator[None]:
    """Ray's C++ parts write warnings to the standard error, past every logger: they are kept from the terminal."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def _no_messages(ray: Any) -> Iterator[None]:
    """A lost worker makes Ray print a paragraph into our standard output, for which it has no switch; we say it in a line."""
    worker = ray._private.worker
    kept = getattr(worker, "print_to_stdstream", None)
    if kept is None:  # another version: noise, but no harm
        yield
        return
    worker.print_to_stdstream = lambda *arguments, **options: None
    try:
        yield
    finally:
        worker.print_to_stdstream = kept
