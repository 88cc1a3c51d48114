"""One codec for all records: a dataclass goes to plain data and comes back by its annotations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from sensli.text.records import Plain, check_types


@dataclass(frozen=True)
class Name(Plain):
    _alone: ClassVar[str] = "text"

    text: str
    _found: object = field(default=None, compare=False)


@dataclass(frozen=True)
class Part(Plain):
    name: Name = field(metadata={"key": "called"})
    pair: tuple[int, str]
    size: int = 1

    def _verify(self) -> None:
        if self.size == 0:
            raise ValueError("size is 0")


@dataclass(frozen=True)
class Whole(Plain):
    _needed: ClassVar[tuple[str, ...] | None] = ("parts",)

    parts: tuple[Part, ...] = ()
    best: Part | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    names: list[Name] = field(default_factory=list)
    slot: int | str = 0
    anything: Any = None
    rare: bool = field(default=False, metadata={"sparse": True})
    _seen: object = field(default=None, compare=False)


@dataclass(frozen=True)
class Strict(Plain):
    _needed: ClassVar[tuple[str, ...] | None] = None

    size: int = 1


PART = Part(Name("a", object()), (1, "x"), 2)
WHOLE = Whole((PART, PART), PART, {"w": (2, 3)}, [Name("b")], "key", [1, {"deep": 2}], True, object())
DATA = {"called": "a", "pair": [1, "x"], "size": 2}


def test_a_record_goes_to_json_and_comes_back() -> None:
    expected = {
        "parts": [DATA, DATA], "best": DATA, "shapes": {"w": [2, 3]}, "names": ["b"], "slot": "key",
        "anything": [1, {"deep": 2}], "rare": True,
    }  # fmt: skip
    assert WHOLE.to_dict() == expected and list(WHOLE.to_dict()) == list(expected)
    again = Whole.from_dict(json.loads(json.dumps(WHOLE.to_dict())))
    assert again == WHOLE and again._seen is None
    check_types(again, "whole")


def test_a_sparse_field_is_written_only_where_it_is_not_the_default() -> None:
    assert "rare" not in Whole().to_dict() and Whole.from_dict(Whole().to_dict()) == Whole()


def test_an_older_file_lacks_keys_and_a_needed_one_is_missed() -> None:
    assert Whole.from_dict({"parts": [{"called": "a", "pair": [1, "x"]}]}) == Whole((Part(Name("a"), (1, "x")),))
    for kind, data, key in ((Whole, {"slot": 1}, "parts"), (Strict, {}, "size"), (Part, {"called": "a"}, "pair")):
        with pytest.raises(KeyError, match=key):
            kind.from_dict(data)


def test_an_unknown_key_is_refused_at_any_depth() -> None:
    with pytest.raises(ValueError, match="unknown key 'sise' of Part"):
        Whole.from_dict({"parts": [{"called": "a", "pair": [1, "x"], "sise": 2}]})


def test_values_that_no_record_has_are_refused_at_any_depth() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        Whole.from_dict({"parts": [{**DATA, "size": 0}]})


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"parts": 3}, r"whole.parts must be a list, got 3"),
        ({"parts": [DATA, 3]}, r"whole.parts\[1\] must be a Part, got 3"),
        ({"parts": [{**DATA, "called": 3}]}, r"whole.parts\[0\].name.text must be a text, got 3"),
        ({"best": {**DATA, "pair": [1, "x", 2]}}, r"whole.best.pair must be 2 values"),
        ({"shapes": {"w": "ab"}}, r"whole.shapes\['w'\] must be a list, got 'ab'"),
    ],
)
def test_what_has_the_wrong_type_is_named_with_its_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(TypeError, match=place):
        check_types(Whole.from_dict({**WHOLE.to_dict(), **change}), "whole")
