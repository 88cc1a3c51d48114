"""How the command begins: quiet on Ctrl-C while Python is still importing, before there is anything to lose."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def main() -> int:
    """What ``sensli`` and ``python -m sensli.cli`` call."""
    with leaving_at_once():
        from sensli.cli.main import main as command
    return command()


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends the process with one line: an import that is cut off anywhere leaves tracebacks, or modules by half."""

    def leave(*_: Any) -> None:
        os.write(2, b"Interrupted.\n")
        os._exit(130)

    try:
        before = signal.signal(signal.SIGINT, leave)
    except ValueError:  # not in the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
