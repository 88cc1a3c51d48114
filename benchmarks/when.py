"""The study of when: `Diminishing` against `Every` and `Plateau`, with and without a trial, and against the networks that never grow.

All spend the same FLOPs, looks and trials included. The small network, and the large one that `Every` ends with, are trained beside them.

    python -m benchmarks.when --data DIR          # both tasks; about two minutes on one core
    python -m benchmarks.when --show when.json    # the tables again
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.horizon_tasks import TASKS, Batch, Task, step
from sensli import Grower, Trial, replay, triggers
from sensli.growing.triggers import Trigger
from sensli.text.tables import text_table
from sensli_lab.paper.image_sets import folder
from sensli_lab.work.statistics import interval

EPOCHS = 30  # of the small network: the budget of all
TRIAL = 2  # epochs
SEEDS = 4
# Chosen beforehand, so that each could look about as often: three growths at most, as all.
TRIGGERS: dict[str, Callable[[], Trigger]] = {
    "Every(8)": lambda: triggers.Every(8),
    "Plateau(3)": lambda: triggers.Plateau(3, threshold=0.01),
    "Diminishing()": lambda: triggers.Diminishing(),
}
Run = dict[
    str, dict[str, Any]
]  # of one seed, by arm: the losses at the end, growths, and the share of the FLOPs that trials lost


class Training:
    """One network until its FLOPs are spent; what looks and trials cost is paid from the same budget."""

    def __init__(self, task: Task, seed: int, model: nn.Module) -> None:
        self.task, self.model = task, model
        self.optimizer = task.optimizer(model)
        self.batches = task.batches(torch.Generator().manual_seed(seed))
        self.spent = self.lost = 0

    def epochs(self, budget: int) -> Iterator[list[float]]:
        """Train by epochs; the losses of each."""
        while self.spent < budget:
            cost = self.task.flops(self.model)
            steps = min(self.task.epoch, -(-(budget - self.spent) // cost))
            self.spent += steps * cost
            yield [step(self.model, self.optimizer, batch) for batch in itertools.islice(self.batches, steps)]

    def look(self, grower: Grower, data: Sequence[Batch], losses: Sequence[float]) -> None:
        """One call of the Grower, and what it costs."""
        samples = sum(len(x) for x, _ in data)
        before, known = self.task.flops(self.model) * samples // self.task.batch, len(grower.history.record.decisions)
        grower.step(data, cross_entropy, metric=sum(losses) / len(losses))
        for look in grower.history.record.decisions[known:]:
            self.spent += before + (look.tried.flops if look.tried else 0)
            self.lost += look.tried.lost if look.tried else 0


def study(task: Task, seed: int) -> Run:
    """All arms from the same start."""
    torch.manual_seed(seed)
    start, run, large = task.network(), Run(), None
    budget = EPOCHS * task.epoch * task.flops(start)
    x, y = task.train
    for name, trial in itertools.product(TRIGGERS, (False, True)):
        training = Training(task, seed, copy.deepcopy(start))
        tried = Trial(TRIAL * task.epoch, batches=training.batches) if trial else None
        trigger = TRIGGERS[name]() & triggers.Limit(growths=3)
        grower = Grower(
            training.model, training.optimizer, preset="paper",
                example=x[:1], trigger=trigger, tau=0.0, what="both", max_factor=None, trial=tried
        )  # fmt: skip
        for losses in training.epochs(budget):
            worst = (1 + tried.candidates) * tried.steps * task.flops(training.model) if tried else 0
            if training.spent + worst <= budget:  # no trial overdraws it
                training.look(grower, [(x[:500], y[:500])], losses)
        growths = [growth.call for growth in grower.history]
        run[f"{name}, tried" if trial else name] = {
            **task.losses(training.model),
            "growths": growths,
            "lost": training.lost / budget,
            "spent": training.spent / budget,
        }
        if name == "Every(8)" and not trial:
            torch.manual_seed(seed)
            large = _afresh(replay(task.network(), grower.history))
    assert large is not None
    for name, model in (("never grown", copy.deepcopy(start)), ("large from the start", large)):
        training = Training(task, seed, model)
        for _ in training.epochs(budget):
            pass
        run[name] = {**task.losses(training.model), "growths": [], "lost": 0.0, "spent": training.spent / budget}
    return run


def _afresh(model: nn.Module) -> nn.Module:
    """All layers as they are when they are built: a network of this size from scratch."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return model


def table(runs: Sequence[Run]) -> str:
    """One task: losses, and their differences to the small network, over paired seeds."""
    rows = []
    for name in runs[0]:
        row = [name]
        for part in ("training", "held out"):
            values = [run[name][part] for run in runs]
            less = [run[name][part] - run["never grown"][part] for run in runs]
            row += [f"{sum(values) / len(values):.3f}", _shown(less)]
        count = sum(len(run[name]["growths"]) for run in runs) / len(runs)
        lost = sum(run[name]["lost"] for run in runs) / len(runs)
        rows.append([*row, f"{count:.1f}", f"{lost:.0%}"])
    header = ["arm", "training loss", "- never grown", "held-out loss", "- never grown", "growths", "lost in trials"]
    most = max(arm["spent"] for run in runs for arm in run.values())
    note = f"{len(runs)} seeds; FLOPs spent: at most {most:.3f} times the budget; differences are paired, mean ± 95 %"
    return f"{text_table(header, rows)}\n{note}"


def _shown(values: Sequence[float]) -> str:
    found = interval(torch.tensor(values, dtype=torch.float64))
    return f"{found.mean:+.3f} ± {found.high - found.mean:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, or show what it gave."""
    parser = argparse.ArgumentParser("benchmarks.when", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="folder with fashion_mnist (default: $SENSLI_DATA)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("when.json"), help="default: %(default)s")
    parser.add_argument("--show", type=Path, help="only print the tables of a file that was written before")
    args = parser.parse_args(arguments)
    results: dict[str, list[Run]] = json.loads(args.show.read_text()) if args.show else {}
    tasks = {} if args.show else {name: TASKS[name](folder(args.data)) for name in args.tasks}
    for seed, name in itertools.product(range(args.seeds), tasks):
        results.setdefault(name, []).append(study(tasks[name], seed))
        args.out.write_text(json.dumps(results, indent=1))
        print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    for name, runs in results.items():
        print(f"\n{name}\n{table(runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
