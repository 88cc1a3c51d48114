"""JSON as the standard has it: infinities and NaN, which it does not know, become ``{"float": "Infinity"}`` and come back as they were."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

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
