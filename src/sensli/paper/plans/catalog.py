"""Finding experiments: the paper's by number, ours by name, the user's by path."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from sensli.paper.errors import BadExperiment
from sensli.paper.plans.config import Experiment, parse
from sensli.paper.plans.reading import unknown

PAPER = tuple(str(number) for number in range(1, 15))


@lru_cache
def bundled() -> dict[str, Experiment]:
    """All experiments that come with the package, the paper's first, in the order of their numbers."""
    folder = resources.files("sensli.paper") / "experiments"
    texts = {entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith(".json")}
    found = [parse(json.loads(text), name) for name, text in texts.items()]
    return {one.name: one for one in sorted(found, key=_position)}


def paper_names() -> list[str]:
    return [name for name in bundled() if name in PAPER]


def further_names() -> list[str]:
    return [name for name in bundled() if name not in PAPER]


def _of_engine(engine: str, names: list[str]) -> list[str]:
    return [name for name in names if bundled()[name].settings.get("engine", "stacked") == engine]


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
    known = bundled()
    if name in known:
        return known[name]
    raise BadExperiment(unknown("experiment", name, [*known, *GROUPS]))


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
    experiment = parse(data, path.name)
    if experiment.name in bundled():
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


def _position(experiment: Experiment) -> tuple[int, int, str]:
    return (0, int(experiment.name), "") if experiment.name in PAPER else (1, 0, experiment.name)


def _reason(error: Exception) -> str:
    return error.strerror or "" if isinstance(error, OSError) else "not UTF-8 text"
