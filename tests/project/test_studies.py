"""The studies of trials and triggers: their statistics by hand, and each of them from end to end on a task of a context."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import horizon, preset, when, when_front
from benchmarks.horizon_tasks import Task
from sensli_lab.compare.tasks.registry import find

LOSSES = [[3.0, 2.0, 2.0, 1.5], [2.0, 3.0, 1.0, 1.0], [1.0, 4.0, 3.0, 3.0]]  # [networks][shares]


@pytest.mark.parametrize(
    ("early", "end", "agreed"),
    [
        ([1, 2, 3], [4, 5, 6], 1.0),
        ([3, 2, 1], [4, 5, 6], -1.0),
        ([1, 3, 2], [4, 5, 6], 1 / 3),
        ([1, 1, 1], [4, 5, 6], 0.0),
    ],
)
def test_agreement_counts_pairs(early: list[float], end: list[float], agreed: float) -> None:
    assert horizon.agreement(early, end) == pytest.approx(agreed)


def test_a_race_keeps_the_better_ones_of_a_quarter_of_its_time() -> None:
    assert [horizon.winner(LOSSES, index) for index in range(4)] == [2, 0, 1, 1]
    assert horizon.raced(LOSSES, 2) == 1  # the networks 2 and 1 were ahead at first
    assert horizon.raced([[1.0, 9, 9], [2.0, 9, 8], [3.0, 9, 7]], 2) == 1  # the best one had been dropped


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(folder: Path) -> Task:
        x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        y = (x[:, 0] * x[:, 1] > 0).long()
        return Task((x[:40], y[:40]), (x[40:], y[40:]), (2, 4, 4, 2), 20, 0.01, 2)

    for study in (horizon, when):
        monkeypatch.setattr(study, "TASKS", {"tiny": tiny})
    monkeypatch.setattr(horizon, "STEPS", 8)
    monkeypatch.setattr(horizon, "MOMENTS", (1,))
    monkeypatch.setattr(when, "EPOCHS", 10)
    monkeypatch.setattr(when, "TRIGGERS", {"Every(8)": lambda: when.triggers.Every(3)})


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize("study", [horizon, when])
def test_a_study_runs_prints_its_tables_and_shows_them_again(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert study.main(["--out", str(file), "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "tiny" in printed and ("rank agreement" in printed or "lost in trials" in printed)
    assert study.main(["--show", str(file)]) == 0
    assert capsys.readouterr().out == printed
    if study is when:  # nobody spends more than the rest of its last step beyond the budget
        assert all(
            0.95 < arm["spent"] < 1.15 for run in when.json.loads(file.read_text())["tiny"] for arm in run.values()
        )


# --- when, by the front ratio ---


def made_up(slower: float, test: float) -> dict[str, Any]:
    """A seed whose every trigger needs so many times the FLOPs of the small network, which is the front, for every loss."""
    flops, losses = [0.0, 10.0, 20.0, 40.0, 100.0], [8.0, 4.0, 2.0, 1.0, 0.5]
    grown = {"flops": [slower * each for each in flops], "losses": losses, "test": test, "growths": [3, 5]}
    small = {"flops": flops, "losses": losses, "test": 0.75}
    large = {"flops": flops, "losses": [8.0] * 5, "test": 1.25}
    first, *others = when_front.TRIGGERS
    return {"small": small, "large": large, first: {**grown, "growths": [2]}, **dict.fromkeys(others, grown)}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_table_of_triggers_has_geometric_means_over_paired_seeds() -> None:
    """Factors of 2, 4 and 8: their mean is 4, and the interval that of their logarithms, with Student's t for two degrees of freedom."""
    runs = [made_up(slower, test) for slower, test in ((2.0, 0.5), (4.0, 0.75), (8.0, 1.0))]
    half = 4.302653 / math.sqrt(3)
    factor = f"{4:.2f} [{4 * 2**-half:.2f}, {4 * 2**half:.2f}]"
    rows = {cells(line)[0]: cells(line)[1:] for line in when_front.table(runs).splitlines()[2:]}
    assert rows["small"] == ["0.750", "+0.000 ± 0.000", "-0.500 ± 0.000"]
    assert rows["large"] == ["1.250", "+0.500 ± 0.000", "+0.000 ± 0.000"]
    spread = f"{0.25 * half:.3f}"
    first, *others = when_front.TRIGGERS
    assert rows[first] == ["0.750", f"+0.000 ± {spread}", f"-0.500 ± {spread}", factor, factor, factor, factor, "1.0"]
    assert all(rows[name][-5:] == [factor, factor, factor, factor, "2.0"] for name in others)


@pytest.mark.parametrize(
    ("head", "tasks", "ways"),
    [
        ("| | CNN, long |", [name for name in preset.TASKS if name not in preset.BLOCKS], preset.WAYS),
        ("| | short | middle | long | short, at most |", preset.BLOCKS, preset.WHEN),
    ],
    ids=["units", "blocks"],
)
def test_the_tables_of_the_rules_are_those_of_the_file(head: str, tasks: Sequence[str], ways: Iterable[str]) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/results/long-budgets.md").read_text()
    _, _, *printed = page[page.index(head) :].split("\n\n")[0].splitlines()
    rows = [list(preset.rows(root / "benchmarks/preset.jsonl", task)) for task in tasks]
    found = [{row[0]: row[2 + at_most] for row in own} for at_most in range(1 + (ways is preset.WHEN)) for own in rows]
    for line in printed:
        arm, *numbers = (cell.strip(" *") for cell in line.strip("|").split("|"))
        assert numbers == [each[arm] for each in found], arm
    assert {line.strip("|").split("|")[0].strip(" *") for line in printed} >= set(ways)


def test_the_tables_of_the_page_are_those_of_the_file() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/results/triggers.md").read_text()
    for name, title in (("fashion", "Fashion-MNIST"), ("spirals", "spirals")):
        shown = json.loads((root / "benchmarks/when_front.json").read_text())[name]
        rows = {cells(line)[0]: cells(line)[1:] for line in when_front.table(shown).splitlines()[2:]}
        printed = page[page.index(f"| {title} | at the end") :].split("\n\n")[0].splitlines()[2:]
        assert len(printed) == len(when_front.TRIGGERS)
        for line, trigger in zip(printed, when_front.TRIGGERS, strict=True):
            said, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
            assert said.strip("`").startswith(trigger.split(",")[0].split("(")[0])
            _, small, large, *ratios, growths = rows[trigger]
            found = [*ratios, growths, small, large]
            assert [re.sub(r"^[+-](0\.000 )", r"\1", each) for each in found] == numbers, line


@pytest.mark.slow
def test_a_trigger_is_asked_after_as_many_steps_each_time_and_every_look_is_paid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float | None] = []

    class Told(when_front.triggers.Trigger):
        def fires(self, context: Any) -> bool:
            asked.append(context.metric)
            return context.call in (3, 6)

    monkeypatch.setattr(when_front, "TRIGGERS", {"told": Told})
    task = find("spirals")
    run = when_front.study(task, 0, task.load(None, 0), 0.01)
    assert run["told"]["growths"] == [3, 6] and list(run) == [*task.sizes, "told"]
    assert 6 < len(asked) <= when_front.CALLS  # a network that has grown makes fewer steps for its FLOPs
    assert all(metric is not None and 0 < metric < 5 for metric in asked)
    assert 0 < run["told"]["decisions"] < 0.5
