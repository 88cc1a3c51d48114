"""The command line: thin, every command is a function elsewhere."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from sensli import __version__
from sensli.cli.start import LeavingAtOnce
from sensli.errors import BadExample, SensliError
from sensli.text.commands import FORMS, GROW, KINDS, PER, run_command
from sensli.text.records import dumps as strict_json

_DESCRIPTION = """\
Grow an ordinary PyTorch network while it trains: find where a layer or more units could go, measure what they
would be worth there in one backward pass, add the best without changing the function.
"""
_EXAMPLES = """\
examples:
  sensli demo                                         three networks on two spirals, under a minute
  sensli sites mymodels:make_cnn --input 1x3x32x32    where your own model could grow
  sensli sites mymodels:make_cnn --input 1x3x32x32 --what both --units 8    layers, and 8 more units or channels
  sensli report history.json                          the animation of your own training, as one HTML file
  sensli paper run 2                                  an experiment of the paper, with table and figure
  sensli compare run spirals --seeds 10               growing and fixed networks side by side, at equal FLOPs
  sensli sites saved/model --text notes.txt           where a language model would gain most
  sensli expand saved/model --out deeper --blocks 8   a saved model with more blocks, which computes the same
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that a terminal cannot show must not end the command
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    if any("\0" in argument for argument in (sys.argv[1:] if arguments is None else arguments)):
        parser.error("an argument contains a NUL character")
    args = parser.parse_args(arguments)
    with LeavingAtOnce():
        import torch  # noqa: F401  # takes most of the time until the work begins; help and wrong arguments are answered without it
    return run_command(args)


def _parser() -> argparse.ArgumentParser:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("sensli", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=text)
    parser.add_argument("--version", action="version", version=f"sensli {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a baseline, a growing and an extended network on two spirals",
        description="Train three networks side by side on two spirals: small, growing, and large from the start.",
        epilog="example: sensli demo --out demo --seed 2",
    )
    add, out = demo.add_argument, "folder for the animation, the picture and the history (default: %(default)s)"
    add("--out", type=Path, default=Path("sensli-demo"), help=out)
    add("--seed", type=_seed, default=1, help="random seed of the initial weights (default: %(default)s)")
    add("--json", action="store_true", help="print results and decisions as JSON, and nothing else")
    demo.set_defaults(run=_demo)

    sites = commands.add_parser(
        "sites",
        help="list where your own model could grow, and with data, where it would help most",
        description="List the places of a model where a layer could go, or which of its layers could get more units, what it would cost, "
        "and what was skipped and why. With data, rank them by what each would be worth, and compare with the choices people make without "
        "measuring. The model is only read.",
        epilog="example: sensli sites mymodels:make_cnn --input 1x3x32x32; for token ids: --input int64:1x128; "
        "sensli sites path/to/saved/model --text notes.txt --count 4",
    )
    add = sites.add_argument
    model = (
        "MODULE:FACTORY, a module or .py file and a function or class in it that returns the model; or a directory that "
        "save_pretrained of the transformers library wrote"
    )
    add("model", metavar="MODEL", help=model)
    data = sites.add_mutually_exclusive_group(required=True)
    shape = (
        "the shape of the input, such as 1x3x32x32; repeat for several arguments; lists the sites without ranking them"
    )
    data.add_argument("--input", metavar="SHAPE", action="append", help=shape)
    batch = "a dict of keyword arguments or a pair (input, target), or a list of them, from torch.save; or a .safetensors file"
    data.add_argument("--batch", metavar="FILE", type=Path, help=batch)
    words = "a text file, read with the tokenizer in the model's directory or byte by byte"
    data.add_argument("--text", metavar="FILE", type=Path, help=words)
    add("--length", type=int, default=128, help="number of tokens in a window of the text (default: %(default)s)")
    count = "number of sites to take, for the comparison of choices (default: %(default)s)"
    add("--count", type=int, default=1, help=count)
    form = "the form of the new layer (default: %(default)s)"
    add("--form", choices=("auto", *FORMS, "twin"), default="auto", help=form)
    where = f"only sites of this kind ({', '.join(KINDS)}), or in modules of this path or pattern ('head.*'); may be repeated"
    add("--where", action="append", metavar="WHAT", help=where)
    what = "what to grow: new layers, more units or channels for layers that exist, or both in one list (default: %(default)s)"
    add("--what", choices=GROW, default="layers", help=what)
    units = (
        "with --what units or both: how many units a layer would get, a whole number (8), or a share of those it has (0.25), at "
        "least one (default: 0.25)"
    )
    add("--units", type=_units, metavar="NUMBER", help=units)
    per = "with data: rank by the merit per parameter or per FLOP that the growth adds (default: by the merit itself)"
    add("--per", choices=tuple(PER), help=per)
    add("--json", action="store_true", help="print the places, their costs and merits as JSON")
    sites.set_defaults(run=_sites)

    report = commands.add_parser(
        "report",
        help="write the animation of a training as one HTML file",
        description="Write the growth page of a training: the network, every decision with all merits, the metric. "
        "The file is what grower.history.save(path) wrote, or a checkpoint: of save_checkpoint, of torch.save with grower.state_dict() in "
        "it, of Lightning, or a folder of the Hugging Face Trainer.",
        epilog="example: sensli report history.json --out growth.html",
    )
    add, kinds = report.add_argument, "JSON, or a checkpoint (file or folder)"
    add("file", metavar="HISTORY_OR_CHECKPOINT", type=Path, help=kinds)
    add("--out", type=Path, help="where to write the page (default: next to the file, ending in .html)")
    add("--title", default="A network grows", help="the heading of the page (default: %(default)s)")
    called = "what the metric is called, such as 'validation loss' (default: as the file says, or 'metric')"
    add("--metric", help=called)
    other = "the history of a training to compare with, for example of the same model that never grew: a second curve"
    add("--baseline", type=Path, metavar="FILE", help=other)
    add("--json", action="store_true", help="print the decisions as JSON instead of lines")
    report.set_defaults(run=_report)

    for module in ("sensli.expanding.command", "sensli_lab.paper.cli", "sensli_lab.compare.cli"):
        import_module(module).add_parser(commands)
    return parser


