"""`sensli compare` from end to end, on a task that takes a second, and what its tables say of runs made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensli.cli.main import main
from sensli.text.commands import TASKS as NAMES
from sensli_lab.compare import figure, report, work
from sensli_lab.compare.cli import PRESETS, CompareSize
from sensli_lab.compare.front import curve, front_ratios, rows
from sensli_lab.compare.jobs import Run, RunLook
from sensli_lab.compare.methods import methods
from sensli_lab.compare.report import table, verdict_lines
from sensli_lab.compare.tasks.registry import TASKS
from sensli_lab.compare.tasks.spirals import SPIRALS
from sensli_lab.compare.tasks.teacher import TEACHER

SMALL = replace(SPIRALS, steps=6, looks=(0.3,), points=4)
Call = Callable[..., int]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "spirals", SMALL)
    monkeypatch.setattr("sensli_lab.compare.jobs.provenance", dict)
    return lambda *words: main(["compare", *words])


def test_a_method_that_fails_costs_no_other_run(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, broken = work.train, {"large"}

    def sometimes(job: Any, *args: Any, **options: Any) -> Run:
        if job.method.name in broken:
            raise RuntimeError("mat1 and mat2 do\nnot fit")
        return train(job, *args, **options)

    monkeypatch.setattr(work, "train", sometimes)
    assert call("run", "spirals", "--seeds", "1", "--methods", "large", "small") == 2
    found = capsys.readouterr()
    assert "spirals, large, seed 0: failed with RuntimeError: mat1 and mat2 do not fit" in found.out
    assert "spirals, small, seed 0: done" in found.out and "test loss" in found.out, "the table of what there is"
    assert (
        "in sometimes" in found.err
        and "1 of 2 runs failed, whose errors are above; the others are stored." in found.err
    )
    broken.add("small")  # which is stored
    assert call("run", "spirals", "--seeds", "1", "--methods", "small") == 0
    assert call("run", "spirals", "--seeds", "1", "--methods", "large") == 2
    broken.clear()
    assert call("run", "spirals", "--seeds", "1", "--methods", "large", "small") == 0


@pytest.mark.slow
def test_run_show_list_report(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("spirals", "--methods", "small", "large", "units", "--seeds", "2")
    assert call("run", *asked) == 0
    first = capsys.readouterr().out
    assert first.count(": done") == 6 and "front ratio at the end" in first and "units: " in first
    assert call("run", *asked) == 0
    assert ": done" not in capsys.readouterr().out, "nothing was missing"
    assert call("show", *asked) == 0
    assert capsys.readouterr().out == first[first.index("\n\ntwo spirals") + 1 :]
    assert call("list", "--seeds", "2") == 0
    listed = capsys.readouterr().out
    assert f"6 of {2 * len(methods(SMALL))} runs" in listed and "random-place" in listed and "0 of" in listed
    assert "Grower(strategy" not in listed, "a method is described by its docstring"
    assert call("report", "--to", "page") == 0
    text = (tmp_path / "page" / "README.md").read_text()
    assert "`sensli compare run spirals --methods small large units --seeds 2`" in text and "minus small" in text
    assert (tmp_path / "page" / "figures" / "spirals.png").stat().st_size > 2000
    assert "data:image/png" in (tmp_path / "page" / "report.html").read_text()
    (stored,) = json.loads((tmp_path / "page" / "summary.json").read_text())
    assert stored["task"] == "spirals" and stored["runs"].keys() == {"small", "large", "units"}
    assert stored["front_ratios"].keys() == {"small", "large", "units"}
    assert len(stored["front_ratios"]["units"]["levels"]) == 40 and "[" in stored["front_ratios"]["units"]["most"]
    assert stored["costs"]["units"]["looks"] == 2 and stored["costs"]["units"]["passes"] > 1
    assert "seconds of a look" in text
    assert call("run", "spirals", "--methods", "small", "--seeds", "1", "--budget", "0.5") == 0
    assert call("report", "--to", "both", "--budget", "1", "0.5", "3") == 0
    pictures = {path.name for path in (tmp_path / "both" / "figures").iterdir()}
    stored = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert pictures == {"spirals.png", "spirals-x0.5.png"} and [one["budget"] for one in stored] == [0.5, 1]
    assert ", 0.5 times the FLOPs" in (tmp_path / "both" / "README.md").read_text()


@pytest.mark.slow
def test_a_preset_sizes_each_task_and_what_is_given_beside_it_comes_first(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(preset.keys() == set(NAMES) for preset in PRESETS.values()), "every task has its size"
    monkeypatch.setitem(TASKS, "teacher", replace(TEACHER, steps=6, looks=(0.3,), points=4))
    sizes = {
        "spirals": CompareSize(2, (0.5,), ("small", "large")),
        "teacher": CompareSize(1, methods=("small", "units")),
    }
    monkeypatch.setitem(PRESETS, "laptop", {**PRESETS["laptop"], **sizes})
    assert call("run", "spirals", "teacher", "spirals", "--preset", "laptop") == 0
    lines = capsys.readouterr().out.splitlines()
    done = [line.removesuffix(": done") for line in lines if line.endswith(": done")]
    assert done == [
        *("teacher, small, seed 0", "teacher, units, seed 0"),  # seed by seed through all tasks, each task once
        *("spirals x 0.5, small, seed 0", "spirals x 0.5, large, seed 0"),
        *("spirals x 0.5, small, seed 1", "spirals x 0.5, large, seed 1"),
    ]
    assert call("run", "spirals", "--preset", "laptop", "--seeds", "1", "--budget", "1", "--methods", "small") == 0
    given = capsys.readouterr().out
    assert "spirals, small, seed 0: done" in given and given.count(": done") == 1
    assert call("show", "all", "--preset", "laptop") == 0
    shown = capsys.readouterr().out
    assert (
        shown.index("student and teacher") < shown.index("two spirals")
        and "with the budget x 0.25 is stored. Compute them with: sensli compare run vgg --budget 0.25\n" in shown
    )
    assert call("list", "--preset", "laptop") == 0
    assert f"4 of {2 * len(methods(SMALL))} runs" in capsys.readouterr().out
    assert call("report", "--preset", "laptop", "--to", "page") == 0
    stored = json.loads((tmp_path / "page" / "summary.json").read_text())
    assert [(one["task"], one["budget"], len(one["runs"]["small"])) for one in stored] == [
        ("teacher", 1, 1),
        ("spirals", 0.5, 2),
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("run", "spiral"), "TASK: unknown task 'spiral'. Did you mean 'spirals'? Known: all, "),
        (("run", "spirals", "--methods", "smal"), "--methods: unknown method 'smal'. Did you mean 'small'? Known: "),
        (("run", "spirals", "--seeds", "0"), "--seeds must be at least 1, got 0."),
        (("run", "spirals", "--jobs", "0"), "--jobs must be at least 1, got 0."),
        (("run", "spirals", "--on", "ray", "--jobs", "2"), "--jobs must be 1 with --on ray, which has its own processes, got 2."),
        (("run", "spirals", "--ray-cpus", "2"), "--ray-cpus needs --on ray. Add --on ray, or leave it out."),
        (("run", "spirals", "--budget", "0"), "--budget must be a number above 0 (for example 0.5), got 0."),
        (("run", "spirals", "--budget", "nan"), "--budget must be a number above 0 (for example 0.5), got nan."),
        (("show", "spirals"), "compare-results: no run of the task spirals with the budget x 1 is stored. Compute them with: "),
        (("report",), "compare-results: no run with the budget x 1 is stored. Compute some with: sensli compare run spirals"),
        (("report", "--budget", "1", "-2"), "--budget must be a number above 0 (for example 0.5), got -2."),
        (("report", "--budget", "1", "4"), "compare-results: no run with the budget x 1 or x 4 is stored. Compute some with: "),
        (("list", "--out", "file"), "file is a file, not a results folder. Choose a folder with --out."),
        (("run", "fashion", "--data", "empty"), "Fashion-MNIST is incomplete in empty/fashion_mnist"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    call: Call, words: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("SENSLI_OFFLINE", "1")
    (tmp_path / "file").write_text("")
    assert call(*words) == 2
    out = capsys.readouterr()
    assert out.err.startswith(f"sensli: {text}") and out.err.count("\n") == 1 and not out.out
    assert not (tmp_path / "compare-results" / "spirals-x1").exists()


@pytest.mark.parametrize("words", [(), ("list",), ("run",), ("show",), ("report",)])
def test_help_says_what_can_be_asked_for(
    call: Call, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(NAMES) == set(TASKS)
    with pytest.raises(SystemExit) as ended:
        call(*words, "--help")
    out = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "example: sensli compare" in out
    if words == ("run",):
        assert (
            f"some of {', '.join(NAMES)}" in out
            and "--preset laptop" in out
            and "--budget F" in out
            and "--methods METHOD" in out
        )


# --- the numbers of the tables ---


def test_the_cost_of_a_decision_is_the_mean_over_all_looks() -> None:
    run = made(1.0, (8, 1), 30.0)
    run.costs = [RunLook(10.0, 0.5, 20.0, 4), RunLook(20.0, 1.5, 40.0, 4)]
    run.steps, run.step_seconds = 50, 5.0
    assert report.cost_of_looks([run]) == report.DecisionCost(
        looks=2, flops=15.0, share=0.3, passes=0.5, seconds=1.0, steps=10.0
    )
    assert report.cost_of_looks([made(1.0, (8, 1))]) is None, "a record of a version that did not time looks"
    known = methods(SPIRALS)
    shown = report.cost_table([known["small"], known["gradmax"]], {"small": {0: run}, "gradmax": {0: run}})
    assert shown.rows == (("gradmax", "15", "30.0%", "0.50", "1.000", "10", "one batch of 128"),)


def made(test: float, losses: tuple[float, ...], decisions: float = 0.0) -> Run:
    """A run of 100 FLOPs, its points equally far apart."""
    flops = [100.0 * point / (len(losses) - 1) for point in range(len(losses))]
    return Run(
        flops, list(losses), list(losses), budget=100.0, decisions=decisions, parameters=10, test_loss=test, test_error=0.5
    )  # fmt: skip


def test_differences_and_ratios_are_paired_by_seed() -> None:
    known = [method for name, method in methods(SPIRALS).items() if name in ("small", "large", "both")]
    runs = {
        "small": {0: made(1.0, (8, 2, 1)), 1: made(2.0, (8, 2, 1)), 2: made(9.0, (8, 2, 1))},
        "large": {0: made(0.5, (8, 4, 1)), 1: made(1.0, (8, 4, 1))},
        "both": {0: made(0.9, (8, 4.5, 1), 5.0), 1: made(1.9, (8, 4.5, 1), 5.0)},
    }
    small, large, both = rows(known, runs)
    assert both.to_small is not None and both.to_large is not None
    assert both.to_small.difference.mean == pytest.approx(-0.1) and both.to_small.difference.runs == 2
    assert both.to_large.difference.mean == pytest.approx(0.65)
    assert small.to_small is None and large.to_large is None
    assert both.decisions == pytest.approx(0.05) and both.front is not None
    assert both.front.end.mean == pytest.approx(1.0) and both.front.worst.mean > 1.2
    assert both.matches is not None and both.matches.shares == (1.0, 1.0) and large.matches is None
    shown = table([small, large, both])
    assert shown.rows[2][0] == "both" and shown.rows[2][-1] == "5.0%"
    said = verdict_lines([small, large, both])
    assert said[0] == "Of the fixed sizes, `large` ended with the lowest test loss (0.750)."
    assert "better than `small`" in said[1] and "not clearly different from `large`" in said[1]


def test_the_largest_ratio_of_all_levels_is_a_mean_over_the_seeds_and_that_of_each_run_is_not() -> None:
    known = [method for name, method in methods(SPIRALS).items() if name in ("small", "both")]
    runs = {
        "small": {seed: made(1.0, (8, 4, 2, 1, 0.5)) for seed in range(2)},
        # both fall behind once, at different losses
        "both": {0: made(1.0, (8, 7, 2, 1, 0.5)), 1: made(1.0, (8, 4, 2, 1.9, 0.5))},
    }
    _, both = rows(known, runs)
    assert both.front is not None
    alone = [front_ratios(curve(runs["both"][seed]), [curve(runs["small"][seed])]).worst for seed in range(2)]
    assert both.front.worst.mean == pytest.approx(math.sqrt(alone[0] * alone[1])) and min(alone) > 1.2
    assert both.front.most.mean == pytest.approx(math.sqrt(max(alone))), "the other one is at the front there"
    assert both.front.most.mean == max(
        level.mean for level in both.front.levels
    ) and both.front.end.mean == pytest.approx(1)


def test_a_fixed_size_is_compared_with_the_fronts_of_other_seeds() -> None:
    known = [method for name, method in methods(SPIRALS).items() if name in ("small", "large", "large-full")]
    quick, slow = made(1.0, (8, 2, 1)), made(1.0, (8, 8, 1))
    runs = {"small": {0: quick, 1: slow, 2: slow}, "large": {0: slow, 1: slow, 2: slow}, "large-full": {0: quick}}
    small, large, full = rows(known, runs)
    assert small.front is not None and large.front is not None
    beside = front_ratios(curve(quick), [curve(slow)]).mean, front_ratios(curve(slow), [curve(quick)]).mean
    # seed 0 meets two slow fronts, seeds 1 and 2 one quick and one slow one each
    assert small.front.mean.mean == pytest.approx((beside[0] * math.sqrt(beside[1]) * math.sqrt(beside[1])) ** (1 / 3))
    assert large.front.mean.mean == pytest.approx((beside[1] * beside[1]) ** (1 / 6)) and full.front is None
    one = {name: {0: own[0]} for name, own in runs.items()}
    assert all(row.front is None for row in rows(known, one)), "there is no other seed"


def test_when_a_method_is_as_good_as_the_large_network() -> None:
    known = [method for name, method in methods(SPIRALS).items() if name in ("small", "large", "units", "both")]
    large = made(1.0, (8, 6, 4, 2))
    runs = {
        "small": {0: made(1.0, (8, 2, 3)), 1: made(1.0, (8, 5))},
        "large": {0: large, 1: large},
        "units": {0: made(1.0, (8, 4, 0)), 1: made(1.0, (8, 4, 0))},
        "both": {1: made(1.0, (8, 5))},
    }
    small, _, units, both = rows(known, runs)
    assert str(small.matches) == "in 1 of 2 seeds" and str(both.matches) == "never"
    assert str(units.matches) == "0.75 [0.75, 0.75]", "half way between the points at 50 and 100 FLOPs"
    place = table([small]).header.index("as good as large after")
    assert [line[place] for line in table([small, units]).rows] == ["in 1 of 2 seeds", "0.75 [0.75, 0.75]"]


def test_a_figure_shows_all_curves_and_little_else() -> None:
    assert figure.limits([1.3, 2.6, float("inf")], 2) == pytest.approx((1.3 / 2**0.2, 2.6 * 2**0.2))
    assert figure.limits([1e-9, 1.0], 2) == pytest.approx((0.5e-9, 2.0)), "a factor of 2 at most"


def test_the_verdict_groups_many_methods() -> None:
    known = [methods(SPIRALS)[name] for name in ("small", "large", "layers", "units", "both")]
    ends = {"small": (2.0, 2.1), "large": (1.0, 1.1), "layers": (0.5, 0.61), "units": (3.0, 3.11), "both": (1.0, 3.0)}
    runs = {name: {seed: made(last, (8, 1)) for seed, last in enumerate(each)} for name, each in ends.items()}
    said = verdict_lines(rows(known, runs))
    assert said[1] == "Of the growing methods, `layers` ended with the lowest test loss (0.555)."
    assert said[2] == "Beside `small`: better: `layers`; worse: `units`; not clearly different: `both`."
    assert said[3] == "Beside `large`: better: `layers`; worse: `units`; not clearly different: `both`."


def test_one_seed_gives_no_verdict_and_a_missing_size_no_front() -> None:
    known = [method for name, method in methods(SPIRALS).items() if name in ("small", "large", "both")]
    runs = {"small": {0: made(1.0, (8, 1))}, "large": {1: made(1.0, (8, 1))}, "both": {0: made(0.1, (8, 1))}}
    (_, _, both) = rows(known, runs)
    assert both.front is None and both.to_large is None
    assert verdict_lines([both]) == ["One seed, so nothing can be said of `both`."]
