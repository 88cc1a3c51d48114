"""What a person sees of the command line: colours where the terminal has any, and what to install for pictures."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from sensli.errors import MissingExtra
from sensli.text.progress import Reach as Reach
from sensli.text.progress import how_to_get as how_to_get
from sensli.text.progress import progress as progress

if TYPE_CHECKING:
    from sensli.surgery.record import Decision

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


def require_plots() -> None:
    """Check that pictures can be drawn, before any long work begins."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra(
            f"pictures need matplotlib, which is not installed. Get it with: {how_to_get('plots')}"
        ) from None