def _seed(text: str) -> int:
    """A number that torch accepts as a seed."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^63 - 1, got {text}")
    return number


_seed.__name__ = "seed"  # argparse says "invalid seed value"


def _units(text: str) -> int | float:
    from sensli.moves.finding import check_units

    try:
        return check_units(float(text) if "." in text or "e" in text.lower() else int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1 (for example 8) or a share between 0 and 1 (for example 0.25), got {text!r}"
        ) from None


def _demo(args: argparse.Namespace) -> None:
    import_module("sensli_lab.demo").demo(args.out, seed=args.seed, as_json=args.json)


def _sites(args: argparse.Namespace) -> None:
    from sensli.cli.inputs import load_model, loss_for, parse_input, read_batches, text_batches
    from sensli.merits.measuring import measure
    from sensli.merits.merits import CHOICES, compare_choices
    from sensli.moves.finding import find_sites
    from sensli.moves.sites import check_where
    from sensli.surgery.record import SiteMerit

    if args.count < 1 or args.length < 1:
        raise SensliError(f"--count and --length must be at least 1, got {args.count} and {args.length}.")
    if args.units is not None and args.what == "layers":
        raise SensliError("--units says how many units a layer would get: add --what units or --what both.")
    if args.per and args.input:
        raise SensliError("--per ranks merits, which need data: give --batch or --text instead of --input.")
    model = load_model(args.model)
    try:
        check_where(args.where, model)
    except ValueError as error:
        raise SensliError(f"--{error}") from error
    batches: list[Any] = []
    if args.input:
        inputs = tuple(parse_input(text) for text in args.input)
        example: Any = inputs if len(inputs) > 1 else inputs[0]
    else:
        directory = Path(args.model) if Path(args.model).is_dir() else None
        batches = read_batches(args.batch) if args.batch else text_batches(args.text, model, directory, args.length)
        example = batches[0] if isinstance(batches[0], dict) else batches[0][0]
    units = 0.25 if args.units is None else args.units
    try:
        sites = find_sites(model, example, form=args.form, where=args.where, what=args.what, units=units)
    except BadExample as error:
        if not args.input or error.__cause__ is None:
            raise
        why = f"{type(error.__cause__).__name__}: {error.__cause__}"
        raise BadExample(
            f"--input {' '.join(args.input)} does not run through {type(model).__name__}: {why}. Give the shape of one batch of the "
            "training data, such as 1x3x32x32."
        ) from error
    if args.input and not sites:
        _check_batched(args.input)
    if not batches or not sites:
        print(strict_json(sites.to_dict(), indent=1) if args.json else sites.explain())
        return
    merits = measure(model, sites, batches, loss_for(batches)).per(args.per)
    count = min(args.count, len(merits))
    if args.json:
        ranked = [SiteMerit.of(merit).to_dict() for merit in merits.ranked]
        chosen = {name: [str(merit.site) for merit in choose(merits, count)] for name, choose in CHOICES.items()}
        more = {"norm": merits.norm, "per": args.per, "merits": ranked, "choices": chosen}
        print(strict_json({**sites.to_dict(), **more}, indent=1))
        return
    print(merits, compare_choices(merits, count), sep="\n\n")
    for path, reason in sites.skipped:
        print(f"skipped {path or 'the model'}: {reason}")
    for note in sites.notes:
        print(f"note: {note}")


def _check_batched(shapes: list[str]) -> None:
    """Refuse a shape without a batch: many layers run with it, and then nothing is found."""
    for text in shapes:
        kind, colon, size = text.rpartition(":")
        if "x" not in size:
            raise BadExample(f"--input {text} has a single dimension and no batch: write {kind}{colon}1x{size}.")


def _report(args: argparse.Namespace) -> None:
    from sensli.cli.terminal import paint_decision
    from sensli.page import page_data, read_history, write_page

    history = read_history(args.file)
    baseline = None if args.baseline is None else read_history(args.baseline)
    data = page_data(history, title=args.title, measure=args.metric, baseline=baseline)
    beside = args.file if args.file.name else args.file.resolve()  # "." has no name
    page = write_page(args.out or beside.with_suffix(".html"), data)
    if args.json:
        looks = [look.to_dict() for look in history.record.decisions]
        print(strict_json({"page": str(page), "decisions": looks}, indent=1))
        return
    for look in history.record.decisions:
        print(paint_decision(look))
    print(f"animation: {page}   (open it in a browser)")
