"""`sensli paper list | run | show | report | export`: what the command line takes. What it does is in `commands`, which needs torch."""

from __future__ import annotations

import argparse
from typing import Any

from sensli.text.commands import DEVICES, RESULTS
from sensli_lab.paper.presets import PRESETS
from sensli_lab.work.cli import CommandGroup, add_data, add_place, add_preset


def add_parser(subparsers: Any) -> None:
    """Add `paper` to a parser's subcommands; `args.run(args)` then does the work and raises if something goes wrong."""
    text = "the paper's experiments: list, run, show, report"
    epilog = "example: sensli paper run 2, then sensli paper report"
    add_commands(subparsers.add_parser("paper", help=text, description=text.capitalize() + ".", epilog=epilog))


def add_commands(parser: argparse.ArgumentParser) -> None:
    group = CommandGroup(parser, "paper", RESULTS, _add_size, also="|export")
    group.add("list", "List all experiments: what they show, what they cost, what is already computed.")
    run = group.add_run(" 2 --as run --runs 10")
    show = group.add("show", "Show figures and tables from stored results.", " 2")
    for one in (run, show):
        targets = (
            "a number, a name, 'all' (the paper's), 'spirals' or 'cnn' (the paper's of that kind), 'further' (ours on spirals), or "
            "an experiment file (.json, .toml)"
        )
        one.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help=targets)
        recipe = "'stated' or 'run' (as the authors' scripts ran it), or another recipe (default: all of them)"
        one.add_argument("--as", dest="recipe", metavar="RECIPE", help=recipe)
    add_data(run, "CIFAR-10, or where to download it")
    run.add_argument("--device", choices=DEVICES, default="auto", help="device of the CNN experiments (default: auto)")
    run.add_argument("--compile", action="store_true", help="compile the CNNs with torch.compile")
    add_place(run, "CPUs and threads of each task (default: 1 for spirals, an equal share for CNNs)")
    group.add_report("Write the claims, each with its verdict, as Markdown and HTML.")
    export = group.parsers.add_parser(
        "export",
        help="Print an experiment as a file to change and run.",
        description="Print an experiment as JSON, under another name. Change it, and run it by its path.",
        epilog="example: sensli paper export 13 > mine.json, then sensli paper run mine.json",
    )
    export.add_argument("experiment", metavar="EXPERIMENT", help="a number or a name, as `sensli paper list` shows it")
    export.add_argument("--name", help="the name of the copy (default: my-EXPERIMENT)")


def _add_size(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")
    parser.add_argument("--runs", type=int, metavar="N", help="runs per arm (default: the paper's)")
    scale = "scales epochs and insertion times together (default: 1)"
    parser.add_argument("--epochs-scale", type=float, default=1.0, metavar="F", help=scale)
    words = {name: preset.words for name, preset in PRESETS.items()}
    add_preset(parser, "size of the CNN experiments", words, "paper")
    parser.add_argument("--bf16", action="store_true", help="train the CNNs in bfloat16, if the device supports it")
