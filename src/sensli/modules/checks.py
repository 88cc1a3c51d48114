"""Arguments are checked where they enter: one function per concept, one form of text, "NAME must be WHAT, got VALUE."

Each takes the argument's name and its value, and returns the value in the form that the code after it uses. A value out of
range raises ValueError, a wrong type `WrongType`; where a mistake has its own error class, that is raised for both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from sensli.errors import BadExample, UnsupportedModel, WrongType
from sensli.modules.running import describe, tensors

T = TypeVar("T")
Error = type[Exception]
_LENGTH = 60  # characters of a value in a text

EXAMPLE = "a tensor, a tuple of arguments or a dict of keyword arguments, with a tensor in it"
BATCHES = "an iterable of (input, target) pairs or of dicts (for example a DataLoader, or [(x, y)] for a single batch)"
LOSS = "a function of output and target that returns the mean loss (for example torch.nn.functional.cross_entropy)"


# --- the text ---


def refuse(name: str, what: str, value: object, error: Error, hint: str = "") -> NoReturn:
    """Raise the one form of text."""
    raise error(f"{name} must be {what}, got {show_value(value)}.{' ' if hint else ''}{hint}")


def show_value(value: object) -> str:
    """A value in an error text: short, and of a large one its kind only."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
        return f"the function {value.__name__}"
    if isinstance(value, Tensor):
        return f"a {describe(value)}"
    kind = type(value).__name__
    kind = f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
    if isinstance(value, (dict, list, tuple)) and len(value) > 3:
        return f"{kind} of {len(value)} entries"
    if isinstance(value, dict):
        return _cut("{" + ", ".join(f"{key!r}: {show_value(part)}" for key, part in value.items()) + "}")
    if isinstance(value, (list, tuple)):
        parts = ", ".join(map(show_value, value))
        return _cut(f"[{parts}]" if isinstance(value, list) else f"({parts})")
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, PurePath)):
        return _cut(repr(value))
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") and not isinstance(value, nn.Module) else ""
    return f"{kind}{shape}"


def _cut(text: str) -> str:
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH // 2]}...{text[-_LENGTH // 4 :]}"


# --- numbers ---


def _plain(value: object) -> object:
    """The number in a tensor or an array with a single element; anything else as it is."""
    if not hasattr(value, "item") or isinstance(value, type):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):  # several elements, or no values at all
        return value


def number(name: str, value: object, what: str = "a number", *, error: Error | None = None) -> float:
    """A real number of Python, numpy or torch. A bool is not one; nan and infinity are."""
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, Real):
        refuse(name, what, value, error or WrongType)
    try:
        return float(found)
    except OverflowError:  # a whole number with more than 308 digits
        refuse(name, what, value, error or ValueError)


def at_least(name: str, value: object, least: float, example: float, *, error: Error | None = None) -> float:
    """A finite number that is not smaller than ``least``."""
    what = f"a number of at least {least:g} (for example {example})"
    found = number(name, value, what, error=error)
    if not least <= found < math.inf:
        refuse(name, what, value, error or ValueError)
    return found


def positive(name: str, value: object, example: float, *, error: Error | None = None) -> float:
    """A finite number above 0."""
    what = f"a positive number (for example {example})"
    found = number(name, value, what, error=error)
    if not 0 < found < math.inf:
        refuse(name, what, value, error or ValueError)
    return found


def share(name: str, value: object, example: float, *, zero: bool = False) -> float:
    """A number between 0 and 1, without the ends, or with 0 among them."""
    what = f"{'at least 0 and below 1' if zero else 'between 0 and 1'} (for example {example})"
    found = number(name, value, what)
    if not 0 <= found < 1 or (found == 0 and not zero):
        refuse(name, what, value, ValueError)
    return found


def whole(
    name: str, value: object, example: int, *, least: int = 1, below: int | None = None, error: Error | None = None
) -> int:
    """A whole number of at least ``least``. 2.0 is not one."""
    bound = f"of at least {least}" if below is None else f"from {least} to {below - 1}"
    what = f"a whole number {bound} (for example {example})"
    return integer(name, value, what, lambda found: found >= least and (below is None or found < below), error)


