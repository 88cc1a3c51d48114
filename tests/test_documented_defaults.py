"""A default that a page or a docstring names is the one of the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sensli
from sensli import triggers
from sensli.paper import config

DOCS = Path(__file__).parent.parent / "docs"
NAMED = re.compile(r"`+(\w+)=([^`]+?)`+[^.`|]*\bis the default")  # `tau=1`, the paper's threshold, is the default
# words for a value, as a reader of a table understands them
WORDS = {"false": False, "none": None, "exact": None, "never": (), "one each": ()}


def public() -> Iterator[Callable[..., Any]]:
    """Every public function and class, with its methods."""
    from sensli import integrations  # noqa: F401

    found: list[Any] = [getattr(sensli, name) for name in sensli.__all__]
    found += [value for value in vars(triggers).values() if inspect.isclass(value)]
    for module, names in (
        ("sklearn", ("GrowingClassifier", "GrowingRegressor")),
        ("lightning", ("GrowthCallback",)),
        ("transformers", ("GrowthCallback",)),
    ):
        part = pytest.importorskip(f"sensli.integrations.{module}")
        found += [getattr(part, name) for name in names]
    for one in found:
        if callable(one):
            yield one
            yield from (value for name, value in vars(one).items() if inspect.isfunction(value) and name[0] != "_")


def arguments(one: Callable[..., Any]) -> dict[str, Any]:
    try:
        known = inspect.signature(one).parameters
    except ValueError:  # an error class has none
        return {}
    return {name: each.default for name, each in known.items() if each.default is not inspect.Parameter.empty}


def rows(page: str, column: str) -> Iterator[tuple[list[str], list[str]]]:
    """The arguments of each row of the table with such a column, and what stands for their defaults."""
    place = None
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            place = None
        elif column in cells:
            place = cells.index(column)
        elif place is not None and not set(cells[0]) <= set("-"):
            yield re.findall(r"`([\w.]+)`", cells[0]), [part.strip() for part in cells[place].split(", ")]


def same(written: str, value: Any) -> bool:
    if written in WORDS:
        return bool(WORDS[written] == value and type(WORDS[written]) is type(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(written) == value
    return written.strip("\"'") == str(value)


@pytest.mark.parametrize("kind", ["GrowingClassifier", "GrowingRegressor"])
def test_the_table_of_the_estimators(kind: str) -> None:
    sklearn = pytest.importorskip("sensli.integrations.sklearn")
    ours = arguments(getattr(sklearn, kind))
    told: dict[str, str] = {}
    for names, values in rows("tasks/scikit-learn.md", "default"):
        told.update(zip(names, values, strict=True))
    assert told.keys() == ours.keys()
    assert {name: written for name, written in told.items() if not same(written, ours[name])} == {}


def test_the_table_of_the_experiments() -> None:
    ours: dict[str, Any] = {}
    for prefix, kind in (
        ("", config.Settings),
        ("network.", config.Network),
        ("optimizer.", config.Optimizer),
        ("data.", config.Data),
    ):
        for field in dataclasses.fields(kind):
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            ours[prefix + field.name] = made
    checked = 0
    for names, values in rows("experiments.md", "default"):
        if values == [""] or names[0].startswith("schedule."):
            continue
        for name, written in zip(names, values if len(values) > 1 else values * len(names), strict=False):
            if ours[name] is not dataclasses.MISSING and (written != "spirals" or name == "data.name"):
                assert same(written, ours[name]), f"{name} is {ours[name]!r}, and the page says {written}"
                checked += 1
    assert checked > 15


def test_defaults_named_in_pages_and_docstrings() -> None:
    known = list(public())
    texts = {str(page): page.read_text() for page in DOCS.rglob("*.md") if "replication" not in page.parts}
    texts |= {f"{one.__module__}.{one.__qualname__}": inspect.getdoc(one) or "" for one in known}
    found = [(place, *match) for place, text in texts.items() for match in NAMED.findall(text)]
    assert found
    for place, name, written in found:
        values = [its[name] for its in map(arguments, known) if name in its]
        assert any(same(written, value) for value in values), f"{place}: {name}={written}, and the code has {values}"


def test_values_after_the_word_default_are_those_of_the_signature() -> None:
    """In a docstring: ``name`` ... (default: value) or default value."""
    for one in public():
        ours = arguments(one)
        for name, written in re.findall(r"``?(\w+)``?[^;.()]*\(default:? ([\w.\"-]+)\)", inspect.getdoc(one) or ""):
            if name in ours:
                assert same(written, ours[name]), f"{one.__qualname__}: {name} is {ours[name]!r}, not {written}"
