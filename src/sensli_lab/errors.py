"""Errors of experiments and comparisons. Each is one line: where, what, why, what to do."""

from __future__ import annotations

import traceback

from sensli.errors import SensliError


class PaperError(SensliError):
    """The user's file, option or folder cannot be used as it is; nothing was changed."""


class BadExperiment(PaperError):
    """An experiment file, or what the options make of it, does not describe a run."""


class NoResults(PaperError):
    """Something was to be shown that has not been computed."""


class StoreError(PaperError):
    """The results folder cannot be read or written."""


FAILED = "failed with"  # how the word of a run begins that ended with an error nobody foresaw


class BadComparison(PaperError):
    """An option of `sensli compare` does not describe a comparison; nothing was computed."""


class RunsFailed(PaperError):
    """Some runs ended with an error that nobody foresaw; all others are stored."""


def failure(error: Exception) -> str:
    """The word of such a run: what the error is in the first line, then where it comes from."""
    first = " ".join(str(error).split())
    return f"{FAILED} {type(error).__name__}: {first}\n{''.join(traceback.format_exception(error))}"
