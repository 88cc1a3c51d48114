"""Strict reading: a plain dict becomes a frozen dataclass, or one line says which key is wrong and why. Needs no torch."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, Union

from sensli_lab.errors import BadExperiment

T = TypeVar("T")

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list",
    dict: "a table of keys and values",
}


def hint_at_known(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: the closest known one, and all of them."""
    names = sorted(known, key=lambda one: (not one.isdigit(), int(one) if one.isdigit() else 0, one))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}."


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """The text for a name that is not one of those known."""
    return f"unknown {what} {name!r}. {hint_at_known(name, known)}"


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            raise BadExperiment(f"{where}: {unknown_name('key', key, known)}")


def read_record(cls: type[T], data: object, where: str) -> T:
    """Read `data` into the dataclass `cls`; `where` names the file and the place in it for the error text."""
    if not isinstance(data, Mapping):
        raise BadExperiment(f"{where} must be {_WORDS[dict]}, got {_shown(data)}.")
    fields = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_keys(data, fields, where)
    hints = _hints(cls)  # type: ignore[arg-type]
    values = {key: _value(hints[key], data[key], f"{where}, {key}") for key in fields if key in data}
    for name, one in fields.items():
        needed = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise BadExperiment(f"{where}: the key {name!r} is missing.")
    try:
        return cls(**values)
    except ValueError as error:  # raised by the dataclass's own checks, which do not know where they are
        raise BadExperiment(f"{where}: {error}") from None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over` laid on top, tables merged key by key."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _value(kind: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return read_record(typing.cast(type, kind), value, where)
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (Union, types.UnionType):
        inner = next(option for option in parts if option is not type(None))
        return None if value is None else _value(inner, value, where)
    if kind is Any:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    accepted: Any = {tuple: (list, tuple), dict: Mapping}.get(origin, origin)
    # bool is a subclass of int in Python, but `epochs: true` is a mistake
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise BadExperiment(f"{where} must be {_WORDS[origin]}, got {_shown(value)}.")
    if isinstance(value, (list, tuple)):
        return tuple(_value(parts[0], entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if isinstance(value, Mapping):
        return {str(key): _value(parts[1], entry, f"{where}, {key!r}") for key, entry in value.items()}
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
