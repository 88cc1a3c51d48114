"""Between this process and the workers: tasks go out, a mailbox keeps what they report, answers come back or are raised."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sensli._version import __version__
from sensli.paper.cluster import Cluster, RayError, one_line
from sensli.paper.config import Settings
from sensli.paper.engines import engine
from sensli.paper.errors import PaperError
from sensli.paper.machine import Machine
from sensli.paper.pieces import Order, Piece
from sensli.paper.ray_worker import Failed, unpacked


@dataclass(frozen=True)
class Share:
    """What a task takes of its machine."""

    machine: Machine
    cpus: int = 1
    gpus: int = 0


class Tasks:
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
                from sensli.paper.ray_worker import work_on
            except ImportError as error:
                return host, f"sensli cannot be imported there ({error}). Install sensli {version} on every machine."
            if found != version:
                return host, f"sensli is {found} there and {version} here. Install the same version on every machine."
            return host, work_on(payload, lambda **news: box.put.remote(number, news))

        # Ray would do a lost task again from where it began; we do, from its last state.
        self.task = ray.remote(max_retries=0, scheduling_strategy="SPREAD")(task)
        beside = ray.get_runtime_context().get_node_id()
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(beside, soft=True)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": near}
        self.box = ray.remote(**options)(Mailbox).remote()
        self.asked = self.box.collect.remote()
        self.sent: list[Any] = []  # and not answered yet

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
        self.sent.remove(reference)
        host, content = self.ray.get(reference)
        if isinstance(content, str):
            raise RayError(f"{host}: {content}")
        result = unpacked(content)
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

    def news(self, wait: float = 0.0) -> dict[int, dict[str, Any]]:
        """What has been reported since the last time; never waits for a busy mailbox longer than told, and loses nothing by that."""
        if not self.ray.wait([self.asked], timeout=wait)[0]:
            return {}
        try:
            mail: dict[int, dict[str, Any]] = self.ray.get(self.asked)
        except self.ray.exceptions.RayError:  # the mailbox is being started again; the tasks go on
            mail = {}
        self.asked = self.box.collect.remote()
        return mail

    def close(self) -> None:
        """Nothing of ours goes on in a cluster that does."""
        with suppress(Exception):  # the connection may be what was lost
            if self.sent:
                # To cancel what has just finished ends this process: Ray takes it for a broken state of its own.
                _, running = self.ray.wait(self.sent, num_returns=len(self.sent), timeout=0)
                for reference in running:
                    self.ray.cancel(reference, force=True)
            self.ray.kill(self.box)
