"""The rooms of the house: imports between them go in one direction, and CONTRIBUTING shows them as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "sensli"
# A room may import from those before it, and from itself.
ROOMS = (
    "errors", "text", "modules", "engines", "trace", "moves", "merits", "surgery", "growing", "page", "integrations", "paper", "benchmarks",
    "cli",
)  # fmt: skip
# Inside of surgery the records and what follows a change know nothing of the change itself.
INNER = ("surgery.state", "surgery.history", "surgery")


def imports(path: Path) -> Iterator[str]:
    """Dotted names below sensli that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sensli":
            base = node.module.removeprefix("sensli").removeprefix(".")
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("sensli.") for a in node.names if a.name.startswith("sensli."))


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem == "errors"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_in_one_direction(path: Path) -> None:
    room = path.relative_to(SOURCE).with_suffix("").parts[0]
    for name in imports(path):
        other = name.split(".")[0]
        if other in ROOMS:
            assert ROOMS.index(other) <= ROOMS.index(room), f"{room} must not import from {other} ({name})"
    inner = next((r for r in INNER[:-1] if path.is_relative_to(SOURCE / r.replace(".", "/"))), None)
    if inner is not None:
        for name in imports(path):
            if name.startswith("surgery."):
                other = next(r for r in INNER if name == r or name.startswith(f"{r}."))
                assert INNER.index(other) <= INNER.index(inner), f"{inner} must not import from {other} ({name})"


def test_every_room_says_what_it_is_for() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE}
    assert {folder.relative_to(SOURCE).parts[0] for folder in folders} == set(ROOMS) - {"errors"}
    for folder in folders:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert text, f"{folder.relative_to(SOURCE)} does not say what it is for"


def test_contributing_shows_the_rooms_as_they_are() -> None:
    shown = (ROOT / "CONTRIBUTING.md").read_text()
    block = shown.split("```\nerrors", 1)[1].split("```", 1)[0]
    names = [
        "errors",
        *(line.split("/")[0].strip() for line in block.splitlines() if "/" in line and not line.startswith(" ")),
    ]
    assert tuple(names) == ROOMS


def test_contributing_names_files_that_are_there() -> None:
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|md))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 25
    assert [name for name in named if not (SOURCE / name).exists() and not (ROOT / name).exists()] == []
