"""`python -m benchmarks`: a mistake gives one line, and what it measures is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks.__main__ import main
from benchmarks.figure import Figure

UNWRITABLE = [["--only", "linear", "--out", out] for out in ("folder", "text.txt/x", "/dev/null", "/dev/full", "\0")]
WRONG = [*UNWRITABLE, ["--only"], ["--only", "speed"], ["x"], ["--only", ""], ["--bad"]]


@pytest.mark.parametrize("line", WRONG, ids=repr)
def test_a_wrong_command_line_gives_one_line(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    try:
        code: Any = main(line)
    except SystemExit as error:  # argparse: the usage, then the line
        code = error.code
    printed = capsys.readouterr().err.splitlines()
    told = [text for text in printed if "error: " in text] or printed
    assert code == 2 and len(told) == 1 and told[0].startswith("benchmarks") and len(told[0]) > 20, printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "text.txt"]


def test_an_unknown_name_is_told_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "speed", "--out", str(tmp_path / "bench.json")]) == 2
    assert "Known: 'find', 'measure'" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "example: SENSLI_DATA=~/data python -m benchmarks --only measure probe" in " ".join(
        capsys.readouterr().out.split()
    )


def test_figures_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(benchmarks.BENCHMARKS, "quick", lambda: [Figure("a quick one", 0.5, 1.0, "by hand")])
    out = tmp_path / "bench.json"
    assert main(["--only", "quick", "--out", str(out)]) == 0
    assert "a quick one" in capsys.readouterr().out
    [figure] = json.loads(out.read_text())["figures"]
    assert figure["name"] == "a quick one" and figure["value"] == 0.5
