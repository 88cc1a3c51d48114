"""Errors of comparisons. Each is one line: what is wrong, and what to do."""

from __future__ import annotations

from sensli.paper.errors import PaperError


class BadComparison(PaperError):
    """An option of `sensli compare` does not describe a comparison; nothing was computed."""
