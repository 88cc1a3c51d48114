"""What `sensli compare list | run | show | report | tune` do."""

from __future__ import annotations

import argparse
import math

from sensli.text.tables import short_number
from sensli_lab.compare import report, work
from sensli_lab.compare.cli import size_of
from sensli_lab.compare.front import load_runs, rows
from sensli_lab.compare.jobs import Comparison, Job, RunStore
from sensli_lab.compare.methods import choose_methods, describe_method, methods
from sensli_lab.compare.tasks.registry import TASKS, find
from sensli_lab.errors import FAILED, BadComparison, NoResults, RunsFailed
from sensli_lab.work.cli import place_of
from sensli_lab.work.pages import Table, terminal_table


def _comparisons(args: argparse.Namespace) -> list[Comparison]:
    """What a command asks for, each task once, in the order of `TASKS`; a command that names none means all tasks and methods."""
    if args.seeds is not None and args.seeds < 1:
        raise BadComparison(f"--seeds must be at least 1, got {args.seeds}.")
    for budget in args.budget or ():
        if not 0 < budget < math.inf:
            raise BadComparison(f"--budget must be a number above 0 (for example 0.5), got {budget:g}.")
    names = getattr(args, "tasks", ["all", "long"])
    wanted = [find(name) for name in names if name not in ("all", "long")]
    asked = []
    for task in TASKS.values():
        if task in wanted or ("long" if task.long else "all") in names:
            size = size_of(task.name, args.preset, args.seeds, args.budget, getattr(args, "methods", ["all"]))
            chosen = choose_methods(task, size.methods)
            asked += [Comparison(task, chosen, size.seeds, budget) for budget in size.budgets]
    return asked


def _list(args: argparse.Namespace) -> None:
    store = RunStore(args.out)
    lines = []
    for one in _comparisons(args):
        stored = sum(store.path(job).exists() for seed in range(one.seeds) for job in one.jobs(seed))
        minutes = sum(job.cost for job in one.jobs(0)) / 60
        sizes = " to ".join(short_number(one.task.forward_flops[size]) for size in ("small", "large"))
        computed = f"{stored} of {len(one.methods) * one.seeds} runs"
        lines.append((one.task.name, one.task.title, sizes, f"{minutes:.1f} min", computed))
    header = ("task", "what it is", "FLOPs of a sample", "all methods, one seed", "computed")
    print(terminal_table(Table(header, tuple(lines))))
    known = methods(next(iter(TASKS.values()))).values()
    named = tuple((method.name, method.kind, describe_method(method)) for method in known)
    print(f"\n{terminal_table(Table(('method', 'kind', 'what it is'), named))}")


def _run(args: argparse.Namespace) -> None:
    place = place_of(args)
    asked = _comparisons(args)
    # seed by seed, not method by method: what is stopped early has pairs to compare
    seeds = range(max(one.seeds for one in asked))
    jobs: list[Job] = [job for seed in seeds for one in asked if seed < one.seeds for job in one.jobs(seed)]
    left_out = work.compute_runs(jobs, RunStore(args.out), args.data, place)
    failed = [line for line in left_out if f": {FAILED} " in line]
    if len(failed) < len(jobs):
        _show(args)
    if failed:
        raise RunsFailed(
            f"{len(failed)} of {len(jobs)} runs failed, whose errors are above; the others are stored. {'; '.join(failed)}. Run the same "
            "command again when the cause is mended, or choose other methods with --methods."
        )


def _show(args: argparse.Namespace) -> None:
    asked = _comparisons(args)
    missing: list[NoResults] = []
    for one in asked:
        try:
            found = rows(one.methods, load_runs(one, RunStore(args.out)))
        except NoResults as error:
            missing.append(error)
            continue
        print(f"\n{one.task.title}\n\n{terminal_table(report.table(found))}\n")
        print("\n".join(report.verdict_lines(found)).replace("`", ""))
    if len(missing) == len(asked):
        raise missing[0]
    for reason in missing:
        print(f"\n{reason}")


SECRET = 1000  # the first seed of a choice of learning rates: no table shows such runs


def _tune(args: argparse.Namespace) -> None:
    """Train every method with every factor, and print the losses and the best factors."""
    for factor in args.factors:
        if not 0 < factor < math.inf:
            raise BadComparison(f"--factors must be numbers above 0 (for example 0.5 1 2), got {factor:g}.")
    place, asked, store = place_of(args), _comparisons(args), RunStore(args.out)
    jobs = {
        (one.task.name, method.name, factor): [
            Job(one.task, method, SECRET + seed, one.budget, factor) for seed in range(one.seeds)
        ]
        for one in asked
        for method in one.methods
        for factor in sorted(set(args.factors))
    }
    work.compute_runs([job for some in jobs.values() for job in some], store, args.data, place)
    for one in asked:
        lines, best = [], {}
        for method in one.methods:
            means = {}
            for (task, name, factor), some in jobs.items():
                if (task, name) == (one.task.name, method.name):
                    found = [run.validation[-1] for job in some if (run := store.load(job)) is not None]
                    means[factor] = sum(found) / len(found) if found else math.nan
            best[method.name] = min(means, key=lambda factor: (math.isnan(means[factor]), means[factor]))
            lines.append((method.name, *(f"{mean:.4f}" for mean in means.values()), f"{best[method.name]:g}"))
        header = ("method", *(f"rate x {factor:g}" for factor in sorted(set(args.factors))), "best")
        print(f"\n{one.task.title}: validation loss at the end\n\n{terminal_table(Table(header, tuple(lines)))}")


def _report(args: argparse.Namespace) -> None:
    for path in report.write_comparison(RunStore(args.out), args.to or args.out / "report", _comparisons(args)):
        print(path)


COMMANDS = {"list": _list, "run": _run, "show": _show, "report": _report, "tune": _tune}
