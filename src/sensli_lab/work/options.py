"""What the command line takes to say where to compute, and the place that it asks for. The help of a command needs no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sensli_lab.errors import PaperError

if TYPE_CHECKING:
    from sensli_lab.work.workers import Place


def add_options(parser: argparse.ArgumentParser, cpus: str) -> None:
    """Add the options; ``cpus`` says what ``--ray-cpus`` is about."""
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, each with one thread (default: 1)")
    places = "'here' (in this process, or in those of --jobs, the default) or 'ray' (in parallel as Ray tasks)"
    parser.add_argument("--on", choices=("here", "ray"), default="here", help=f"where to compute: {places}")
    head = "with --on ray: HOST:PORT of a cluster's head, or 'auto' (default: RAY_ADDRESS, otherwise a Ray on this machine)"
    parser.add_argument("--ray-address", metavar="ADDRESS", help=head)
    parser.add_argument("--ray-cpus", type=int, metavar="N", help=f"with --on ray: {cpus}")


def place_of(args: argparse.Namespace) -> Place:
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
