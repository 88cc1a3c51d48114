"""The study of the default: in which way `preset="auto"` grows widths where a model has no stack of blocks, and when it doubles a stack.

Networks and seeds are others than those of any published table, and so is the data but for Fashion-MNIST. All spend the same FLOPs, checks
included.

    python -m benchmarks.preset --data DIR             # about an hour on one core; what is stored is not computed again
    python -m benchmarks.preset --data DIR --out benchmarks/preset.jsonl --show      # the tables of the documentation
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sensli import Grower, Rates
from sensli.text.tables import text_table
from sensli.triggers import Diminishing, Limit, Pays, Saturating, Spaced, Trigger
from sensli_lab.compare.front import LossCurve, front_ratios
from sensli_lab.compare.jobs import Job, Run
from sensli_lab.compare.methods import Method, methods
from sensli_lab.compare.task import Task, TaskData, TaskPart, plain_network, sizes_of
from sensli_lab.compare.tasks.code import CODE, HELD, sources
from sensli_lab.compare.tasks.images import FASHION, VGG, image_loader, vgg
from sensli_lab.compare.tasks.teacher import TEACHER
from sensli_lab.compare.tasks.text import cut, split_windows
from sensli_lab.compare.training import JobTraining
from sensli_lab.paper.machine import generator

FIRST = 1000  # seed
SEEDS = {
    "clothes": 1,
    "clothes, short": 1,
    "board": 6,
    "pixels": 1,
    "student": 6,
    "sources": 2,
    "sources, middle": 2,
    "sources, short": 2,
}
BLOCKS = ("sources, short", "sources, middle", "sources")  # the tasks with a stack of blocks
# Of their fixed sizes: factors on the learning rate, chosen on seed 1010 from a quarter, a half, one, two and four for each budget.
_SHORT = {"middle": 0.5, "deep": 0.5, "large": 0.25}
_MIDDLE = {"large": 0.25}
_LONG = {"deep": 2.0}

# ---- The tasks.


def _board(folder: Path | None, seed: int) -> TaskData:
    """Points on a board of four by four fields of two colours."""
    source = generator(seed, 0, "board")

    def part(count: int) -> TaskPart:
        x = 4 * torch.rand(count, 2, generator=source, device=source.device)
        return TaskPart(x - 2, x.floor().sum(1).remainder(2).long())

    return TaskData(part(800), part(400), part(400))


@lru_cache(maxsize=1)
def _sources() -> Tensor:
    """Those of torch, which is installed with this package."""
    return cut(b"\n".join(path.read_bytes() for path in sources(Path(torch.__file__).parent)))


def _load_sources(folder: Path | None, seed: int) -> TaskData:
    return split_windows(_sources(), HELD)


def _on_sources(name: str, steps: int, calls: int, rates: dict[str, float]) -> Task:
    return replace(CODE, name=name, load=_load_sources, steps=steps, calls=calls, rates=rates)


CLOTHES = replace(
    VGG,
    name="clothes",
    sizes=sizes_of(vgg, small=(3, 1, 1, 28), middle=(6, 1, 1, 28), large=(12, 1, 1, 28)),
    load=image_loader("fashion_mnist", 56_000, 4_000, 5_000),
    example=((1, 28, 28), torch.float32),
    optimizer=partial(torch.optim.Adam, lr=3e-3),
    steps=900,
    warmup=0.01,
    decay=0.2,
    points=50,
    calls=200,
    until=0.8,
)
BOARD = Task(
    name="board",
    title="",
    sizes=sizes_of(
        lambda units, layers: plain_network(2, units, layers, 2), small=(5, 2), middle=(10, 2), large=(24, 2)
    ),
    load=_board,
    example=((2,), torch.float32),
    optimizer=partial(torch.optim.AdamW, lr=0.01),
    batch=None,
    steps=1000,
    looked_at=800,
    calls=100,
    until=0.6,
)
TASKS = {
    "clothes": CLOTHES,
    "clothes, short": replace(CLOTHES, name="clothes-short", steps=150, calls=40),
    "board": BOARD,
    "pixels": replace(
        FASHION, name="pixels", sizes=sizes_of(FASHION.sizes["small"].func, small=(12, 3), middle=(32, 3), large=(96, 3)),  # type: ignore[attr-defined]
        load=image_loader("fashion_mnist", 30_000, 4_000, 5_000), optimizer=partial(torch.optim.AdamW, lr=2e-3), calls=100, until=0.6,
    ),
    "student": replace(
        TEACHER, name="student-adam", sizes=sizes_of(TEACHER.sizes["small"].func, small=(4,), middle=(8,), large=(16,)),  # type: ignore[attr-defined]
        optimizer=partial(torch.optim.Adam, lr=0.01), calls=100, until=0.6,
    ),
    "sources": _on_sources("sources", 2000, 200, _LONG),
    "sources, middle": _on_sources("sources-middle", 600, 150, _MIDDLE),
    "sources, short": _on_sources("sources-short", 200, 100, _SHORT),
}  # fmt: skip

# ---- The ways to grow.


def _often() -> Trigger:
    return Pays() | Diminishing()


def _spaced() -> Trigger:
    return _often() & Spaced()


def _slower() -> Trigger:
    return Diminishing() & Spaced()


def _near_its_end() -> Trigger:
    return Saturating(0.2, calls=16)


_PER_FLOP = {"what": "units", "per": "flops"}
WAYS: dict[str, tuple[Callable[[], Trigger], dict[str, Any]]] = {
    "by merit": (_often, {"what": "units", "per": None}),
    "by merit, spaced": (_spaced, {"what": "units", "per": None}),
    "by merit per FLOP, spaced": (_spaced, _PER_FLOP),
    "by merit per FLOP, spaced, warmed up": (_spaced, {**_PER_FLOP, "rates": Rates(warmup="auto")}),
    "all alike, a half, slower, spaced": (_slower, {"what": "uniform", "units": 0.5}),
    "all alike, a half, near its end": (_near_its_end, {"what": "uniform", "units": 0.5}),
}
_STACK = {"strategy": "stack", "order": "interleave"}
# Share, apart and steps.
_ASKED = ((0.2, 2, 0), (0.2, 2, 1000), (0.2, 1, 1000), (0.3, 1, 1000), (0.4, 2, 1000), (0.4, 1, 1000))
WHEN: dict[str, tuple[Callable[[], Trigger], dict[str, Any]]] = {
    f"{share:g}, apart {apart:g}{f', after {steps:,} steps' if steps else ''}": (
        partial(Saturating, share, calls=16, apart=apart, steps=steps),
        _STACK,
    )
    for share, apart, steps in _ASKED
}


def ways(task: str) -> dict[str, tuple[Callable[[], Trigger], dict[str, Any]]]:
    """The arms of a task that grow."""
    return WHEN if task in BLOCKS else WAYS


class _Training(JobTraining):
    def _grower(self, model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
        trigger, options = (WAYS | WHEN)[self.job.method.name]
        return Grower(
            model, optimizer, trigger=trigger() & Limit(factor=10), example=self.task.sample(), scheduler=scheduler, max_factor=None,
            max_check_share="auto", **{"rates": Rates(), **options},
        )  # fmt: skip


def run(task: Task, arm: str, seed: int, data: Path) -> Run:
    """One arm under one seed."""
    torch.set_num_threads(1)
    known = methods(task)
    method = known[arm] if arm in task.sizes else Method(arm, arm, "sensli", waits=True)
    own = None if task.tokens else 1.0  # the learning rates of a transformer's sizes differ
    training = _Training(Job(task, method, seed, lr_factor=own), task.load(data, seed))
    while not training.finished:
        training.advance()
    return training.ended()


# ---- The results, one line for each run.


def _stored(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(line["task"], line["arm"], line["seed"]): line for line in lines}


def compute(path: Path, data: Path, tasks: list[str]) -> None:
    """Compute what is missing; each run is on disk before the next one begins."""
    for name in tasks:
        task = TASKS[name]
        for seed in range(FIRST, FIRST + SEEDS[name]):
            for arm in (*task.sizes, *ways(name)):
                if (name, arm, seed) in _stored(path):
                    continue
                found = run(task, arm, seed, data)
                line = {
                    "task": name, "arm": arm, "seed": seed, "flops": [round(each / found.budget, 5) for each in found.flops],
                    "validation": [round(each, 5) for each in found.validation], "parameters": found.parameters,
                    "checks": round(found.decisions / found.budget, 5),
                    "grown": [[round(flops / found.budget, 4), site] for flops, site in found.grown],
                }  # fmt: skip
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{name}, {arm}, seed {seed}: {found.validation[-1]:.4f}", flush=True)


def rows(path: Path, task: str) -> Iterator[tuple[str, ...]]:
    """Means over the seeds: the loss at the end, FLOPs beside the best fixed size, growths, parameters, checks."""
    found = {(arm, seed): line for (name, arm, seed), line in _stored(path).items() if name == task}
    sizes = tuple(TASKS[task].sizes)
    for arm in (*sizes, *ways(task)):
        mine = [line for (name, _), line in found.items() if name == arm]
        if not mine:
            continue
        ends, worst = [], []
        for line in mine:
            fixed = [_curve(found[size, line["seed"]]) for size in sizes if (size, line["seed"]) in found]
            if len(fixed) == len(sizes):
                ratios = front_ratios(_curve(line), fixed)
                ends.append(math.log(ratios.end))
                worst.append(math.log(ratios.worst))
        yield (
            arm, f"{_mean([line['validation'][-1] for line in mine]):.4f}", f"{math.exp(_mean(ends)):.2f}", f"{math.exp(_mean(worst)):.2f}",
            f"{_mean([len(line['grown']) for line in mine]):.1f}", f"{_mean([line['parameters'] for line in mine]):.0f}",
            f"{_mean([line['checks'] for line in mine]):.1%}", str(len(mine)),
        )  # fmt: skip


def _curve(line: dict[str, Any]) -> LossCurve:
    return LossCurve(tuple(line["flops"]), tuple(line["validation"]))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def main() -> None:
    """Compute and show."""
    parser = argparse.ArgumentParser("benchmarks.preset", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the images")
    parser.add_argument("--out", type=Path, default=Path("preset.jsonl"), help="default: %(default)s")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--show", action="store_true", help="compute nothing")
    given = parser.parse_args()
    if not given.show:
        compute(given.out, given.data, given.tasks)
    for name in given.tasks:
        header = ("arm", "loss", "FLOPs at the end", "at worst", "growths", "parameters", "checks", "seeds")
        print(f"\n{name}\n\n{text_table(header, list(rows(given.out, name)))}")


if __name__ == "__main__":
    main()
