"""What a person sees while long work runs: a progress bar in a terminal, nothing where the output goes to a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Reach = Callable[..., None]  # reach(done, note): so much of the total is done by now


@contextmanager
def progress(title: str, total: float) -> Iterator[Reach]:
    """A bar with the time left; call the yielded function with what is done by now, of `total`, and a short note.

    What is printed meanwhile appears above the bar.
    """
    if not sys.stderr.isatty():
        yield _ignore
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        print(f"{title} ... (progress bars: {how_to_get('terminal')})", file=sys.stderr)
        yield _ignore
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    # A print goes above the bar only if it would go to the terminal anyway: a redirected output stays redirected.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(title, total=total, note="")

        def reach(done: float, note: str = "") -> None:
            bar.update(task, completed=done, note=note)

        yield reach


def _ignore(done: float, note: str = "") -> None:
    """No terminal, no bar."""


def how_to_get(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'sensli[{extra}]'"
