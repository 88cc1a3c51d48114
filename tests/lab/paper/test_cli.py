"""The commands from end to end, on shortened experiments."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys

import pytest

from experiments import GOOD
from sensli.cli.main import main
from sensli_lab.errors import BadExperiment
from sensli_lab.paper import cli, commands
from sensli_lab.paper.__main__ import main as module

SHORT = ["--runs", "3", "--epochs-scale", "0.02"]


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["paper", *words])


@pytest.mark.slow
def test_run_show_list_report(call, tmp_path, capsys):
    assert call("run", "3", "4", "--as", "stated", *SHORT) == 0
    out = capsys.readouterr().out
    assert "experiment 3 (stated), ResNet LI: 3 runs" in out and "FLOPs per sample" in out
    assert "misprint" not in out, "the printed counts hold for the full length only"
    for name in ("3-stated-curves", "3-stated-heatmaps", "4-stated-gradients"):
        for suffix in ("png", "pdf"):
            assert (tmp_path / "results" / "figures" / f"exp-{name}.{suffix}").stat().st_size > 2000
    assert call("run", "3", "--as", "stated", *SHORT) == 0
    assert "everything was already computed" in capsys.readouterr().out
    assert call("list", *SHORT) == 0
    assert "3 of 6 arms" in capsys.readouterr().out
    assert call("report", *SHORT, "--to", "page") == 0
    text, html = (tmp_path / "page" / "README.md").read_text(), (tmp_path / "page" / "report.html").read_text()
    for claim in ("C1", "C9"):
        assert f"## {claim}" in text and f"<h2>{claim}</h2>" in html
    assert "awaiting the CNN experiments" in text
    assert html.count("data:image/png;base64,") == text.count("![") == 5
    assert "<script" not in html and "http" not in html
    summary = json.loads((tmp_path / "page" / "summary.json").read_text())
    assert summary["experiments"]["3-stated"]["runs"] == 3 and set(summary["claims"]) >= {"C1", "C9"}
    assert "left out" not in capsys.readouterr().out
    stored = next((tmp_path / "results" / "4-stated").rglob("runs-*.pt"))
    stored.write_bytes(stored.read_bytes()[:-9])
    assert call("report", *SHORT, "--to", "page") == 0
    left_out = capsys.readouterr().out.splitlines()[0]
    assert left_out.startswith("left out: ") and "experiment 4 (stated), arm" in left_out
    assert "0 of 3 runs are stored for this configuration (1 damaged left out)" in left_out


@pytest.mark.slow
def test_an_experiment_of_the_user(call, tmp_path, capsys):
    (tmp_path / "mine.json").write_text(json.dumps(GOOD))
    assert call("run", "mine.json") == 0
    assert "42 → 62" in capsys.readouterr().out


@pytest.mark.slow
def test_the_advice_is_as_one_would_type_it(call, tmp_path, capsys):
    """Of an experiment in a file as well: what is advised computes what is missing, and what is held can be shown."""
    (tmp_path / "my runs").mkdir()
    (tmp_path / "my runs" / "mine.json").write_text(json.dumps(GOOD))
    file, made = "my runs/mine.json", ["--runs", "2", "--epochs-scale", "0.5", "--seed", "3"]
    assert call("run", file, "--as", "stated", *made) == 0
    capsys.readouterr()
    assert call("show", file, "--as", "run", "--out", "results", *made) == 2
    told = capsys.readouterr().err
    assert "results holds experiment my runs/mine.json (stated) with --runs 2 --epochs-scale 0.5 --seed 3." in told
    advice = re.search(r"Compute the rest with: sensli paper (.*?)\. results holds", told)[1]
    assert advice == "run 'my runs/mine.json' --as run --runs 2 --epochs-scale 0.5 --seed 3"
    assert call(*shlex.split(advice)) == 0
    capsys.readouterr()
    assert call("show", file, "--as", "run", *made) == 0
    capsys.readouterr()
    assert call("show", file, "--as", "run", "--out", "my runs", *made) == 2
    told = capsys.readouterr().err
    assert f"sensli paper {advice} --out 'my runs'. my runs holds no results." in told
    assert call("report", "--seed", "7", "--out", "results") == 2
    assert "Compute them with: sensli paper run spirals further --seed 7" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "show"])
def test_a_file_that_is_nested_too_deeply_is_refused_in_one_line(call, tmp_path, capsys, command):
    for depth in (400, 900, 3_000, 100_000):
        nested = "[" * depth + "]" * depth
        for text in ("[" * depth, nested, json.dumps(GOOD).replace("[4, 4]", nested), f'{{"name": {nested}}}'):
            (tmp_path / "deep.json").write_text(text)
            assert call(command, "deep.json") == 2
            told = capsys.readouterr().err
            assert told.startswith("sensli: deep.json") and told.count("\n") == 1, (depth, text[:40])


def test_what_was_run_is_what_is_stated_where_nothing_differs(call, capsys):
    assert call("run", "8", "--as", "run", "--runs", "2", "--epochs-scale", "0.01") == 0
    assert "recipe 'stated'" in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_that_holds_something_else_says_what(call, capsys):
    """Fewer runs, fewer epochs, another seed: show and list name the options that would show it."""
    assert call("show", "8") == 2
    assert "results holds no results." in capsys.readouterr().err
    made = ["--runs", "2", "--epochs-scale", "0.01"]
    assert call("run", "8", "--as", "stated", *made) == 0
    held = "results holds experiment 8 (stated) with --runs 2 --epochs-scale 0.01."
    capsys.readouterr()
    for words in ([], ["--runs", "3", "--epochs-scale", "0.01"], ["--seed", "5", *made]):
        assert call("show", "8", *words) == 2
        told = capsys.readouterr().err
        assert held in told and told.count("\n") == 1
    assert call("list") == 0
    assert capsys.readouterr().out.endswith(f"\nComputed with other options: {held}\n")
    assert call("list", *made) == 0
    assert "with other options" not in capsys.readouterr().out
    assert call("show", "8", "4", *made) == 0
    assert "Not shown, because it is not computed with these options: 4 (stated)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "99"], "unknown experiment '99'. Did you mean '9'? Known: 1, 2, 3, 4"),
        (
            ["run", "5", "--preset", "lap"],
            "unknown preset 'lap'. Did you mean 'laptop'? Known: day, laptop, paper, smoke.",
        ),
        (["run", "5", "--device", "cuda"], "--device cuda is not available here. Available: "),
        (["run", "wakee"], "Did you mean 'wake'?"),
        (["run", "2", "--runs", "0"], "--runs must be between 1 and 100,000, got 0."),
        (["run", "2", "--epochs-scale", "-1"], "--epochs-scale must be positive and at most 100, got -1.0."),
        (["run", "2", "--as", "rum"], "has no recipe 'rum'. It has: stated, run."),
        (["run", "2", "--out", "/dev/null/x"], "cannot be written"),
        (["run", "2", "--out", "/dev/null"], "is a file, not a results folder"),
        (["run", "nowhere.json"], "cannot be read"),
        (["run", "2", "--jobs", "0"], "--jobs must be at least 1, got 0."),
        (
            ["run", "2", "--jobs", "2", "--on", "ray"],
            "--jobs must be 1 with --on ray, which has its own processes, got 2.",
        ),
        (["show", "2"], "0 of 30 runs are stored"),
        (["report"], "no results are stored for these options. Compute them with: sensli paper run"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(call, capsys, words, text):
    assert call(*words) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_ctrl_c_is_no_traceback(call, capsys, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.runner, "run_plans", stop)
    assert call("run", "2") == 130
    assert capsys.readouterr().err == "Interrupted. Run the same command again to resume.\n"
    monkeypatch.setattr(commands, "terminal_table", stop)
    assert call("list") == 130
    assert capsys.readouterr().err == "Interrupted.\n", "there is nothing to resume"


def test_the_module_is_the_same_command(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for words, code, told in ((["list"], 0, ""), (["run", "99"], 2, "sensli: unknown experiment '99'.")):
        monkeypatch.setattr(sys, "argv", ["python -m sensli_lab.paper", *words])
        assert module() == code
        assert capsys.readouterr().err.startswith(told)


def test_plugs_into_a_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["paper", "list"])
    args.run(args)
    assert "FNN, full batch, one insertion" in capsys.readouterr().out
    broken = parser.parse_args(["paper", "run", "99"])
    with pytest.raises(BadExperiment):
        broken.run(broken)
