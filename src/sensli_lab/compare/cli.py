"""`sensli compare list | run | show | report`: what the command line takes. What it does is in `commands`, which needs torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sensli.text.commands import TASKS
from sensli_lab.compare.presets import DEFAULT, PRESETS
from sensli_lab.work.options import add_options

RESULTS = Path("compare-results")
_PRESET = (
    "sizes of all tasks under one name. laptop: every method, with its published schedule on teacher and spirals alone; ten seeds of these "
    "two, three of fashion; one seed and a quarter of the FLOPs for vgg, resnet and text. What is given beside it comes first"
)


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
        one.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N - 1 (default: 5)")
        factor = "a factor on the FLOPs that the task has (default: 1)"
        if name == "report":
            factor += "; several: one after another"
        one.add_argument("--budget", type=float, nargs="+" if name == "report" else 1, metavar="F", help=factor)
        one.add_argument("--preset", choices=tuple(PRESETS), metavar="|".join(PRESETS), help=_PRESET)
        return one

    command("list", "List the tasks and their methods: what they are, what they cost, what is already computed.", "")
    run = command(
        "run", "Compute what is missing, then show it. An interrupted run resumes where it stopped.",
        " spirals --methods small large both --seeds 10",
    )  # fmt: skip
    show = command("show", "Show the tables of tasks from stored results.", " spirals")
    for one in (run, show):
        one.add_argument("tasks", nargs="+", metavar="TASK", help=f"all, or some of {', '.join(TASKS)}")
        names = f"names or kinds from 'sensli compare list', or all (default: {' '.join(DEFAULT)})"
        one.add_argument("--methods", nargs="+", metavar="METHOD", help=names)
    run.set_defaults(resumes=True)
    where = "folder of the images, or where to download them to (default: SENSLI_DATA, otherwise data)"
    run.add_argument("--data", type=Path, metavar="DIR", help=where)
    add_options(run, "CPUs and threads of each run (default: 1)")
    written = command("report", "Write verdicts, tables and figures as Markdown and HTML.", " --to page")
    written.add_argument("--to", type=Path, metavar="DIR", help="folder of the report (default: report in the results)")


def execute(args: argparse.Namespace) -> None:
    from sensli_lab.compare import commands

    commands.execute(args)
