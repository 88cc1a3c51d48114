"""Errors for the user's mistakes. Each text says where, what, why and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable


class SensliError(Exception):
    """The base of all errors this package raises on purpose."""


class WrongType(TypeError, ValueError):
    """An argument is of the wrong type. A ValueError too, so that one clause catches every wrong argument."""


class UnsupportedModel(SensliError):
    """The model as a whole cannot be read or grown: wrapped, scripted, not to be copied."""


class BadExample(SensliError):
    """The example does not run through the model."""


class UnsupportedSite(SensliError):
    """A layer cannot be inserted at this place without changing the function."""


class UnknownSite(SensliError):
    """The site belongs to another model, or its place is gone."""


class MovedSite(UnknownSite):
    """A site whose units lie elsewhere since another growth: find_sites must look again."""


class MeasurementError(SensliError):
    """Merits could not be measured: no data, no gradient, a loss that is not a number."""


class ZeroMerits(MeasurementError):
    """All merits are zero: the loss does not depend on any of the places."""


class OptimizerError(SensliError):
    """The optimizer or the scheduler cannot follow the insertion."""


class FunctionChanged(SensliError):
    """The output moved where it must not; everything was put back."""


class HistoryError(SensliError):
    """A growth cannot be undone or replayed on this model."""


class CheckpointError(SensliError):
    """A checkpoint cannot be written, or a file cannot be used as one."""


class ExpansionError(SensliError):
    """A saved model cannot be expanded, or an expansion cannot be undone. Nothing was written."""


class DistributedError(SensliError):
    """The processes of a job do not agree, or one of them failed or is gone."""


class MissingExtra(SensliError):
    """A feature needs a package that is not installed."""


def unknown_choice(what: str, given: object, known: Iterable[str]) -> str:
    """The text for a name that is not in a registry; the known names come from the registry itself."""
    names = ", ".join(repr(name) for name in known)
    return f"unknown {what} {given!r}. Known: {names}."


def brief_text(value: object, length: int = 40) -> str:
    """A value from a file as an error text can show it: on one line, in plain characters, not long."""
    try:
        shown = " ".join(ascii(value).split())
    except ValueError:  # Python does not print a number with thousands of digits
        return f"a very long {type(value).__name__}"
    return shown if len(shown) <= length else f"{shown[: length - 3]}..."
