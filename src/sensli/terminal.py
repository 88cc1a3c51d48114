"""What a person sees while long work runs: a progress bar in a terminal, nothing where the output goes to a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sensli.errors import MissingExtra
from sensli.record import Look

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
    # What is printed meanwhile goes above the bar, but only if it would go to the terminal anyway: a redirected output stays redirected.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(title, total=total, note="")

        def advance(done: int = 1, note: str = "") -> None:
            bar.update(task, advance=done, note=note)

        yield advance


_STYLES = {"bold": "1", "dim": "2", "green": "32"}


def paint(text: str, style: str) -> str:
    """The text in a style such as ``"bold green"``, where the output is a terminal with colours and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{';'.join(_STYLES[word] for word in style.split())}m{text}\x1b[0m"


def paint_decision(look: Look) -> str:
    """The line of a decision and its reason, the line in colour where the terminal has any."""
    if not look.inserted:
        return paint(str(look), "dim")
    return f"{paint(str(look), 'bold green')}\n  because {look.reason}"


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
