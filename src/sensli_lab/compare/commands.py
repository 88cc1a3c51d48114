"""What `sensli compare list | run | show | report` do."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sensli.text.tables import short_number
from sensli_lab.compare import report, work
from sensli_lab.compare.front import load, rows
from sensli_lab.compare.jobs import Job, RunStore
from sensli_lab.compare.methods import Method, chosen, methods
from sensli_lab.compare.presets import CompareSize, size_of
from sensli_lab.compare.report import table, verdict
from sensli_lab.compare.task import Task
from sensli_lab.compare.tasks.registry import TASKS, find
from sensli_lab.errors import FAILED, BadComparison, NoResults, RunsFailed
from sensli_lab.paper.tables import Table, plain
from sensli_lab.work.options import place_of


def execute(args: argparse.Namespace) -> None:
    """Do what a command asks for."""
    if args.seeds is not None and args.seeds < 1:
        raise BadComparison(f"--seeds must be at least 1, got {args.seeds}.")
    for budget in args.budget or ():
        if not 0 < budget < math.inf:
            raise BadComparison(f"--budget must be a number above 0 (for example 0.5), got {budget:g}.")
    {"list": _list, "run": _run, "show": _show, "report": _report}[args.compare_command](args)


@dataclass(frozen=True)
class Asked:
    """One task with one factor on its FLOPs, as far as a command concerns it."""

    task: Task
    size: CompareSize
    budget: float

    @property
    def methods(self) -> list[Method]:
        return chosen(self.task, self.size.methods)


def _asked(args: argparse.Namespace, tasks: Sequence[Task]) -> list[Asked]:
    found = []
    for task in tasks:
        size = size_of(task.name, args.preset, args.seeds, args.budget, getattr(args, "methods", None))
        found += [Asked(task, size, budget) for budget in size.budgets]
    return found


def _named(names: Sequence[str]) -> list[Task]:
    """The tasks of these names, each once, in the order of `TASKS`."""
    wanted = [find(name) for name in names if name != "all"]
    return [task for task in TASKS.values() if "all" in names or task in wanted]


def _list(args: argparse.Namespace) -> None:
    store = RunStore(args.out)
    lines = []
    for one in _asked(args, list(TASKS.values())):
        task, known = one.task, methods(one.task)
        stored = sum(
            store.path(Job(task, method, seed, one.budget)).exists()
            for method in known.values()
            for seed in range(one.size.seeds)
        )
        seconds = sum(Job(task, method, 0, one.budget).cost for method in known.values())
        sizes = " to ".join(short_number(task.forward_flops[size]) for size in ("small", "large"))
        lines.append(
            (task.name, task.title, sizes, f"{seconds / 60:.1f} min", f"{stored} of {len(known) * one.size.seeds} runs")
        )
    header = ("task", "what it is", "FLOPs of a sample", "all methods, one seed", "computed")
    print(plain(Table(header, tuple(lines))))
    named = tuple((one.name, one.kind, one.what) for one in methods(next(iter(TASKS.values()))).values())
    print(f"\n{plain(Table(('method', 'kind', 'what it is'), named))}")


def _run(args: argparse.Namespace) -> None:
    place = place_of(args)
    asked = [(one, one.methods) for one in _asked(args, _named(args.tasks))]
    # seed by seed, not method by method: what is stopped early has pairs to compare
    jobs = [
        Job(one.task, method, seed, one.budget)
        for seed in range(max(one.size.seeds for one, _ in asked))
        for one, wanted in asked
        if seed < one.size.seeds
        for method in wanted
    ]
    left_out = work.compute(jobs, RunStore(args.out), args.data, place)
    failed = [line for line in left_out if f": {FAILED} " in line]
    if len(failed) < len(jobs):
        _show(args)
    if failed:
        raise RunsFailed(
            f"{len(failed)} of {len(jobs)} runs failed, whose errors are above; the others are stored. {'; '.join(failed)}. Run the same "
            "command again when the cause is mended, or choose other methods with --methods."
        )


def _show(args: argparse.Namespace) -> None:
    asked = [(one, one.methods) for one in _asked(args, _named(args.tasks))]
    missing: list[NoResults] = []
    for one, wanted in asked:
        try:
            found = rows(wanted, load(one.task, wanted, one.size.seeds, one.budget, RunStore(args.out)))
        except NoResults as error:
            missing.append(error)
            continue
        print(f"\n{one.task.title}\n\n{plain(table(found))}\n")
        print("\n".join(verdict(found)).replace("`", ""))
    if len(missing) == len(asked):
        raise missing[0]
    for one_missing in missing:
        print(f"\n{one_missing}")


def _report(args: argparse.Namespace) -> None:
    wanted = [(one.task, one.size.seeds, one.budget) for one in _asked(args, list(TASKS.values()))]
    for path in report.write(RunStore(args.out), args.to or args.out / "report", wanted):
        print(path)
