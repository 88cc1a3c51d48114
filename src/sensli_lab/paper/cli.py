"""`sensli paper list | run | show | report | export`: what the command line takes. What it does is in `commands`, which needs torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sensli.text.commands import DEVICES, RESULTS
from sensli_lab.paper.presets import PRESETS
from sensli_lab.work.options import add_options


def add_parser(subparsers: Any) -> None:
    """Add `paper` to a parser's subcommands; `args.run(args)` then does the work and raises if something goes wrong."""
    text = "the paper's experiments: list, run, show, report"
    parser = subparsers.add_parser(
        "paper",
        help=text,
        description=text.capitalize() + ".",
        epilog="example: sensli paper run 2, then sensli paper report",
    )
    add_commands(parser)


def add_commands(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=execute)
    commands = parser.add_subparsers(dest="paper_command", required=True, metavar="list|run|show|report|export")

    def command(name: str, text: str, example: str) -> argparse.ArgumentParser:
        epilog = f"example: sensli paper {name}{example}"
        one: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, epilog=epilog)
        one.add_argument(
            "--out", type=Path, default=Path(RESULTS), metavar="DIR", help=f"results folder (default: {RESULTS})"
        )
        one.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")
        one.add_argument("--runs", type=int, metavar="N", help="runs per arm (default: the paper's)")
        scale = "scales epochs and insertion times together (default: 1)"
        one.add_argument("--epochs-scale", type=float, default=1.0, metavar="F", help=scale)
        sizes = "; ".join(f"{key}: {preset.words}" for key, preset in PRESETS.items())
        one.add_argument(
            "--preset", default="paper", metavar="|".join(PRESETS), help=f"size of the CNN experiments. {sizes}"
        )
        one.add_argument("--bf16", action="store_true", help="train the CNNs in bfloat16, if the device supports it")
        return one

    command("list", "List all experiments: what they show, what they cost, what is already computed.", "")
    for name, text, example in (
        (
            "run",
            "Compute what is missing, then show it. An interrupted run resumes where it stopped.",
            " 2 --as run --runs 10",
        ),
        ("show", "Show figures and tables from stored results.", " 2"),
    ):
        one = command(name, text, example)
        targets = (
            "a number, a name, 'all' (the paper's), 'spirals' or 'cnn' (the paper's of that kind), 'further' (ours on spirals), or "
            "an experiment file (.json, .toml)"
        )
        one.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help=targets)
        recipe = "'stated' or 'run' (as the authors' scripts ran it), or another recipe (default: all of them)"
        one.add_argument("--as", dest="recipe", metavar="RECIPE", help=recipe)
        if name == "run":
            one.set_defaults(resumes=True)
            where = "folder of CIFAR-10, or where to download it to (default: SENSLI_DATA, otherwise data)"
            one.add_argument("--data", type=Path, metavar="DIR", help=where)
            one.add_argument(
                "--device", choices=DEVICES, default="auto", help="device of the CNN experiments (default: auto)"
            )
            one.add_argument("--compile", action="store_true", help="compile the CNNs with torch.compile")
            add_options(one, "CPUs and threads of each task (default: 1 for spirals, an equal share for CNNs)")
    report = command("report", "Write the claims, each with its verdict, as Markdown and HTML.", " --to page")
    report.add_argument("--to", type=Path, metavar="DIR", help="folder for the report (default: report in the results)")
    export = commands.add_parser(
        "export",
        help="Print an experiment as a file to change and run.",
        description="Print an experiment as JSON, under another name. Change it, and run it by its path.",
        epilog="example: sensli paper export 13 > mine.json, then sensli paper run mine.json",
    )
    export.add_argument("experiment", metavar="EXPERIMENT", help="a number or a name, as `sensli paper list` shows it")
    export.add_argument("--name", help="the name of the copy (default: my-EXPERIMENT)")


def execute(args: argparse.Namespace) -> None:
    from sensli_lab.paper import commands

    commands.COMMANDS[args.paper_command](args)
