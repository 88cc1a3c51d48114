"""The figure: which curves have a colour, and that any number of methods, one seed or a diverged run can be drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sensli_lab.compare import figure
from sensli_lab.compare.jobs import Run
from sensli_lab.compare.methods import methods
from sensli_lab.compare.tasks.spirals import SPIRALS


def made(last: float) -> Run:
    losses = [8.0, 4.0, last]
    return Run([0.0, 50.0, 100.0], losses, losses, budget=100.0, test_loss=last)


def test_the_best_of_each_kind_have_a_colour() -> None:
    known = list(methods(SPIRALS).values())
    ends = {
        "layers": 1.0,
        "units": 2.0,
        "both": 3.0,
        "random-place": 9.0,
        "gradmax": 5.0,
        "tiny": 4.0,
        "net2net-own": math.nan,
    }
    runs = {name: {0: made(last)} for name, last in ends.items()}
    named = figure.best_methods([method for method in known if method.name in ends], runs)
    assert [method.name for method in named] == ["layers", "tiny", "random-place", "net2net-own", "units"]


@pytest.mark.slow
def test_all_methods_fit_into_one_figure(tmp_path: Path) -> None:
    known = list(methods(SPIRALS).values())
    runs = {method.name: {0: made(1.0 + place)} for place, method in enumerate(known)}
    runs["gradmax"] = {0: made(math.nan)}
    figure.draw_task(SPIRALS.title, known, runs, tmp_path / "all.png", "sensli compare run spirals " + "method " * 60)
    assert (tmp_path / "all.png").stat().st_size > 20_000


def test_a_long_command_is_broken_between_words() -> None:
    words = [f"word{number}" for number in range(100)]
    lines = figure._folded(" ".join(words), 80).splitlines()
    assert " ".join(lines).split() == words and max(map(len, lines)) <= 84
