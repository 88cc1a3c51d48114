"""Two checkouts side by side: `python -m benchmarks.versions OTHER_CHECKOUT` prints what this one costs in units of the other.

Each version lives in a separate process, which prepares everything once. Calls alternate, and processor seconds count, so a busy moment
of the machine hits both alike. The allocator keeps what it has: where it may return memory to the system, a large object at the end of the
heap decides whether the next call pays for thousands of pages, and the same code seems a tenth slower in one process than in the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another version, for example made by git worktree add")
    parser.add_argument("--rounds", type=int, default=40, help="calls of each (default: 40)")
    asked = parser.parse_args()
    if not (asked.other / "src" / "sensli").is_dir():
        parser.error(f"{asked.other} must be a checkout of sensli, but it has no folder src/sensli.")
    ours, theirs = _Version(HERE), _Version(asked.other.resolve())
    names = [name for name in ours.names if name in theirs.names]
    taken = {version: {name: [] for name in names} for version in (ours, theirs)}  # type: dict[_Version, dict[str, list[float]]]
    for _ in range(asked.rounds):
        for name in names:
            for version in (ours, theirs):
                taken[version][name].append(version.seconds(name))
    print(f"{'':32}{'median':>8}{'quickest':>10}   of this checkout / of the other, {asked.rounds} calls each")
    for name in names:
        mine, other = taken[ours][name], taken[theirs][name]
        print(f"{name:32}{statistics.median(mine) / statistics.median(other):8.2f}{min(mine) / min(other):10.2f}")


class _Version:
    """A process in which one checkout waits for the names of works."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, __file__, "--serve"]
        path = {"PYTHONPATH": str(root / "src")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **KEPT, **path}
        )
        where, *self.names = self._line().split("|")
        if not Path(where).is_relative_to(root):
            raise SystemExit(f"{root}: the process imported sensli from {where} instead.")

    def seconds(self, name: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("a version could not do what the other can; its error is above.")
        return line


def _works() -> dict[str, Callable[[], Any]]:
    """By public names alone, which all versions have."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    from sensli import Probe, find_sites, measure

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def plain(hidden: int, width: int) -> nn.Sequential:
        layers = [module for _ in range(hidden) for module in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def convolutional() -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))

    works: dict[str, Callable[[], Any]] = {}
    vectors, images = torch.randn(256, 256), torch.randn(32, 3, 32, 32)
    models = {
        "8 linear layers": (plain(8, 256), vectors),
        "32 linear layers": (plain(32, 256), vectors),
        "64 tiny layers": (plain(64, 8), vectors[:32, :8].clone()),
        "a small CNN": (convolutional(), images),
    }
    for name, (model, x) in models.items():
        y = torch.randint(0, 10, (len(x),))
        sites = find_sites(model, x[:1])

        def step(model: nn.Module = model, x: Any = x, y: Any = y) -> None:
            model.zero_grad()
            cross_entropy(model(x), y).backward()

        def probed(model: nn.Module = model, sites: Any = sites, step: Any = step) -> None:
            with Probe(model, sites):
                step()

        works[f"an ordinary step, {name}"] = step
        works[f"measure, {name}"] = partial(measure, model, sites, [(x, y)], cross_entropy)
        works[f"without ratio, {name}"] = partial(measure, model, sites, [(x, y)], cross_entropy, ratio=False)
        works[f"with Probe, {name}"] = probed
        works[f"find_sites, {name}"] = partial(find_sites, model, x[:1])
    return works


def _serve() -> None:
    import sensli

    works = _works()
    for work in works.values():
        work()
        work()
    print("|".join([str(sensli.__file__), *works]), flush=True)
    for line in sys.stdin:
        start = time.process_time()
        works[line.strip()]()
        print(time.process_time() - start, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        _serve()
    else:
        main()
