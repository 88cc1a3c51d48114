"""Connecting to Ray: one on this machine, or the cluster at an address; every failure is one line."""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sensli.errors import MissingExtra
from sensli.growing.terminal import how_to_get
from sensli.paper.errors import PaperError
from sensli.paper.running.ray_worker import one_line

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
