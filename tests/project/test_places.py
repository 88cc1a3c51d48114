"""The study of places: its statistics, and that all places begin from one state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.places import Run, chosen, correlation, main, regret, study
from benchmarks.places_tasks import Task, _shuffled, funnel

RUN: Run = {
    "places": ["a", "b", "c", "d"],
    "training": [0.4, 0.1, 0.3, 0.2],
    "validation": [0.5, 0.6, 0.4, 0.7],
    "unchanged": {"training": 0.5, "validation": 0.6},
    **{f"{norm}{per}": [1.0, 4.0, 2.0, 3.0] for norm in ("frobenius", "operator") for per in ("", " per parameter")},
    **{f"natural{per}": [9.0, 1.0, 2.0, 2.0] for per in ("", " per parameter")},
}


def test_correlation_is_spearmans() -> None:
    assert correlation(RUN["frobenius"], RUN["training"]) == pytest.approx(1.0)  # larger merits, smaller losses
    # ranks 3, 0, 1.5, 1.5 against 0, 3, 1, 2
    assert correlation(RUN["natural"], RUN["training"]) == pytest.approx(-4.5 / (4.5 * 5) ** 0.5)
    assert correlation([1.0, 1.0, 1.0], [3.0, 2.0, 1.0]) == 0.0


def test_regret_is_to_the_best_place() -> None:
    assert [chosen(RUN, rule) for rule in ("frobenius", "natural", "first", "middle", "last")] == [1, 0, 0, 2, 3]
    assert regret(RUN, "frobenius", "training") == 0.0
    assert regret(RUN, "natural", "training") == pytest.approx(0.3)
    assert regret(RUN, "random", "validation") == pytest.approx(0.15)


def test_all_places_begin_from_one_state() -> None:
    """With a rate of zero nothing moves, so every place ends with the loss of the network that did not grow."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    y = (x[:, 0] > 0).long()
    given = [(x[:20], y[:20]), (x[20:], y[20:])]
    task = Task("linear", False, lambda: funnel(3, 6, 5, 2), _shuffled(x, y, 20), given, given[:1], 2, 2, rate=0.0)
    run = study(task, 0)
    assert len(run["places"]) == 2
    for part in ("training", "validation"):
        assert run[part] == pytest.approx([run["unchanged"][part]] * 2, rel=1e-6)
    assert all(len(run[norm]) == 2 for norm in ("frobenius", "operator", "natural"))


def test_tables_are_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "places.json"
    file.write_text(json.dumps({"spirals": [RUN, RUN]}))
    assert main(["--show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "1.00 ± 0.00" in shown and "300.0 ± 0.0" in shown and "2 seeds, 4 places" in shown
