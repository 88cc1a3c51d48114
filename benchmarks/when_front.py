"""The study of when, by the front ratio: what each trigger needs to reach a loss, against the best network of a fixed size.

The tasks, networks and FLOPs are those of `sensli compare`; all looks count. A call comes after as many steps each time, so that the
small network alone would make 40 of them. What the triggers watch is the training loss since the call before.

    python -m benchmarks.when_front --data DIR                           # half an hour on one core
    python -m benchmarks.when_front --show benchmarks/when_front.json    # the tables of the documentation
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sensli.growing import triggers
from sensli.growing.triggers import Trigger
from sensli.text.tables import text_table
from sensli_lab.compare.front import Front, LossCurve, front_ratios
from sensli_lab.compare.jobs import Job, Run
from sensli_lab.compare.methods import methods
from sensli_lab.compare.task import Task, TaskData
from sensli_lab.compare.tasks.registry import find
from sensli_lab.compare.training import JobTraining, flops_of_step, train
from sensli_lab.paper.image_sets import folder
from sensli_lab.work.statistics import interval

CALLS = 40  # of the small network within the FLOPs
MOST = 8  # growths
METHOD = "when"  # units by the largest merit; the triggers below say when
BUDGETS = {"spirals": 1.0, "fashion": 1.0}
SEEDS = {"spirals": 30, "fashion": 5}
# Chosen beforehand. The paper inserts one layer after a quarter of the training, or three after a fifth, two fifths and three fifths.
TRIGGERS: dict[str, Callable[[], Trigger]] = {
    "At(10), as in the paper": lambda: triggers.At(10),
    "At(8, 16, 24), as in the paper": lambda: triggers.At(8, 16, 24),
    "Every(5)": lambda: triggers.Every(5),
    "Plateau(3)": lambda: triggers.Plateau(3, threshold=0.01),
    "Diminishing()": lambda: triggers.Diminishing(),
}
Record = dict[str, Any]  # a curve, the calls of the growths, the share of the FLOPs that looks took


class Triggered(JobTraining):
    """A run of the comparison that asks a trigger, once after so many steps."""

    def __init__(self, job: Job, data: TaskData, trigger: Trigger) -> None:
        self._asked = trigger
        super().__init__(job, data)
        small = flops_of_step(job.task.network("small", job.seed), self.batches.at(0), job.task.loss)
        self._every = max(1, round(self.run.budget / small / CALLS))

    def _trigger(self) -> Trigger:
        return self._asked & triggers.Limit(growths=MOST)

    def _look_is_due(self) -> bool:
        return self.run.steps >= (self.run.looks + 1) * self._every


def study(task: Task, seed: int, data: TaskData, budget: float) -> dict[str, Record]:
    """All arms of one seed: the fixed sizes, which make the front, and the triggers."""
    known, found = methods(task), dict[str, Record]()
    for size in task.sizes:
        found[size] = _record(train(Job(task, known[size], seed, budget), data))
    for name, make in TRIGGERS.items():
        training = Triggered(Job(task, known[METHOD], seed, budget), data, make())
        while not training.finished:
            training.advance()
        run = training.ended()
        assert training.grower is not None
        growths = [growth.details["epoch"] for growth in training.grower.history]
        found[name] = {**_record(run), "growths": growths, "decisions": run.decisions / run.budget}
    return found


def _record(run: Run) -> Record:
    return {"flops": run.flops, "losses": run.validation, "test": run.test_loss}


def table(runs: Sequence[dict[str, Record]]) -> str:
    """One task: front ratios over paired seeds, as geometric means, and the test loss beside that of the small and the large network."""
    fixed = [name for name in runs[0] if name not in TRIGGERS]
    rows = []
    for name in (*fixed, *TRIGGERS):
        test = [run[name]["test"] for run in runs]
        row = [name, f"{sum(test) / len(test):.3f}"]
        row += [_shown([run[name]["test"] - run[other]["test"] for run in runs]) for other in ("small", "large")]
        if name in TRIGGERS:
            ratios = [[front_ratios(_curve(run[name]), [_curve(run[size]) for size in fixed])] for run in runs]
            front = Front.of(ratios)
            row += [str(factor) for factor in (front.end, front.most, front.mean, front.worst)]
            row.append(f"{sum(len(run[name]['growths']) for run in runs) / len(runs):.1f}")
        rows.append(row + [""] * (9 - len(row)))
    header = [
        "arm", "test loss", "minus small", "minus large", "ratio at the end", "anywhere, at most", "on average", "worst of each run",
        "growths",
    ]  # fmt: skip
    return text_table(header, rows)


def _curve(record: Record) -> LossCurve:
    return LossCurve(tuple(record["flops"]), tuple(record["losses"]))


def _shown(values: Sequence[float]) -> str:
    found = interval(torch.tensor(values, dtype=torch.float64))
    return f"{found.mean:+.3f} ± {found.high - found.mean:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, or show what it gave."""
    parser = argparse.ArgumentParser("benchmarks.when_front", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="folder with fashion_mnist (default: $SENSLI_DATA)")
    parser.add_argument(
        "--tasks", nargs="+", choices=BUDGETS, default=list(BUDGETS), metavar="TASK", help="default: all"
    )
    parser.add_argument("--seeds", type=int, help=f"default: {SEEDS}")
    parser.add_argument("--out", type=Path, default=Path("when_front.json"), help="default: %(default)s")
    parser.add_argument("--show", type=Path, help="only print the tables of a file that was written before")
    args = parser.parse_args(arguments)
    results: dict[str, list[dict[str, Record]]] = json.loads(args.show.read_text()) if args.show else {}
    names = [] if args.show else args.tasks
    for seed, name in itertools.product(range(args.seeds or max(SEEDS.values())), names):
        if seed >= (args.seeds or SEEDS[name]):
            continue
        task = find(name)
        data = task.load(folder(args.data), seed)
        results.setdefault(name, []).append(study(task, seed, data, BUDGETS[name]))
        args.out.write_text(json.dumps(results))
        print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    for name, runs in results.items():
        print(f"\n{name}, {len(runs)} seeds\n{table(runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
