"""The study of places: its table by hand, the page's table from the file, and the whole of it on a task of a moment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import expansion_study as study

ROOT = Path(__file__).parents[2]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"  +", line.strip())]


def made_up() -> dict[str, Any]:
    """The larger rate is better on the new text; with it every arm has lost what its number and its seed say on the old one."""
    runs = [
        {
            "seed": seed, "place": place, "way": way, "rate": rate, "places": [number, 5], "steps": 100 + number,
            "old": 1 + number / 10 + seed / 100, "new": 2.0 - rate + (0.1 if seed == 1 else 0.0),
        }
        for seed in (*study.SEEDS, study.TUNING)
        for number, (place, way) in enumerate(study.ARMS)
        for rate in (0.25, 0.5)
    ]  # fmt: skip
    return {"bases": {str(seed): {"old": 1 + seed / 100, "new": 3.0} for seed in study.SEEDS}, "runs": runs}


def test_the_table_has_means_of_the_rate_that_another_seed_chose() -> None:
    rows = [cells(line) for line in study.table(made_up()).splitlines()[2:]]
    assert rows[0] == ["base", "nothing", "3.000", "1.010"]
    assert rows[1] == ["not expanded", "all weights", "0,5", "0.5", "100", "1.533 ± 0.058", "1.010 ± 0.010", "+0.000"]
    assert rows[3][:2] == ["merit", "new blocks"]
    assert rows[3][2:] == ["2,5", "0.5", "102", "1.533 ± 0.058", "1.210 ± 0.010", "+0.200"]


def test_what_is_done_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RATES", "DRAWN"):
        monkeypatch.setattr(study, name, dict.fromkeys(study.RATES, (0.25, 0.5)))
    runs = made_up()["runs"]
    assert list(study.planned(runs)) == []
    left = runs.pop(3)
    asked = []
    for each in study.planned(runs):
        asked.append(each)
        runs.append(left)
    assert asked == [(left["seed"], left["place"], left["way"], left["rate"])]


def test_the_table_of_the_page_is_that_of_the_file() -> None:
    found = json.loads(study.RESULTS.read_text())
    page = (ROOT / "docs" / "tasks" / "expand-a-saved-model.md").read_text()
    shown = page.split("| place | trained |", 1)[1].split("\n\n")[0].splitlines()[2:]
    printed = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]
    table = [cells(line) for line in study.table(found).splitlines()[2:]]
    assert [[cell for cell in row if cell] for row in printed] == table


@pytest.mark.library
@pytest.mark.slow
@pytest.mark.thorough
def test_the_study_runs_and_shows_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"BEFORE": 2, "AFTER": 12, "MEASURED": 1, "SEEDS": (0,)}.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "ARMS", (study.ARMS[0], ("merit", "new blocks"), ("top", "all weights")))
    for name in ("RATES", "DRAWN"):
        monkeypatch.setattr(study, name, dict.fromkeys(study.RATES, (1e-3,)))
    out = tmp_path / "study.json"
    given = ["--out", str(out), "--work", str(tmp_path / "work")]
    with torch.random.fork_rng():
        study.study(tmp_path / "work", out)
    runs = json.loads(out.read_text())["runs"]
    assert [(run["seed"], run["place"]) for run in runs] == [
        (seed, place) for seed in (study.TUNING, 0) for place in ("not expanded", "merit", "top")
    ]
    assert runs[0]["steps"] == 12 and runs[2]["steps"] == 12 * 6 // 8  # a third more blocks, fewer steps
    for run in runs:
        paid = run["steps"] * run["step_flops"] + (run["base_flops"] if run["place"] == "merit" else 0)
        assert paid <= 12 * run["base_flops"] < paid + run["step_flops"]
    assert study.main([*given, "--show"]) == 0
    assert "forgotten" in capsys.readouterr().out
