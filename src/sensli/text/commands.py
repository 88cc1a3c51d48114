"""What every command shares: the names that a person types, packages that may be missing, and errors as one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from sensli.errors import MissingExtra, SensliError


def run_command(args: argparse.Namespace) -> int:
    """Call ``args.run(args)``; a user's mistake gives one line and exit code 2, Ctrl-C exit code 130.

    ``args.resumes``, where it is set, says that the same command resumes after an interruption.
    """
    try:
        args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk or a closed pipe is noticed here, not when Python exits
    except KeyboardInterrupt:
        hint = " Run the same command again to resume." if getattr(args, "resumes", False) else ""
        return _failed(f"Interrupted.{hint}", 130)
    except BrokenPipeError:  # `sensli sites ... | head`
        return _failed("", 0)
    except SystemExit as error:
        return _failed(f"sensli: the model's own code exited (exit code {error.code}).", 2)
    except (SensliError, OSError) as error:
        return _failed(f"sensli: {' '.join(str(error).split())}", 2)
    return 0


def _failed(text: str, code: int) -> int:
    """One line on the standard error; what cannot be written to a broken output is dropped, so that Python exits quietly."""
    if text and sys.stderr is not None:
        print(text, file=sys.stderr)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def import_optional(module: str, feature: str, *, extra: str | None = None) -> Any:
    """A module of a package that may be missing; ``extra`` is the one of ours that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        wanted = package if extra is None else f"'sensli[{extra}]'"
        raise MissingExtra(
            f"{feature} needs {package}, which cannot be imported ({error}). Get it with: pip install {wanted}"
        ) from error


# ---- Names that a person types as arguments, and that the command line lists: here, so that its help needs nothing else.

KINDS = ("conv", "linear", "block", "units")  # of sites
FORMS = ("relu", "residual", "parametric")  # of new layers
GROW = ("layers", "units", "both")  # what may grow
UNIFORM = "uniform"  # what a `Grower` may be told instead: all widths by one share, as one decision
PER = {"parameters": "per parameter", "flops": "per FLOP"}  # what merits are compared by, and how a table says it
TRAINER_FILE = "sensli.json"  # beside the weights in every folder that a growing Trainer of Hugging Face saves
MEASURED_PLACES = ("merit", "least")  # of new blocks in a saved model, found on data
PLACES = ("even", "middle", "top", "bottom", *MEASURED_PLACES)  # all that have a name
BLOCK_STARTS = ("zero", "fresh", "copy")  # what they begin as
RESULTS = "results"  # the folder of the experiments
DEVICES = ("auto", "cpu", "cuda", "mps")  # of the experiments
TASKS = ("teacher", "spirals", "fashion", "vgg", "resnet", "text", "code", "cifar", "student")  # of `sensli compare`
UNMEASURED = "none"  # the norm where a strategy takes places without measuring them: its values are no merits
