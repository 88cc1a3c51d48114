"""Finding experiments: the paper's by number, ours by name, the user's by path."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensli.paper.errors import BadExperiment
from sensli.paper.plans.config import Experiment, parse
from sensli.paper.plans.reading import unknown

if TYPE_CHECKING:
    from importlib.abc import Traversable

_DEEP = "is nested too deeply for an experiment. Use an intact copy."
PAPER = tuple(str(number) for number in range(1, 15))


@lru_cache
def _files() -> dict[str, Traversable]:
    """The experiments that come with the package, by name, the paper's first. None of them is read."""
    entries = {
        entry.name.removesuffix(".json"): entry for entry in (resources.files("sensli.paper") / "experiments").iterdir()
    }
    names = {
        re.sub(r"^exp0*(\d+)$", r"\1", stem): entry for stem, entry in entries.items() if entry.name.endswith(".json")
    }
    return {
        name: names[name]
        for name in sorted(names, key=lambda name: (0, int(name), "") if name in PAPER else (1, 0, name))
    }


@lru_cache
def _read(name: str) -> Experiment:
    entry = _files()[name]
    return parse(json.loads(entry.read_text("utf-8")), entry.name)


def bundled() -> dict[str, Experiment]:
    """All experiments that come with the package, in that order."""
    return {name: _read(name) for name in _files()}


def paper_names() -> list[str]:
    return [name for name in _files() if name in PAPER]


def further_names() -> list[str]:
    return [name for name in _files() if name not in PAPER]


def _of_engine(engine: str, names: list[str]) -> list[str]:
    return [name for name in names if _read(name).settings.get("engine", "stacked") == engine]


GROUPS: dict[str, Callable[[], list[str]]] = {
    "all": paper_names,
    "spirals": lambda: _of_engine("stacked", paper_names()),
    "cnn": lambda: _of_engine("cnn", paper_names()),
    "further": lambda: _of_engine("stacked", further_names()),  # minutes; a CNN, which takes days, only by its name
}


def find(name: str) -> Experiment:
    """An experiment by number or name, or from a user's file."""
    if name.endswith((".json", ".toml")):
        return load(Path(name))
    if name in _files():
        return _read(name)
    raise BadExperiment(unknown("experiment", name, [*_files(), *GROUPS]))


def exported(name: str, new: str | None = None) -> str:
    """The file of an experiment of the package under another name, to be changed and run: ``my-13`` unless one is given."""
    if name not in _files():
        raise BadExperiment(unknown("experiment", name, _files()))
    new = new or f"my-{name}"
    if new in _files():
        raise BadExperiment(
            f"--name must not be that of an experiment of the package, got {new!r}. Choose another name."
        )
    text = _files()[name].read_text("utf-8").replace(f'"name": {json.dumps(name)}', f'"name": {json.dumps(new)}', 1)
    parse(json.loads(text), f"{new}.json")  # which also checks the name
    return text


def load(path: Path) -> Experiment:
    """Read one experiment file, JSON or TOML."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadExperiment(f"{path} cannot be read ({_reason(error)}). Check the path.") from None
    try:
        data = _toml(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise BadExperiment(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
    except RecursionError:
        raise BadExperiment(f"{path} {_DEEP}") from None
    try:
        experiment = parse(data, path.name)
    except RecursionError:
        raise BadExperiment(f"{path} {_DEEP}") from None
    if experiment.name in _files():
        raise BadExperiment(
            f"{path.name}: the name {experiment.name!r} belongs to an experiment of the package, and their results would "
            "be mixed up. Choose another name."
        )
    return experiment


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    raise BadExperiment("TOML files need Python 3.11 or newer. Write the experiment as JSON.")


def _reason(error: Exception) -> str:
    return error.strerror or "" if isinstance(error, OSError) else "not UTF-8 text"
