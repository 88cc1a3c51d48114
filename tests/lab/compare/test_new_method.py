"""A method in one file: the example of CONTRIBUTING is saved in a folder, and compared as it says."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensli.cli.main import main
from sensli_lab.compare.jobs import Job
from sensli_lab.compare.methods import choose_methods
from sensli_lab.compare.tasks.registry import TASKS
from sensli_lab.compare.tasks.spirals import SPIRALS

TEXT = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
CODE = textwrap.dedent(
    next(block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "Strategy" in block)
)
NAME = "at_the_end:AtTheEnd"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody who has a strategy in it."""
    (tmp_path / "at_the_end.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setitem(TASKS, "spirals", replace(SPIRALS, steps=6, looks=(0.3,), points=4))
    monkeypatch.setattr("sensli_lab.compare.jobs.provenance", dict)
    monkeypatch.delitem(sys.modules, "at_the_end", raising=False)
    return tmp_path


def test_the_example_of_contributing_is_a_method(own: Path, capsys: Any) -> None:
    assert f"--methods fixed {NAME}" in TEXT and len([line for line in CODE.splitlines() if line.strip()]) <= 10
    assert main(["compare", "run", "spirals", "--methods", "small", "large", NAME, "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    assert f"spirals, {NAME}, seed 0: done" in out and f"One seed, so nothing can be said of {NAME}." in out
    assert len(list(own.rglob("at_the_end.AtTheEnd-*"))) == 1


def test_other_code_is_another_configuration(own: Path) -> None:
    task = TASKS["spirals"]
    (before,) = choose_methods(task, [NAME])
    (own / "at_the_end.py").write_text(CODE + "# changed\n")
    del sys.modules["at_the_end"]
    (after,) = choose_methods(task, [NAME])
    assert Job(task, before, 0).digest != Job(task, after, 0).digest


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere:Class", "--methods: strategy 'nowhere:Class' cannot be imported: ModuleNotFoundError"),
        ("at_the_end:Other", "cannot be imported: AttributeError"),
        ("at_the_end:find_sites", "must be a class that inherits from sensli"),
    ],
)
def test_what_is_no_strategy_is_one_line(own: Path, capsys: Any, name: str, text: str) -> None:
    assert main(["compare", "run", "spirals", "--methods", "small", name, "--seeds", "1"]) == 2
    assert text in capsys.readouterr().err and not list(own.rglob("*.json"))
