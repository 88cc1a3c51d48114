"""What `sensli compare list | run | show | report` do."""

from __future__ import annotations

import argparse
import math

from sensli.paper.compare import report, work
from sensli.paper.compare.errors import BadComparison
from sensli.paper.compare.job import Job
from sensli.paper.compare.methods import chosen, methods
from sensli.paper.compare.on_ray import Ray
from sensli.paper.compare.store import Store
from sensli.paper.compare.summary import load, rows
from sensli.paper.compare.tables import table, verdict
from sensli.paper.compare.tasks import TASKS, find
from sensli.paper.report.document import Table
from sensli.paper.report.tables import plain
from sensli.text.tables import short_number


def execute(args: argparse.Namespace) -> None:
    """Do what a command asks for."""
    if args.seeds < 1:
        raise BadComparison(f"--seeds must be at least 1, got {args.seeds}.")
    for budget in args.budget if isinstance(args.budget, list) else [args.budget]:
        if not 0 < budget < math.inf:
            raise BadComparison(f"--budget must be a number above 0 (for example 0.5), got {budget:g}.")
    {"list": _list, "run": _run, "show": _show, "report": _report}[args.compare_command](args)


def _list(args: argparse.Namespace) -> None:
    store = Store(args.out)
    lines = []
    for task in TASKS.values():
        known = methods(task)
        stored = sum(
            store.path(Job(task, method, seed, args.budget)).exists()
            for method in known.values()
            for seed in range(args.seeds)
        )
        seconds = sum(Job(task, method, 0, args.budget).seconds() for method in known.values())
        sizes = " to ".join(short_number(task.forward_flops[size]) for size in ("small", "large"))
        lines.append(
            (task.name, task.title, sizes, f"{seconds / 60:.1f} min", f"{stored} of {len(known) * args.seeds} runs")
        )
    header = ("task", "what it is", "FLOPs of a sample", "all methods, one seed", "computed")
    print(plain(Table(header, tuple(lines))))
    named = tuple((one.name, one.kind, one.what) for one in methods(next(iter(TASKS.values()))).values())
    print(f"\n{plain(Table(('method', 'kind', 'what it is'), named))}")


def _run(args: argparse.Namespace) -> None:
    if args.jobs < 1:
        raise BadComparison(f"--jobs must be at least 1, got {args.jobs}.")
    ray = _ray(args)
    task = find(args.task)
    wanted = chosen(task, args.methods)
    # seed by seed, not method by method: what is stopped early has pairs to compare
    jobs = [Job(task, method, seed, args.budget) for seed in range(args.seeds) for method in wanted]
    work.compute(jobs, Store(args.out), args.data, args.jobs, ray)
    _show(args)


def _ray(args: argparse.Namespace) -> Ray | None:
    if args.on != "ray":
        for name in ("ray_address", "ray_cpus"):
            if getattr(args, name) is not None:
                raise BadComparison(f"--{name.replace('_', '-')} needs --on ray. Add --on ray, or leave it out.")
        return None
    if args.jobs != 1:
        raise BadComparison(f"--jobs must be 1 with --on ray, which has its own processes, got {args.jobs}.")
    return Ray(args.ray_address, args.ray_cpus if args.ray_cpus is not None else 1)


def _show(args: argparse.Namespace) -> None:
    task = find(args.task)
    wanted = chosen(task, args.methods)
    found = rows(wanted, load(task, wanted, args.seeds, args.budget, Store(args.out)))
    print(f"\n{task.title}\n\n{plain(table(found))}\n")
    print("\n".join(verdict(found)).replace("`", ""))


def _report(args: argparse.Namespace) -> None:
    for path in report.write(Store(args.out), args.to or args.out / "report", args.seeds, args.budget):
        print(path)
