"""The command line: thin, every command is a function elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sensli import __version__
from sensli.errors import SensliError
from sensli.finding import KINDS
from sensli.layers import FORMS
from sensli.paper import cli as paper

_DESCRIPTION = """\
Grow an ordinary PyTorch network while it trains: find where a layer could go, measure what it would be
worth there in one backward pass, insert the best one without changing the function.
"""
_EXAMPLES = """\
examples:
  sensli demo                                         three networks on two spirals, under a minute
  sensli sites mymodels:make_cnn --input 1x3x32x32    where your own model could grow
  sensli paper run 2                                  an experiment of the paper, with table and figure
  sensli bench                                        the figures we promise, measured on this machine
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a mistake of the user gives one line and exit code 2, Ctrl-C exit code 130."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `sensli sites ... | head`
        return 0
    except (SensliError, OSError) as error:
        print(f"sensli: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("sensli", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=text)
    parser.add_argument("--version", action="version", version=f"sensli {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a baseline, a growing and an extended network on two spirals",
        description="Train three networks side by side on two spirals: small, growing, and large from the start.",
        epilog="example: sensli demo --out demo --seed 1",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("sensli-demo"), help="folder for the picture (default: %(default)s)"
    )
    demo.add_argument("--seed", type=int, default=4, help="of the initial weights (default: %(default)s)")
    demo.set_defaults(run=_demo)

    sites = commands.add_parser(
        "sites",
        help="list where your own model could grow",
        description="List the places of a model where a layer could go, what it would cost, and what was skipped and why.",
        epilog="example: sensli sites mymodels:make_cnn --input 1x3x32x32; for token ids: --input int64:1x128",
    )
    sites.add_argument(
        "model",
        metavar="MODULE:FACTORY",
        help="a module or .py file and a function or class in it that gives the model",
    )
    sites.add_argument(
        "--input",
        metavar="SHAPE",
        action="append",
        required=True,
        help="such as 1x3x32x32; repeat for several arguments",
    )
    sites.add_argument(
        "--layer", choices=("auto", *FORMS), default="auto", help="the form of the new layer (default: %(default)s)"
    )
    sites.add_argument("--where", choices=KINDS, help="only sites of this kind")
    sites.set_defaults(run=_sites)

    paper.add_parser(commands)

    bench = commands.add_parser(
        "bench",
        help="measure the figures we promise on this machine",
        description="Measure the promised figures as ratios within one run, print them as a table and write them as JSON.",
        epilog="example: SENSLI_DATA=~/data sensli bench --only measure probe",
    )
    bench.add_argument("--only", nargs="+", metavar="NAME", help="run only these benchmarks")
    bench.add_argument(
        "--out", type=Path, default=Path("bench.json"), help="where to write JSON (default: %(default)s)"
    )
    bench.set_defaults(run=_bench)
    return parser


def _demo(args: argparse.Namespace) -> None:
    from sensli.demo import demo

    demo(args.out, seed=args.seed)


def _sites(args: argparse.Namespace) -> None:
    from sensli.finding import find_sites
    from sensli.loading import load_model, parse_input

    example = tuple(parse_input(text) for text in args.input)
    print(find_sites(load_model(args.model), example, layer=args.layer, where=args.where).explain())


def _bench(args: argparse.Namespace) -> None:
    from sensli.benchmarks import run_benchmarks

    run_benchmarks(args.only, args.out)


if __name__ == "__main__":
    sys.exit(main())
