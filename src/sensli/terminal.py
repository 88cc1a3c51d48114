"""What a person sees while long work runs: a progress bar in a terminal, nothing where the output goes to a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sensli.errors import MissingExtra

Advance = Callable[..., None]


@contextmanager
def progress(title: str, total: int, *, quiet: bool = False) -> Iterator[Advance]:
    """A bar with the time left; call the yielded function with the number of units done and a short note."""
    if quiet or not sys.stderr.isatty():
        yield lambda done=1, note="": None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        print(f"{title} ... (progress bars: {how_to_get('terminal')})", file=sys.stderr)
        yield lambda done=1, note="": None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, note="")

        def advance(done: int = 1, note: str = "") -> None:
            bar.update(task, advance=done, note=note)

        yield advance


def how_to_get(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'sensli[{extra}]'"


def require_plots() -> None:
    """Check that pictures can be drawn, before any long work begins."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra(
            f"pictures need matplotlib, which is not installed. Get it with: {how_to_get('plots')}"
        ) from None