def odd(name: str, value: object, example: int, why: str) -> int:
    """An odd positive number, as the kernel of a convolution that keeps the size of its map."""
    what = f"an odd whole number of at least 1 (for example {example}), because {why}"
    return integer(name, value, what, lambda found: found > 0 and found % 2 == 1)


def integer(name: str, value: object, what: str, fine: Callable[[int], bool], error: Error | None = None) -> int:
    """A whole number of Python, numpy or torch for which ``fine`` holds."""
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, Integral):
        refuse(name, what, value, error or WrongType)
    if not fine(int(found)):
        refuse(name, what, value, error or ValueError)
    return int(found)


def flag(name: str, value: object) -> bool:
    """True or False, of Python or numpy."""
    found = _plain(value)
    if not isinstance(found, bool):
        refuse(name, "True or False", value, WrongType)
    return found


# --- names and functions ---


def one_of(name: str, value: object, known: Iterable[str], *, other: str = "") -> str:
    """A name from a registry; ``other`` says what besides a name would do."""
    known = list(known)
    if not isinstance(value, str):
        refuse(name, f"one of {_listed(known, other)}", value, WrongType)
    if value not in known:
        refuse(name, f"one of {_listed(known, other)}", value, ValueError, nearest_name(value, known))
    return value


def _listed(known: Iterable[str], other: str) -> str:
    return f"{', '.join(map(repr, known))}{f', or {other}' if other else ''}"


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The question whether another name was meant; empty if none is like this one."""
    spelled = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), spelled, n=1, cutoff=0.7)
    return f"Did you mean {spelled[close[0]]!r}?" if close else ""


def function(name: str, value: T, what: str) -> T:
    """Something to be called."""
    if not callable(value):
        refuse(name, what, value, WrongType)
    return value


def factory(name: str, value: T, returns: str) -> T:
    """A function that makes something; a finished module can be called too, but makes nothing."""
    if not callable(value) or isinstance(value, nn.Module):
        refuse(name, f"a function that returns {returns}", value, WrongType)
    return value


def loss(name: str, value: Callable[[Any, Any], Tensor] | None) -> Callable[[Any, Any], Tensor] | None:
    """A loss function, or None where the model computes its own."""
    made: object = value
    if isinstance(made, type) and issubclass(made, nn.Module):
        refuse(name, LOSS, value, WrongType, f"Give an instance: {made.__name__}().")
    return None if value is None else function(name, value, LOSS)


# --- objects ---


def instance(
    name: str, value: object, kind: type[T] | tuple[type[T], ...], what: str, *, error: Error = WrongType
) -> T:
    """An object of a class, or of one of several."""
    if not isinstance(value, kind):
        refuse(name, what, value, error)
    return value


def model(name: str, value: object) -> nn.Module:
    """The module itself, not its class, its path or its state dict."""
    if not isinstance(value, nn.Module):
        hint = f"Give an instance: {value.__name__}(...)." if isinstance(value, type) else "Give the model itself."
        refuse(name, "an nn.Module", value, UnsupportedModel, hint)
    return value


def example(name: str, value: T) -> T:
    """What a model can be called with. An object of the user's own is left to the model."""
    plain = value is None or isinstance(value, (Real, complex, type))
    empty = isinstance(value, (tuple, list, dict)) and not any(True for _ in tensors(value))
    if plain or empty:
        refuse(name, EXAMPLE, value, BadExample)
    return value


def batch(name: str, value: T) -> T:
    """An input of the model, or a pair of an input and a target."""
    example(name, value)
    if isinstance(value, (tuple, list)) and len(value) > 2:
        what = "an input or an (input, target) pair (for several inputs ((a, b), target) or a dict)"
        refuse(name, what, value, BadExample)
    return value


def batches(name: str, value: T) -> T:
    """Something that yields batches. Only what it is, because asking it for the first one may use it up or draw random numbers."""
    single = isinstance(value, (str, bytes, type, Tensor, Mapping, nn.Module))
    if single or not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
        refuse(name, BATCHES, value, WrongType)
    return value


def path(name: str, value: object, *, error: Error | None = None) -> Path:
    """The path of a file. A number is not a path: open() would take it for the descriptor of a file that is open elsewhere."""
    what = "the path of a file (for example 'run.ckpt')"
    found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(found, str):
        refuse(name, what, value, error or WrongType)
    if not Path(found).name:
        refuse(name, what, value, error or ValueError)
    return Path(found)
