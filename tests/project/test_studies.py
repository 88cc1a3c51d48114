"""The studies of trials and triggers: their statistics by hand, and each of them from end to end on a task of a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import horizon, when
from benchmarks.horizon_tasks import Task

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
