"""`sensli expand`: the command, its progress and what it prints."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sensli.errors import SensliError
from sensli.text.commands import BLOCK_STARTS, PLACES
from sensli.text.records import dumps as strict_json

_ADVICE = """\
advice:
  with everything but the new blocks frozen, take a smaller learning rate than 2e-4
  a base far past 20 tokens per parameter, or more than twice its blocks, gains least
  new blocks at the top cost less to train when all below is frozen"""


def add_parser(commands: Any) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "expand",
        help="add blocks to a saved model, on disk, without changing what it computes",
        description="Write a saved model of the transformers library with more blocks into a new folder. The weights are copied file by "
        "file, so a model of any size needs little memory. It computes the same, and loads with from_pretrained everywhere.",
        epilog="examples: sensli expand path/to/model --out deeper --blocks 8; sensli expand path/to/model --out deeper --place 3,7,11; "
        "sensli expand path/to/model --out deeper --blocks 4 --place merit --text notes.txt; "
        "sensli expand --undo deeper --out base-again",
    )
    add, file = parser.add_argument, {"metavar": "FILE", "type": Path}
    add("model", metavar="MODEL_DIR", type=Path, nargs="?", help="a folder that save_pretrained wrote")
    add("--out", metavar="DIR", type=Path, required=True, help="the folder to write, which must not exist")
    add("--blocks", metavar="N", type=int, help="how many blocks to add")
    numbers = "the numbers of the blocks that a new one is to follow, such as 3,7,11"
    add("--place", default="even", help=f"where: {', '.join(PLACES)}, or {numbers} (default: %(default)s)")
    add("--text", **file, help="with --place merit or least: the text to measure on")
    add("--batch", **file, help="with --place merit or least: batches that torch.save wrote, to measure on")
    starts = (
        "what new blocks begin as: zero, copies of their neighbors made identities; fresh, identities with new weights; copy, copies, "
        "which change the output (default: %(default)s)"
    )
    add("--start", choices=BLOCK_STARTS, default="zero", help=starts)
    units = "hidden units that the feed-forward parts of all blocks get: a whole number (64), or a share of those they have (0.25)"
    add("--units", metavar="NUMBER", help=units)
    add("--seed", type=int, default=0, help="of new weights (default: %(default)s)")
    stack = "the list of blocks to expand where a model has several, such as model.decoder.layers (default: the first)"
    add("--stack", metavar="PATH", help=stack)
    check = "compare the outputs on a text or on a batch that torch.save wrote; none: do not compare (default: on generated tokens)"
    add("--check", metavar="FILE|none", help=check)
    add("--shard-size", default="5GB", help="the largest size of a file (default: %(default)s)")
    add("--stream", action="store_true", help="check on a small sibling, without loading the model")
    optimizer = (
        "the optimizer of a training to be continued, whose moments follow: a file of torch, a checkpoint folder of the Trainer, or "
        "one of torch.distributed.checkpoint"
    )
    add("--optimizer", metavar="PATH", type=Path, help=optimizer)
    add("--trust-remote-code", action="store_true", help="run code that the folder brings")
    add("--undo", metavar="DIR", type=Path, help="write a model without the blocks that were added to it")
    add("--force", action="store_true", help="with --undo: although the old weights were trained since")
    add("--json", action="store_true", help="print what was done as JSON, and nothing else")
    parser.set_defaults(run=run_expand)


def run_expand(args: argparse.Namespace) -> None:
    """Expand, or undo, and say what came of it."""
    from sensli.expanding.expanding import expand, undo_expansion
    from sensli.expanding.placing import placing_lines

    if (args.model is None) == (args.undo is None):
        raise SensliError("give either MODEL_DIR, the folder to expand, or --undo DIR, an expanded one.")
    with _ending_with_cleaning(), _progress(not args.json) as progress:
        if args.undo is not None:
            folder = undo_expansion(
                args.undo, args.out, shard_size=args.shard_size, force=args.force, progress=progress
            )
        else:
            record = expand(
                args.model, args.out, args.blocks, place=_place(args.place), text=args.text, batch=args.batch, stack=args.stack,
                units=_units(args.units), start=args.start, seed=args.seed, shard_size=args.shard_size, check=args.check,
                stream=args.stream, optimizer=args.optimizer, trust_remote_code=args.trust_remote_code,
                progress=progress,
            )  # fmt: skip
    if args.undo is not None:
        print(strict_json({"folder": str(folder)}, indent=1) if args.json else f"written: {folder}")
        return
    data = record.data
    if args.json:
        print(strict_json({"folder": str(record.folder), "lines": dict(record.lines()), **data}, indent=1))
        return
    print(f"written: {record.folder}\n{record.describe()}")
    if data["other_stacks"] and args.stack is None:
        print(f"other lists of blocks stayed as they are (--stack): {', '.join(data['other_stacks'])}")
    if data["start"] == "copy" and data["new_blocks"]:
        print("the new blocks are copies, so the output is not that of the base")
    print(f"check: {data['check']}")
    if data["optimizer"]:
        print(f"optimizer: {record.folder / data['optimizer']}")
    if data["placing"]:
        print(f"\n{placing_lines(data['placing'])}")
    if data["new_blocks"]:
        print("\nTo train only the new blocks:")
    for tool, code in record.lines():
        print(f"\n# {tool}\n{code}")
    print(f"\n{_ADVICE}")


def _place(text: str) -> str | list[int]:
    if text in PLACES:
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SensliError(
            f"--place must be {', '.join(PLACES)}, or numbers of blocks such as 3,7,11, got {text!r}."
        ) from None


def _units(text: str | None) -> int | float | None:
    try:
        return None if text is None else float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise SensliError(f"--units must be a whole number (64) or a share (0.25), got {text!r}.") from None


@contextmanager
def _ending_with_cleaning() -> Iterator[None]:
    """A request to end is answered as Ctrl-C is: what was begun is removed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(wanted: bool) -> Iterator[Any]:
    """A bar where there is a terminal and rich is installed; it ends with the work."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield None
        return
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("writing")
        yield lambda done, total: bar.update(task, completed=done, total=total)
