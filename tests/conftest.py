"""Tiny tensors are many times faster on one thread, and the machine may be shared. What starts a process says so."""

import atexit
import gc
import multiprocessing.process
import os
import subprocess
from collections.abc import Generator, Iterator
from typing import Any

import pytest

# Ray's workers step back for all else on the machine: beside other work a test would wait for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# All tests of these need other processes.
PROCESSES = {"test_fsdp.py", "test_fsdp_widths.py", "test_ray.py"}


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no":
        return  # this process only hands out tests: its workers need not wait until it has imported torch
    if hasattr(config, "workerinput"):
        # The first to be registered is the last to be called. The controller waits for the end of its workers, and to take
        # apart all that was imported would take a second.
        atexit.register(os._exit, 0)
    import torch

    torch.set_num_threads(1)
    if not torch.accelerator.is_available():
        # torch would write down the whole stack three times per call, for devices that never start.
        torch.manual_seed = torch.default_generator.manual_seed


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """One more than cores where tests wait for other processes: what one worker leaves idle another one uses."""
    workers = yield
    alone = "not process" in config.option.markexpr or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ
    return workers if alone else workers + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if item.path.name in PROCESSES:
            item.add_marker(pytest.mark.process)
        if item.path.parent.name == "integrations":
            item.add_marker(pytest.mark.library)
    yield  # meanwhile `-m` takes out what it does
    items[:] = _dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The long tests first, and a share of them for each worker.

    `--dist worksteal` gives each worker one stretch of the list, and when that is done, the end of another's. Tests of a file stay
    together for the sake of what they share.
    """
    files: dict[str, list[pytest.Item]] = {}
    costs: dict[str, int] = {}  # roughly, in tenths of a second
    rest: list[pytest.Item] = []
    for item in items:
        cost = 50 if item.get_closest_marker("process") else 5
        if cost == 5 and not any(item.get_closest_marker(name) for name in ("library", "slow")):
            rest.append(item)
        else:
            file = str(item.path.parent if item.path.parent.name == "page" else item.path)  # which share one browser
            files.setdefault(file, []).append(item)
            costs[file] = costs.get(file, 0) + cost
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for file in sorted(files, key=lambda file: -costs[file]):
        least = loads.index(min(loads))
        shares[least] += files[file]
        loads[least] += costs[file]
    for number, share in enumerate(shares):
        stretch = len(items) * (number + 1) // workers - len(items) * number // workers
        fill = len(rest) if number == workers - 1 else max(0, stretch - len(share))
        share += rest[:fill]
        del rest[:fill]
    return [item for share in shares for item in share]


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: a search for garbage need not go through it
    gc.set_threshold(10_000, 10, 10)  # nor be made every few calls of a small model


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    torch.manual_seed(0)


# What takes no time: results say from which commit they are, and matplotlib looks for fonts once on a machine.
BRIEF = ("git", "fc-list")


@pytest.fixture(autouse=True)
def _no_process_without_a_mark(request: pytest.FixtureRequest) -> Iterator[None]:
    """`make quick` stays quick: it leaves out what is marked, and nothing else starts a process."""

    start = subprocess.Popen.__init__

    def refuse(self: object, command: object = "", *args: Any, **options: Any) -> None:
        if not (isinstance(command, list) and command[0] in BRIEF):
            pytest.fail(f"this test starts a process ({command!r}): mark it with pytest.mark.process")
        start(self, command, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("process") is None:
            patch.setattr(subprocess.Popen, "__init__", refuse)
            patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        yield
