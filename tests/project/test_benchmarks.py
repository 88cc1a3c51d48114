"""`python -m benchmarks`: a mistake gives one line, and what it measures is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks.__main__ import main
from benchmarks.estimators import Outcome, figures
from benchmarks.figure import Figure
from benchmarks.tables import Table

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


def test_tables_are_read_with_their_words_and_without_their_head(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    file = tmp_path / "table.dat"
    file.write_text("@relation cars\n@data\n1.5, red, van\n2, blue, bus\n3, green, van\n")
    x, y = Table("cars", True, file.name).load(tmp_path, 10)
    assert sorted(map(tuple, x.tolist())) == [(1.5, 0, 1), (2, 0, 0), (3, 1, 0)] and sorted(y) == ["bus", "van", "van"]
    file.write_text("height;weight\n1;2\n3;4\n")
    x, y = Table("people", False, file.name).load(tmp_path, 1)
    assert len(x) == len(y) == 1 and y[0] == x[0, 0] + 1
    with pytest.raises(FileNotFoundError, match="SENSLI_TABLES must name the folder with table"):
        Table("people", False, file.name).load(None, 1)


def test_the_figures_of_the_estimators_are_of_the_best_of_the_grid() -> None:
    grid = {(1, 100): [0.5, 0.7, 0.6], (2, 50): [0.8, 0.9, 0.7]}
    found = Outcome("one", [0.7, 0.8, 0.75], [0.7, 0.7, 0.7], grid, [0.8, 0.7], (2.0, 10.0), "9 x 2")
    error = 0.1 / 3**0.5
    assert found.best == (2, 50) and found.error == pytest.approx(error) and found.difference == pytest.approx(-0.05)
    values = [figure.value for figure in figures([found])]
    assert values == pytest.approx([0.05 / error, 0.05 / error, -0.05, 0.2, 0.1, 0.1])
    assert found.difference_again == pytest.approx(-0.05), "the best of the grid, trained again"
    assert "(2 x 50)" in str(found) and "time 0.20" in str(found) and "again -0.0500 (-0.87 errors)" in str(found)
    lucky = Outcome(
        "two", [0.5] * 3, [0.5] * 3, {(1, 50): [0.9, 0.4, 0.4], (1, 100): [0.5] * 3}, [0.5], (1.0, 1.0), "9 x 2"
    )
    assert lucky.difference == pytest.approx(0.5 - 1.7 / 3)
    assert lucky.difference_chosen == pytest.approx((0.0 + 0.1 + 0.1) / 3)  # without a fold, its luck does not choose
