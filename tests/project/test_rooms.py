"""The rooms of the house: imports between them go in one direction, and CONTRIBUTING shows them as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sensli"
LAB = ROOT / "src" / "sensli_lab"
TESTS = ROOT / "tests"
# A room may import from those before it, and from itself.
ROOMS = (
    "errors", "text", "modules", "moves", "merits", "surgery", "growing", "checkpoint", "page", "integrations", "cli", "expanding",
)  # fmt: skip
# Inside of a room too: engines build on the rest of modules, and the trace knows nothing of moves.
INNER = (("modules", "modules.engines"), ("moves.trace", "moves"))
LAB_ROOMS = ("errors", "methods", "work", "paper", "compare", "demo")


def imports(path: Path) -> Iterator[str]:
    """Dotted names below sensli that a file imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sensli":
            base = node.module.removeprefix("sensli").removeprefix(".")
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("sensli.") for a in node.names if a.name.startswith("sensli."))


def within(name: str, order: tuple[str, ...]) -> str | None:
    """The innermost of these rooms that a dotted name lies in."""
    return max((room for room in order if f"{name}.".startswith(f"{room}.")), key=len, default=None)


def modules(path: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, also in a program that it holds as text."""
    yield from re.findall(r"^ *(?:from|import) +([\w.]+)", path.read_text(), re.M)


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem == "errors"]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_in_one_direction(room: str) -> None:
    paths = [path for path in FILES if path.relative_to(SOURCE).with_suffix("").parts[0] == room]
    assert paths
    for path in paths:
        check_imports(path)


def check_imports(path: Path) -> None:
    room = path.relative_to(SOURCE).with_suffix("").parts[0]
    names = list(imports(path))
    for name in names:
        other = name.split(".")[0]
        if other in ROOMS:
            assert ROOMS.index(other) <= ROOMS.index(room), f"{path}: {room} must not import from {other} ({name})"
    here = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for order in INNER:
        for name in names:
            own, other = within(here, order), within(name, order)
            if own and other:
                assert order.index(other) <= order.index(own), f"{path}: {own} must not import from {other} ({name})"


def test_every_room_says_what_it_is_for() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE}
    assert {folder.relative_to(SOURCE).parts[0] for folder in folders} == set(ROOMS) - {"errors"}
    for folder in folders:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert text, f"{folder.relative_to(SOURCE)} does not say what it is for"


def test_the_house_has_a_dozen_entries_and_the_mark_of_typed_packages() -> None:
    entries = {path.name for path in SOURCE.iterdir()} - {"__pycache__", "py.typed", "__main__.py"}
    names = {"triggers.py", "norms.py"}  # only names, for `from sensli.triggers import Every`
    assert entries - names == {"__init__.py", "errors.py", *ROOMS} - {"errors"} and len(entries - names) <= 13
    for name in names:
        body = ast.parse((SOURCE / name).read_text()).body
        assert all(isinstance(each, ast.Expr | ast.ImportFrom | ast.Assign) for each in body), name


def test_triggers_and_norms_are_modules_of_the_package() -> None:
    import sensli
    import sensli.norms
    import sensli.triggers
    from sensli.growing import saturating, triggers
    from sensli.merits import norms
    from sensli.triggers import Pays

    assert (
        set(sensli.triggers.__all__) == {*triggers.__all__, "Saturating"}
        and Pays is triggers.Pays is sensli.triggers.Pays
    )
    assert sensli.triggers.Saturating is saturating.Saturating
    assert {name: getattr(sensli.triggers, name) for name in triggers.__all__} == {
        name: getattr(triggers, name) for name in triggers.__all__
    }
    assert sensli.norms.squared_norm is norms.squared_norm and sensli.norms.NORMS is norms.NORMS
    text = "".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    for name in re.findall(r"^::: sensli\.(triggers|norms)\.(\w+)$", text, re.M):
        assert hasattr(getattr(sensli, name[0]), name[1]), name
    assert set(re.findall(r"^::: sensli\.triggers\.(\w+)$", text, re.M)) == set(sensli.triggers.__all__)


def test_contributing_shows_the_rooms_as_they_are() -> None:
    shown = (ROOT / "CONTRIBUTING.md").read_text()
    block = shown.split("```\nerrors", 1)[1].split("```", 1)[0]
    names = [
        "errors",
        *(line.split("/")[0].strip() for line in block.splitlines() if "/" in line and not line.startswith(" ")),
    ]
    assert tuple(names) == ROOMS


def test_the_core_knows_nothing_of_the_lab() -> None:
    """But for names in registries, which are imported when somebody asks for one."""
    for path in SOURCE.rglob("*.py"):
        assert not any(name.split(".")[0] == "sensli_lab" for name in modules(path)), f"{path} imports from the lab"


def test_the_lab_has_its_own_order() -> None:
    """Methods know nothing of experiments, and the paper's know nothing of comparisons."""
    rooms = {path.relative_to(LAB).parts[0].removesuffix(".py") for path in LAB.rglob("*.py")} - {"__init__"}
    assert rooms == set(LAB_ROOMS)
    for path in LAB.rglob("*.py"):
        own = path.relative_to(LAB).parts[0].removesuffix(".py")
        for name in modules(path):
            if name.startswith("sensli_lab.") and own in LAB_ROOMS:
                other = name.split(".")[1]
                assert LAB_ROOMS.index(other) <= LAB_ROOMS.index(own), f"{path}: {own} must not import from {other}"


def test_tests_lie_in_the_rooms_of_what_they_test() -> None:
    """Helpers have a folder of their own; what concerns the whole project is in `project`."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py") if path != TESTS / "conftest.py"}
    homes = {
        folder: LAB / folder.relative_to("lab") if folder.parts[0] == "lab" else SOURCE / folder for folder in folders
    }
    strange = [str(folder) for folder, home in homes.items() if not (home / "__init__.py").is_file()]
    assert sorted(strange) == ["device", "helpers", "project"]
    misplaced = [path.name for path in (TESTS / "helpers").iterdir() if path.name.startswith(("test_", "conftest"))]
    assert misplaced == []


def test_no_test_file_is_imported() -> None:
    """But by itself, in a program that it starts."""
    for path in TESTS.rglob("*.py"):
        others = [name for name in modules(path) if name.split(".")[-1] != path.stem]
        assert [name for name in others if name.split(".")[-1].startswith(("test_", "conftest"))] == [], path


def test_contributing_names_files_that_are_there() -> None:
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|md))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 25
    places = (SOURCE, LAB, ROOT)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone: a second one of the same name stops the whole run."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
