"""How the command begins: quiet on Ctrl-C while Python is still importing, before there is anything to lose.

Nothing is imported here that Python has not loaded at its own start, but for `signal`: each import before the handler is set is time in
which Ctrl-C shows a traceback. What Python does before the first line of this file is out of our reach.
"""

from __future__ import annotations

import os


def end_process(*_: object) -> None:
    """End the process with one line: an import that is cut off anywhere leaves tracebacks, or modules by half."""
    os.write(2, b"Interrupted.\n")
    os._exit(130)


try:
    import signal
except KeyboardInterrupt:
    end_process()


class LeavingAtOnce:
    """Inside of it Ctrl-C ends the process at once."""

    def __enter__(self) -> None:
        try:
            self.before = signal.signal(signal.SIGINT, end_process)
        except ValueError:  # not in the main thread, which alone gets signals
            self.before = None

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


def main() -> int:
    """What ``sensli`` and ``python -m sensli.cli`` call."""
    with LeavingAtOnce():
        from sensli.cli.main import main as command
    return command()
