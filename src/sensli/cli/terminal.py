"""What a person sees while long work runs: a progress bar in a terminal, nothing where the output goes to a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sensli.errors import MissingExtra

if TYPE_CHECKING:
    from sensli.surgery.record import Decision

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


_STYLES = {"bold": "1", "dim": "2", "green": "32"}


def paint(text: str, style: str) -> str:
    """The text in a style such as ``"bold green"``, where the output is a terminal with colours and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{';'.join(_STYLES[word] for word in style.split())}m{text}\x1b[0m"


def paint_decision(look: Decision) -> str:
    """The line of a decision and its reason, the line in colour where the terminal has any."""
    if not look.growths:
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
