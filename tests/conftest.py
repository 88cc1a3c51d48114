"""Tiny tensors are many times faster on one thread, and the machine may be shared. What starts a process says so."""

import multiprocessing.process
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
# Ray's workers step back for all else on the machine: beside other work a test would wait for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# All tests of these need other processes.
PROCESSES = {"test_fsdp.py", "test_fsdp_widths.py", "test_ray.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in PROCESSES:
            item.add_marker(pytest.mark.process)
        if item.path.parent.name == "integrations":
            item.add_marker(pytest.mark.library)
    # The long ones first: at the end, when no work is left for the other cores, a test should be short.
    items.sort(key=lambda item: not any(item.iter_markers("process")) and not any(item.iter_markers("slow")))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_without_a_mark(request: pytest.FixtureRequest) -> Iterator[None]:
    """`make quick` stays quick: it leaves out what is marked, and nothing else starts a process."""

    start = subprocess.Popen.__init__

    def refuse(self: object, command: object = "", *args: Any, **options: Any) -> None:
        if not (
            isinstance(command, list) and command[0] == "git"
        ):  # takes no time: results say from which commit they are
            pytest.fail(f"this test starts a process ({command!r}): mark it with pytest.mark.process")
        start(self, command, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("process") is None:
            patch.setattr(subprocess.Popen, "__init__", refuse)
            patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        yield
