"""Errors of the experiment runner. Each is one line: where, what, why, what to do."""

from __future__ import annotations

from sensli.errors import SensliError


class PaperError(SensliError):
    """The user's file, option or folder cannot be used as it is; nothing was changed."""


class BadExperiment(PaperError):
    """An experiment file, or what the options make of it, does not describe a run."""


class NoResults(PaperError):
    """Something was to be shown that has not been computed."""


class StoreError(PaperError):
    """The results folder cannot be read or written."""
