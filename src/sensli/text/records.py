"""Records go to plain data and come back by their annotations: the dataclass itself is the schema that its data are held against."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from sensli.errors import brief_text

if TYPE_CHECKING:
    from typing_extensions import Self

# ---- From a record to plain data and back, by its annotations. What has the wrong type comes through as it is: `check_types`
# then names its place.


class Plain:
    """A dataclass that goes to plain data and comes back. A field that begins with "_" is no data.

    Metadata of a field: ``key``, what it is called in the data; ``sparse``, that it is written only where it is not the default.
    """

    # Keys that must be there although the field has a default, which is for files of earlier versions; None: all.
    _needed: ClassVar[tuple[str, ...] | None] = ()
    _alone: ClassVar[str] = ""  # a field that stands for the whole record

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        kind: Any = type(self)
        values = [(each, getattr(self, each.name)) for each, _ in _schema(kind)]
        return {
            each.metadata.get("key", each.name): to_plain(value)
            for each, value in values
            if not (each.metadata.get("sparse") and value == each.default)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Data that make no such record are refused: a file may have been altered."""
        kind: Any = cls
        left, values = dict(data), {}
        for each, annotation in _schema(kind):
            key = each.metadata.get("key", each.name)
            required = each.default is MISSING and each.default_factory is MISSING
            if key in left or required or cls._needed is None or key in cls._needed:
                values[each.name] = _read(left.pop(key), annotation)
        if left:
            raise ValueError(f"unknown key {brief_text(next(iter(left)))} of {cls.__name__}")
        record = cls(**values)
        record._verify()
        return record

    def _verify(self) -> None:
        """Refuse values, just read, that no such record has."""


def to_plain(value: Any) -> Any:
    """Plain data: records become dicts, and tuples lists."""
    if isinstance(value, Plain):
        return getattr(value, value._alone) if value._alone else value.to_dict()
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    return [to_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _read(value: Any, annotation: Any) -> Any:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        known = [part for part in parts if part is not type(None)]
        return _read(value, known[0]) if len(known) == 1 else value
    if origin in (tuple, list) and isinstance(value, (tuple, list)):
        kinds = parts if len(parts) == len(value) and parts[-1] is not ... else repeat(parts[0])
        return origin(_read(part, its) for part, its in zip(value, kinds, strict=False))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _read(part, parts[1]) for key, part in value.items()}
    if origin is None and isinstance(annotation, type) and issubclass(annotation, Plain):
        if annotation._alone:
            return annotation(**{annotation._alone: value})
        return annotation.from_dict(value) if isinstance(value, Mapping) else value
    return value


# ---- Records from a file are what their annotations say.

_LARGEST = 2**63  # of a whole number: larger ones overflow where they are divided or shown


def check_types(value: Any, place: str) -> None:
    """Raise TypeError, naming the entry, unless all fields of a dataclass are of the annotated types, at any depth."""
    kind: Any = type(value)
    for each, annotation in _schema(kind):
        _check(getattr(value, each.name), annotation, f"{place}.{each.name}")


@cache
def _schema(kind: Any) -> list[tuple[Field[Any], Any]]:
    """The fields that are data, and their types."""
    hints = get_type_hints(kind)
    return [(each, hints[each.name]) for each in fields(kind) if not each.name.startswith("_")]


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
        raise TypeError(f"{place} must be {what}, got {brief_text(value)}")


# ---- JSON as the standard has it: infinities and NaN, which it does not know, become ``{"float": "Infinity"}`` and come
# back as they were.

_TAG = "float"
_NAMES = ("Infinity", "-Infinity", "NaN")  # as Python's float() and JavaScript's Number() both read them


def strict_data(data: Any) -> Any:
    """Plain data without a number that JSON does not know."""
    if isinstance(data, float) and not math.isfinite(data):
        return {_TAG: "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"}
    if isinstance(data, Mapping):
        return {key: strict_data(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [strict_data(value) for value in data]
    return data


def lenient_data(data: Any) -> Any:
    """The inverse of `strict_data`."""
    if isinstance(data, Mapping):
        if len(data) == 1 and data.get(_TAG) in _NAMES:
            return float(data[_TAG])
        return {key: lenient_data(value) for key, value in data.items()}
    return [lenient_data(value) for value in data] if isinstance(data, list) else data


def dumps(data: Any, *, indent: int | None = None) -> str:
    """Plain data as JSON that every reader takes."""
    return json.dumps(strict_data(data), indent=indent, allow_nan=False)
