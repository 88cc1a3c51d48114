"""A forger of files: plain data with one entry altered, and bytes cut or flipped; always the same ones for a seed."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import torch

from sensli.errors import brief_text

JSON_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, -(2**70), 10**400, 1.5, -0.5, math.inf, -math.inf, math.nan, 1e308, "", "x", "0", "\ud800",
    "__class__", [], [1], ["x"], [[]], {}, {"x": 1}, {"float": "NaN"},
]  # fmt: skip
VALUES: list[Any] = [
    *JSON_VALUES, 10**5000, [10**5000], b"x", (), (1, 2), {1: 2}, 2j, torch.ones(()), torch.ones(2), torch.ones(3, 5), torch.tensor([]),
    torch.tensor(3), torch.ones(2, 2, dtype=torch.complex64), torch.float16, torch.empty(0, dtype=torch.uint8),
]  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every entry of nested dicts and lists."""
    if path:
        yield path
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in entries:
        yield from places(value, (*path, key))


def altered(data: Any, draw: random.Random, values: list[Any]) -> tuple[Any, str]:
    """A copy with one entry replaced, removed, doubled or added, and what was done."""
    path = draw.choice(_sampled(data))
    what = draw.choice(["replace"] * 6 + ["remove", "double", "add"])
    value = copy.deepcopy(draw.choice(values))
    told = f"{what} {'/'.join(map(str, path))} {brief_text(value)}"
    return _changed(data, path, what, value), told


def _sampled(data: Any) -> list[tuple[Any, ...]]:
    """Long lists of numbers count as little as short ones: a few entries stand for all."""
    return [path for path in places(data) if not any(isinstance(key, int) and key > 5 for key in path)]


def _changed(data: Any, path: tuple[Any, ...], what: str, value: Any) -> Any:
    key, rest = path[0], path[1:]
    new = list(data) if isinstance(data, tuple) else copy.copy(data)
    if rest:
        new[key] = _changed(data[key], rest, what, value)
    elif what == "replace":
        new[key] = value
    elif what == "remove":
        del new[key]
    elif isinstance(new, dict):
        new["new"] = new[key] if what == "double" else value
    else:
        new.insert(key, new[key] if what == "double" else value)
    return tuple(new) if isinstance(data, tuple) else new


def damaged(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Bytes cut, flipped, overwritten, doubled or of another kind."""
    place, length = draw.randrange(len(content)), draw.randrange(1, 64)
    what = draw.choice(["cut", "flip", "zero", "insert", "drop", "double"])
    told = f"{what} {place} {length}"
    middle = content[place : place + length]
    middle = {
        "flip": bytes(byte ^ (1 << draw.randrange(8)) for byte in middle),
        "zero": bytes(len(middle)),
        "insert": draw.randbytes(length) + middle,
        "drop": b"",
        "double": middle * 2,
        "cut": b"",
    }[what]
    return content[:place] + middle + (b"" if what == "cut" else content[place + length :]), told


OTHERS: dict[str, bytes] = {
    "empty": b"",
    "text": b"Dear reader,\n" * 30,
    "zeros": bytes(500),
    "JSON": b'{"a": 1}',
    "zip": b"PK\x03\x04" + bytes(60),
    "pickle": b"\x80\x04K\x01.",
}

RAN: list[int] = []


class Trap:
    """An object that would run code when it is loaded."""

    def __reduce__(self) -> Any:
        return (RAN.append, (1,))

    def __deepcopy__(self, memo: Any) -> Trap:
        return self
