"""The command line: what a person types, and what a mistake gives."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from sensli.cli.main import main
from sensli.cli.terminal import paint, progress
from sensli_lab import demo

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5), nn.Tanh(), nn.Linear(5, 2))

def broken():
    raise RuntimeError("no weights")

flat = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
number = 3
"""


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mymodel.py"
    path.write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)  # another test may have imported one of that name
    return path


@pytest.mark.parametrize("name", ["mymodel:make", "mymodel.py:make"])
def test_sites_lists_places_of_a_users_model(model_file: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", name, "--input", "1x3x8x8"]) == 0
    out = capsys.readouterr().out
    assert "Conv2d(8, 8, 3) + ReLU after 1" in out
    assert "Residual(Linear(5, 5), Tanh) after 4" in out


def test_sites_of_one_kind(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", "mymodel:make", "--input", "1x3x8x8", "--where", "linear"]) == 0
    assert "Conv2d" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sites", "mymodel", "--input", "1x2"], "write MODULE:FACTORY"),
        (["sites", "mymodel:gone", "--input", "1x2"], "it offers: make, broken"),
        (["sites", "mymodel:broken", "--input", "1x2"], "no weights"),
        (["sites", "mymodel:number", "--input", "1x2"], "int"),
        (["sites", "nothere:make", "--input", "1x2"], "cannot be imported"),
        (["sites", "mymodel:make", "--input", "1,2"], "write a shape such as 1x3x32x32"),
        (
            ["sites", "mymodel:make", "--input", "1x4x8x8"],
            "--input 1x4x8x8 does not run through Sequential: RuntimeError",
        ),
        (
            ["sites", "mymodel:make", "--input", "1x4x8x8"],
            "Give the shape of one batch of the training data, such as 1x3",
        ),
        (["sites", "mymodel:flat", "--input", "4"], "--input 4 has a single dimension and no batch: write 1x4."),
        (
            ["demo", "--out", "mymodel.py/x"],
            "mymodel.py/x/demo.png cannot be written: Not a directory. Choose another place",
        ),
    ],
)
def test_a_mistake_gives_one_line(
    model_file: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.startswith("sensli: ")
    assert len(error.strip().splitlines()) == 1


@pytest.mark.slow
def test_demo_trains_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "EPOCHS", 60)
    monkeypatch.setattr(demo, "LOOKS", (20, 40))
    monkeypatch.setattr(demo, "TAU", 0.2)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    for word in ("baseline", "grown", "extended", "epoch 20: +Linear(10, 10) + ReLU after ", "test error"):
        assert word in out
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"animation: {tmp_path / 'out' / 'growth.html'}" in out
    assert (tmp_path / "out" / "growth.html").read_text().startswith("<!doctype html>")
    assert "\x1b" not in out  # no colour where the output is no terminal


def test_sites_lists_units_beside_layers(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", "mymodel:make", "--input", "1x3x8x8", "--what", "both", "--units", "4"]) == 0
    out = capsys.readouterr().out
    assert "+4 units in 0 (Conv2d 8 -> 12), read by 3" in out and "Conv2d(8, 8, 3) + ReLU after 1" in out
    assert main(["sites", "mymodel:make", "--input", "1x3x8x8", "--what", "units"]) == 0
    out = capsys.readouterr().out
    assert "+2 units in 0 (Conv2d 8 -> 10), read by 3" in out and "ReLU after 1" not in out
    assert "5: no more units: its output is what the model returns" in out
    assert main(["sites", "mymodel:make", "--input", "1x3x8x8", "--what", "units", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"][0]["kind"] == "units"


def test_json_for_machines(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", "mymodel:make", "--input", "1x3x8x8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sites"][0] == {
        "site": "Conv2d(8, 8, 3) + ReLU after 1", "path": "1", "side": "after", "kind": "conv", "parameters": 584, "flops": 41472,
    }  # fmt: skip
    assert told["model"] == "Sequential" and isinstance(told["skipped"], list)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_in_a_terminal_only_and_not_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("x", "bold green") == "x"
    monkeypatch.setattr(sys, "stdout", _Terminal())
    assert paint("x", "bold green") == "\x1b[1;32mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "bold green") == "x"


def test_a_progress_bar_leaves_a_redirected_output_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", bar := _Terminal())
    with progress("training", 10) as reach:
        print("a decision")
        reach(5, "loss 0.5")
    assert capsys.readouterr().out == "a decision\n"
    assert "training" in bar.getvalue() and "a decision" not in bar.getvalue()


def test_without_plots_the_demo_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # cannot be imported
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'sensli[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        "demo",
        "sites",
        "report",
        "paper",
        "paper list",
        "paper run",
        "paper show",
        "paper report",
    ):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        assert f"example: sensli {command}" in capsys.readouterr().out
