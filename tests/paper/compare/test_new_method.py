"""A method in one file: the example of CONTRIBUTING is saved, registered as it says, and compared."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensli.cli.main import main
from sensli.growing.strategies import STRATEGIES
from sensli.paper.compare.tasks import TASKS
from sensli.paper.compare.tasks.spirals import SPIRALS

TEXT = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()


def test_the_example_of_contributing_is_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "Strategy" in block)
    registered = re.search(r'`"([a-z-]+)": \("([a-z_]+)", "([A-Za-z]+)"\),`', TEXT)
    assert registered is not None and len([line for line in code.splitlines() if line.strip()]) <= 10
    name, file, kind = registered.groups()
    (tmp_path / f"{file}.py").write_text(textwrap.dedent(code))
    module = f"sensli.growing.strategies.{file}"
    spec = importlib.util.spec_from_file_location(module, tmp_path / f"{file}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    monkeypatch.setitem(sys.modules, module, loaded)
    monkeypatch.setitem(STRATEGIES, name, (file, kind))
    monkeypatch.setitem(TASKS, "spirals", replace(SPIRALS, steps=6, looks=(0.3,), points=4))
    monkeypatch.setattr("sensli.paper.compare.store.provenance", dict)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "run", "spirals", "--methods", "small", "large", name, "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    assert f"spirals, {name}, seed 0: done" in out and f"One seed, so nothing can be said of {name}." in out
