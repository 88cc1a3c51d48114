"""Running a command: what goes wrong is one line on the standard error and an exit code, never a traceback."""

from __future__ import annotations

import argparse
import os
import sys

from sensli.errors import SensliError


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
