"""Adapters for other libraries. Each needs its library: ``pip install 'sensli[lightning]'``, ``[transformers]``, ``[sklearn]``."""

from __future__ import annotations

from sensli.errors import MissingExtra


def missing_library(extra: str, error: ImportError) -> MissingExtra:
    """The error for a library that is not installed."""
    return MissingExtra(
        f"sensli.integrations.{extra} needs a package that is not installed ({error}). Get it with: pip install 'sensli[{extra}]'"
    )
