"""`sensli compare list | run | show | report`: what the command line takes, and what a preset stands for. No torch, for the help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sensli.text.commands import TASKS
from sensli_lab.errors import BadComparison
from sensli_lab.paper.reading import unknown_name
from sensli_lab.work.cli import CommandGroup, add_data, add_place, add_preset

RESULTS = "compare-results"
DEFAULT = ("fixed", "sensli", "control")  # methods


def add_parser(subparsers: Any) -> None:
    """Add `compare` to a parser's subcommands; `args.run(args)` then does the work and raises if something goes wrong."""
    text = "growth methods and fixed networks side by side, at equal FLOPs: list, run, show, report, tune"
    epilog = "example: sensli compare run spirals --seeds 10, then sensli compare report --to page"
    parser = subparsers.add_parser("compare", help=text, description=text[0].upper() + text[1:] + ".", epilog=epilog)
    group = CommandGroup(parser, "compare", RESULTS, _add_size, "|tune")
    group.add("list", "List the tasks and their methods: what they are, what they cost, what is already computed.")
    run = group.add_run(" spirals --methods small large both --seeds 10")
    show = group.add("show", "Show the tables of tasks from stored results.", " spirals")
    tune = group.add(
        "tune", "Train with several learning rates, under seeds that no table shows.", " code --methods small"
    )
    tune.set_defaults(resumes=True)
    factors = "factors on the learning rate of the task (default: 0.5 1 2)"
    tune.add_argument("--factors", type=float, nargs="+", default=[0.5, 1.0, 2.0], metavar="F", help=factors)
    for one in (run, show, tune):
        which = f"all (but for the long ones), long, or some of {', '.join(TASKS)}"
        one.add_argument("tasks", nargs="+", metavar="TASK", help=which)
        names = f"names or kinds from 'sensli compare list', or all (default: {' '.join(DEFAULT)})"
        one.add_argument("--methods", nargs="+", metavar="METHOD", help=names)
    for one in (run, tune):
        add_data(one, "the images, or where to download them")
        add_place(one, "CPUs and threads of each run (default: 1)")
    group.add_report("Write verdicts, tables and figures as Markdown and HTML.")


def _add_size(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N - 1 (default: 5)")
    factor, several = "a factor on the FLOPs that the task has (default: 1)", command == "report"
    factor += "; several: one after another" if several else ""
    parser.add_argument("--budget", type=float, nargs="+" if several else 1, metavar="F", help=factor)
    add_preset(parser, "sizes of all tasks under one name. Explicit options override the preset", WORDS, None)


# ---- The size of a comparison: seeds, FLOPs and methods of each task, as asked for one by one or under one name.

_COMMON = (*DEFAULT, "rival")  # all under the common schedule that spend what the others spend


@dataclass(frozen=True)
class CompareSize:
    """How much of one task is computed: seeds 0 to ``seeds`` - 1, factors on its FLOPs, names or kinds of methods."""

    seeds: int = 5
    budgets: tuple[float, ...] = (1.0,)
    methods: tuple[str, ...] = DEFAULT


_SMALL, _LARGE = CompareSize(10, methods=(*_COMMON, "own")), CompareSize(1, (0.25,), _COMMON)
_LONG = CompareSize(3, methods=("fixed", "long"))
PRESETS = {
    "laptop": {
        "teacher": _SMALL,
        "spirals": _SMALL,
        "fashion": CompareSize(3, methods=_COMMON),
        "vgg": _LARGE,
        "resnet": _LARGE,
        "text": _LARGE,
        "code": _LONG,
        "cifar": _LONG,
        "student": _LONG,
    },
}
WORDS = {
    "laptop": "every method, with its published schedule on teacher and spirals alone; ten seeds of these two, three of fashion; one seed "
    "and a quarter of the FLOPs for vgg, resnet and text; of the long tasks the fixed sizes and their own methods, three seeds"
}


def size_of(
    task: str, preset: str | None, seeds: int | None, budgets: Sequence[float] | None, methods: Sequence[str] | None
) -> CompareSize:
    """What a preset says of a task, or what holds without one; what is asked for expressly comes first."""
    if preset is not None and preset not in PRESETS:
        raise BadComparison(f"--preset: {unknown_name('preset', preset, PRESETS)}")
    size = CompareSize() if preset is None else PRESETS[preset].get(task, CompareSize())
    return CompareSize(
        size.seeds if seeds is None else seeds,
        size.budgets if budgets is None else tuple(sorted(set(budgets))),
        size.methods if methods is None else tuple(methods),
    )
