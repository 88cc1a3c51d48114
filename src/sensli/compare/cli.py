"""`sensli compare list | run | show | report`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from sensli.compare import report, work
from sensli.compare.errors import BadComparison
from sensli.compare.job import Job
from sensli.compare.methods import KINDS, chosen, methods
from sensli.compare.store import Store
from sensli.compare.summary import load, rows
from sensli.compare.tables import table, verdict
from sensli.compare.tasks import TASKS, find
from sensli.paper.report.document import Table
from sensli.paper.report.tables import plain
from sensli.text.tables import short_number

RESULTS = Path("compare-results")
DEFAULT = ("fixed", "sensli", "control")


def add_parser(subparsers: Any) -> None:
    """Add `compare` to a parser's subcommands; `args.run(args)` then does the work and raises if something goes wrong."""
    text = "growth methods and fixed networks side by side, at equal FLOPs: list, run, show, report"
    parser = subparsers.add_parser(
        "compare",
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog="example: sensli compare run spirals --seeds 10, then sensli compare report --to page",
    )
    parser.set_defaults(run=execute)
    commands = parser.add_subparsers(dest="compare_command", required=True, metavar="list|run|show|report")

    def command(name: str, words: str, example: str) -> argparse.ArgumentParser:
        epilog = f"example: sensli compare {name}{example}"
        one: argparse.ArgumentParser = commands.add_parser(name, help=words, description=words, epilog=epilog)
        one.add_argument(
            "--out", type=Path, default=RESULTS, metavar="DIR", help=f"results folder (default: {RESULTS})"
        )
        one.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 0 to N - 1 (default: 5)")
        factor = "a factor on the FLOPs that the task has (default: 1)"
        one.add_argument("--budget", type=float, default=1.0, metavar="F", help=factor)
        return one

    command("list", "List the tasks and their methods: what they are, what they cost, what is already computed.", "")
    run = command(
        "run", "Compute what is missing, then show it. An interrupted run resumes where it stopped.",
        " spirals --methods small large both --seeds 10",
    )  # fmt: skip
    show = command("show", "Show the table of a task from stored results.", " spirals")
    for one in (run, show):
        one.add_argument("task", metavar="TASK", help=f"one of {', '.join(TASKS)}")
        names = f"names from 'sensli compare list', or {', '.join(KINDS)}, all (default: {' '.join(DEFAULT)})"
        one.add_argument("--methods", nargs="+", default=list(DEFAULT), metavar="METHOD", help=names)
    run.set_defaults(resumes=True)
    where = "folder of the images, or where to download them to (default: SENSLI_DATA, otherwise data)"
    run.add_argument("--data", type=Path, metavar="DIR", help=where)
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, each with one thread (default: 1)")
    written = command("report", "Write verdicts, tables and figures as Markdown and HTML.", " --to page")
    written.add_argument("--to", type=Path, metavar="DIR", help="folder of the report (default: report in the results)")


def execute(args: argparse.Namespace) -> None:
    """Do what a command asks for."""
    if args.seeds < 1:
        raise BadComparison(f"--seeds must be at least 1, got {args.seeds}.")
    if not 0 < args.budget < math.inf:
        raise BadComparison(f"--budget must be a number above 0 (for example 0.5), got {args.budget:g}.")
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
    task = find(args.task)
    wanted = chosen(task, args.methods)
    # seed by seed, not method by method: what is stopped early has pairs to compare
    jobs = [Job(task, method, seed, args.budget) for seed in range(args.seeds) for method in wanted]
    work.compute(jobs, Store(args.out), args.data, args.jobs)
    _show(args)


def _show(args: argparse.Namespace) -> None:
    task = find(args.task)
    wanted = chosen(task, args.methods)
    found = rows(wanted, load(task, wanted, args.seeds, args.budget, Store(args.out)))
    print(f"\n{task.title}\n\n{plain(table(found))}\n")
    print("\n".join(verdict(found)).replace("`", ""))


def _report(args: argparse.Namespace) -> None:
    for path in report.write(Store(args.out), args.to or args.out / "report", args.seeds, args.budget):
        print(path)
