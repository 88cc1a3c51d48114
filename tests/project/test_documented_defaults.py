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
from sensli import norms, page, triggers
from sensli.surgery import record
from sensli_lab.paper import settings

DOCS = Path(__file__).parents[2] / "docs"
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


@pytest.mark.library
@pytest.mark.parametrize("kind", ["GrowingClassifier", "GrowingRegressor"])
def test_the_table_of_the_estimators(kind: str) -> None:
    sklearn = pytest.importorskip("sensli.integrations.sklearn")
    ours = arguments(getattr(sklearn, kind))
    told: dict[str, str] = {}
    for names, values in rows("tasks/scikit-learn.md", "default"):
        told.update(zip(names, values, strict=True))
    if kind == "GrowingRegressor":
        del told["class_weight"], told["label_smoothing"]
    assert told.keys() == ours.keys()
    assert {name: written for name, written in told.items() if not same(written, ours[name])} == {}


def test_the_table_of_the_experiments() -> None:
    ours: dict[str, Any] = {}
    for prefix, kind in (
        ("", settings.Settings),
        ("network.", settings.Network),
        ("optimizer.", settings.Optimizer),
        ("data.", settings.DataSettings),
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


@pytest.mark.library
def test_defaults_named_in_pages_and_docstrings() -> None:
    known = list(public())
    texts = {str(page): page.read_text() for page in DOCS.rglob("*.md") if "replication" not in page.parts}
    texts |= {f"{one.__module__}.{one.__qualname__}": inspect.getdoc(one) or "" for one in known}
    found = [(place, *match) for place, text in texts.items() for match in NAMED.findall(text)]
    assert found
    for place, name, written in found:
        values = [its[name] for its in map(arguments, known) if name in its]
        assert any(same(written, value) for value in values), f"{place}: {name}={written}, and the code has {values}"


def section(one: Callable[..., Any], title: str) -> dict[str, str]:
    """The entries of one section of a docstring in Google style, by name."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", (inspect.getdoc(one) or "") + "\n", re.M)
    entries = re.split(r"^    (?=\S)", found.group(1) if found else "", flags=re.M)[1:]
    return {name.strip(): " ".join(text.split()) for name, _, text in (entry.partition(":") for entry in entries)}


def parameters(one: Callable[..., Any]) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    known = inspect.signature(one).parameters.values()
    return [stars.get(each.kind, "") + each.name for each in known if each.name not in ("self", "cls")]


def documented() -> Iterator[Callable[..., Any]]:
    """What the API page shows: all of it but errors, and methods that only answer another library's call."""
    shown = [norms.squared_norm, norms.Geometry, record.Decision, record.SiteMerit]
    for one in [*public(), *shown, page.page_data, page.write_page, page.read_history]:
        error = inspect.isclass(one) and issubclass(one, Exception)
        if one.__module__.startswith("sensli") and one.__doc__ and not error:
            yield one


@pytest.mark.library
def test_every_argument_is_documented_in_the_order_of_the_signature() -> None:
    """Classes that a user only receives list what can be read from them instead."""
    checked = 0
    for one in documented():
        if section(one, "Attributes"):
            fields = (
                [field.name for field in dataclasses.fields(one) if field.name[0] != "_"]
                if dataclasses.is_dataclass(one)
                else None
            )
            assert fields is None or list(section(one, "Attributes")) == fields, one.__qualname__
        elif one.__name__ not in ("to_dict", "from_dict", "Trigger") and not one.__qualname__.startswith("_"):
            assert list(section(one, "Args")) == parameters(one), f"{one.__module__}.{one.__qualname__}"
        checked += 1
    assert checked > 50


@pytest.mark.library
def test_defaults_of_documented_arguments_are_those_of_the_signature() -> None:
    """An argument that has a default other than None or an empty tuple names it: (default: value)."""
    for one in documented():
        ours = {name: value for name, value in arguments(one).items() if value is not None and value != ()}
        told = {name: re.findall(r"\(default: (.+?)\)", text) for name, text in section(one, "Args").items()}
        for name, written in told.items():
            if isinstance(ours.get(name), (str, int, float)):
                assert written and same(written[0], ours[name]), (
                    f"{one.__qualname__}: {name} is {ours[name]!r}, not {written}"
                )
