"""What `sensli paper` and `sensli compare` share on the command line. The help of a command needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from sensli_lab.errors import PaperError

if TYPE_CHECKING:
    from sensli_lab.work.workers import Place


class CommandGroup:
    """`sensli NAME list | run | show | report`: all have a folder of results and the same options for the size of the work.

    Args:
        parser: Of the group; ``args.run(args)`` then does the work and raises if something goes wrong.
        name: Of the group. What its commands do is in `COMMANDS` of `sensli_lab.NAME.commands`, which needs torch.
        results: The folder where results are, unless another one is given.
        size: Adds the options for the size to the parser of the command with this name.
        also: Further commands, as the usage shows them.
    """

    def __init__(
        self, parser: argparse.ArgumentParser, name: str, results: str, size: Callable[[argparse.ArgumentParser, str], None],
        also: str = "",
    ) -> None:  # fmt: skip
        self.name, self.results, self.size = name, results, size
        parser.set_defaults(run=partial(_execute, f"sensli_lab.{name}.commands"))
        self.parsers = parser.add_subparsers(dest="command", required=True, metavar=f"list|run|show|report{also}")

    def add(self, name: str, text: str, example: str = "") -> argparse.ArgumentParser:
        """A command that reads or writes results."""
        epilog = f"example: sensli {self.name} {name}{example}"
        one = self.parsers.add_parser(name, help=text, description=text, epilog=epilog)
        out = f"results folder (default: {self.results})"
        one.add_argument("--out", type=Path, default=Path(self.results), metavar="DIR", help=out)
        self.size(one, name)
        return one

    def add_run(self, example: str) -> argparse.ArgumentParser:
        """`run`, which resumes after Ctrl-C."""
        text = "Compute what is missing, then show it. An interrupted run resumes where it stopped."
        one = self.add("run", text, example)
        one.set_defaults(resumes=True)
        return one

    def add_report(self, text: str) -> None:
        """`report`, which writes a folder."""
        to = "folder for the report (default: report in the results)"
        self.add("report", text, " --to page").add_argument("--to", type=Path, metavar="DIR", help=to)


def _execute(module: str, args: argparse.Namespace) -> None:
    import_module(module).COMMANDS[args.command](args)


def add_preset(parser: argparse.ArgumentParser, what: str, presets: Mapping[str, str], default: str | None) -> None:
    """The option for a size under one name; ``presets`` has the words for each."""
    sizes = "; ".join(f"{name}: {words}" for name, words in presets.items())
    parser.add_argument("--preset", default=default, metavar="|".join(presets), help=f"{what}. {sizes}")


def add_data(parser: argparse.ArgumentParser, what: str) -> None:
    """The option for the folder of the data."""
    where = f"folder of {what} to (default: SENSLI_DATA, otherwise data)"
    parser.add_argument("--data", type=Path, metavar="DIR", help=where)


def add_place(parser: argparse.ArgumentParser, cpus: str) -> None:
    """The options for where to compute; ``cpus`` says what ``--ray-cpus`` is about."""
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, each with one thread (default: 1)")
    places = "'here' (in this process, or in those of --jobs, the default) or 'ray' (in parallel as Ray tasks)"
    parser.add_argument("--on", choices=("here", "ray"), default="here", help=f"where to compute: {places}")
    head = "with --on ray: HOST:PORT of a cluster's head, or 'auto' (default: RAY_ADDRESS, otherwise a Ray on this machine)"
    parser.add_argument("--ray-address", metavar="ADDRESS", help=head)
    parser.add_argument("--ray-cpus", type=int, metavar="N", help=f"with --on ray: {cpus}")


def place_of(args: argparse.Namespace) -> Place:
    """The place that the options of `add_place` ask for."""
    from sensli_lab.work.workers import HERE, processes

    if args.jobs < 1:
        raise PaperError(f"--jobs must be at least 1, got {args.jobs}.")
    if args.on == "ray":
        from sensli_lab.work.on_ray import ray_place

        if args.jobs != 1:
            raise PaperError(f"--jobs must be 1 with --on ray, which has its own processes, got {args.jobs}.")
        return ray_place(args.ray_address, args.ray_cpus)
    for name in ("ray_address", "ray_cpus"):
        if getattr(args, name) is not None:
            raise PaperError(f"--{name.replace('_', '-')} needs --on ray. Add --on ray, or leave it out.")
    return HERE if args.jobs == 1 else processes(args.jobs)
