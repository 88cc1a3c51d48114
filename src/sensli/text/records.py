"""Records from a file are what their annotations say: the dataclass itself is the schema that its data are held against."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from sensli.errors import brief

_LARGEST = 2**63  # of a whole number: larger ones overflow where they are divided or shown


def check_types(value: Any, place: str) -> None:
    """Raise TypeError, naming the entry, unless all fields of a dataclass are of the annotated types, at any depth."""
    kind: Any = type(value)
    for name, annotation in _hints(kind).items():
        _check(getattr(value, name), annotation, f"{place}.{name}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if not field.name.startswith("_")}


def _check(value: Any, annotation: Any, place: str) -> None:
    if annotation is Any:
        return
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        _check_union(value, parts, place)
    elif isinstance(annotation, type) and is_dataclass(annotation):
        _expect(isinstance(value, annotation), value, place, f"a {annotation.__name__}")
        check_types(value, place)
    elif getattr(annotation, "_is_protocol", False) and is_dataclass(value):
        check_types(value, place)  # whatever class follows the protocol is its own schema
    elif origin is tuple and parts[-1] is not ...:
        _expect(isinstance(value, tuple) and len(value) == len(parts), value, place, f"{len(parts)} values")
        for index, (part, its) in enumerate(zip(value, parts, strict=True)):
            _check(part, its, f"{place}[{index}]")
    elif origin in (tuple, list):
        _expect(isinstance(value, origin), value, place, "a list")
        for index, part in enumerate(value):
            _check(part, parts[0], f"{place}[{index}]")
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(isinstance(value, Mapping), value, place, "a mapping")
        for key, part in value.items():
            _check(key, parts[0], f"a key of {place}")
            _check(part, parts[1], f"{place}[{key!r}]")
    else:
        _check_atom(value, annotation, place)


def _check_union(value: Any, parts: tuple[Any, ...], place: str) -> None:
    if value is None and type(None) in parts:
        return
    known = [part for part in parts if part is not type(None)]
    if len(known) == 1:  # the text then names the entry within
        _check(value, known[0], place)
        return
    for part in known:
        try:
            _check(value, part, place)
            return
        except TypeError:
            continue
    _expect(False, value, place, " or ".join(part.__name__ for part in known))


def _check_atom(value: Any, kind: Any, place: str) -> None:
    if kind is int:
        fine, what = type(value) is int and abs(value) < _LARGEST, "a whole number"
    elif kind is float:
        fine, what = type(value) is float or (type(value) is int and abs(value) < _LARGEST), "a number"
    elif kind is str:
        fine, what = isinstance(value, str) and _is_text(value), "a text"
    else:
        fine, what = isinstance(value, kind), f"a {kind.__name__}"
    _expect(fine, value, place, what)


def _is_text(value: str) -> bool:
    """Half of a surrogate pair can stand in JSON, and can be neither printed nor written."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expect(fine: bool, value: Any, place: str, what: str) -> None:
    if not fine:
        raise TypeError(f"{place} must be {what}, got {brief(value)}")


# ---- JSON as the standard has it: infinities and NaN, which it does not know, become ``{"float": "Infinity"}`` and come
# back as they were.


_TAG = "float"
_NAMES = ("Infinity", "-Infinity", "NaN")  # as Python's float() and JavaScript's Number() both read them


def strict(data: Any) -> Any:
    """Plain data without a number that JSON does not know."""
    if isinstance(data, float) and not math.isfinite(data):
        return {_TAG: "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"}
    if isinstance(data, Mapping):
        return {key: strict(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [strict(value) for value in data]
    return data


def lenient(data: Any) -> Any:
    """The inverse of `strict`."""
    if isinstance(data, Mapping):
        if len(data) == 1 and data.get(_TAG) in _NAMES:
            return float(data[_TAG])
        return {key: lenient(value) for key, value in data.items()}
    return [lenient(value) for value in data] if isinstance(data, list) else data


def dumps(data: Any, *, indent: int | None = None) -> str:
    """Plain data as JSON that every reader takes."""
    return json.dumps(strict(data), indent=indent, allow_nan=False)
