"""Long tasks: rates that are chosen on seeds of their own, budgets to end at a loss, the text, and arms with one mechanism each."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sensli.cli.main import main
from sensli_lab.compare import commands
from sensli_lab.compare.front import EndCost, best_fixed, budget_to_end_at, end_costs
from sensli_lab.compare.jobs import Job, Run, RunStore
from sensli_lab.compare.methods import methods
from sensli_lab.compare.report import seen_of
from sensli_lab.compare.task import Task, TaskData, TaskPart
from sensli_lab.compare.tasks import code
from sensli_lab.compare.tasks.registry import TASKS
from sensli_lab.compare.tasks.teacher import STUDENT
from sensli_lab.compare.training import JobTraining, train
from sensli_lab.errors import PaperError

TINY = replace(STUDENT, steps=20, points=4, looks=(0.3,))
LONG = [task for task in TASKS.values() if task.long]


def ended(loss: float) -> Run:
    return Run(test_loss=loss, validation=[loss], flops=[1.0], train=[loss], budget=1.0, parameters=10, steps=5)


def test_the_rate_of_a_long_task_rises_stays_and_falls_in_the_last_fifth() -> None:
    for task in LONG:
        assert [task.rate(share) for share in (0.005, 0.5, 0.8, 0.9, 1.0)] == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_the_rate_of_an_arm_is_the_one_that_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(TINY, rates={"small": 0.5})
    monkeypatch.setitem(TASKS, "student", task)
    small, large = (Job(task, methods(task)[name], 0) for name in ("small", "large"))
    assert (small.rate, large.rate) == (0.5, 1.0)
    asked = Job(TINY, methods(TINY)["small"], 0, lr_factor=0.5)
    assert asked.digest == small.digest != Job(TINY, methods(TINY)["small"], 0).digest, "the same numbers, the same run"
    training = JobTraining(small, task.load(None, 0))
    assert training.optimizer.param_groups[0]["initial_lr"] == 0.05
    assert train(small, task.load(None, 0)).validation == train(asked, TINY.load(None, 0)).validation


def test_rates_are_chosen_on_seeds_that_no_table_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TASKS, "student", TINY)
    monkeypatch.chdir(tmp_path)
    words = ["compare", "tune", "student", "--methods", "small", "large", "--seeds", "2", "--factors", "0.1", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    done = [line for line in out.splitlines() if line.endswith(": done")]
    assert done[0] == "student, small, 0.1 times the rate, seed 1000: done" and len(done) == 8
    assert out.splitlines()[-1].split()[-1] == "1", "a tenth of the rate learns next to nothing in 20 steps"
    store = RunStore(Path("compare-results"))
    assert not any(store.path(Job(TINY, methods(TINY)["small"], seed)).exists() for seed in range(1000))
    assert main(words) == 0 and ": done" not in capsys.readouterr().out, "nothing is computed twice"
    assert main(["compare", "tune", "student", "--factors", "0"]) == 2
    assert "--factors must be numbers above 0 (for example 0.5 1 2), got 0." in capsys.readouterr().err


def test_all_tasks_are_the_short_ones_and_long_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        commands.work, "compute_runs", lambda jobs, *rest: asked.append([job.task.name for job in jobs]) or []
    )
    monkeypatch.chdir(tmp_path)
    for word in ("all", "long"):
        main(["compare", "run", word, "--methods", "small", "--seeds", "1"])
    assert asked == [["teacher", "spirals", "fashion", "vgg", "resnet", "text"], ["code", "cifar", "student"]]


@pytest.mark.parametrize(
    ("ends", "level", "budget"),
    [
        ({0.25: 3.0, 1.0: 1.0}, 2.0, 0.5),  # the middle of the logarithms
        ({0.25: 3.0, 1.0: 1.0}, 1.5, 0.5**0.5),  # three quarters of them
        ({0.25: 3.0, 1.0: 1.0}, 3.5, 0.25),
        ({0.25: 3.0, 1.0: 1.0}, 0.5, math.inf),
        ({0.5: 3.0, 1.0: 2.0, 0.7: 2.0}, 2.0, 0.7),
    ],
)
def test_the_budget_to_end_at_a_loss(ends: dict[float, float], level: float, budget: float) -> None:
    assert budget_to_end_at(ends, level) == pytest.approx(budget)


def test_end_costs_are_of_the_same_seed_and_say_what_they_cannot_know() -> None:
    whole = {
        "small": {0: ended(2.0), 1: ended(2.0)},
        "large": {0: ended(1.0), 1: ended(1.4)},
        "new": {0: ended(0.5), 1: ended(1.0)},
    }
    half = {"new": {0: ended(1.5), 1: ended(1.2), 2: ended(0.0)}}
    chosen = [one for one in methods(TINY).values() if one.name in ("small", "large")]
    assert best_fixed(chosen, whole) == "large"
    (cost,) = end_costs({1.0: whole, 0.5: half}, "large")
    assert cost == EndCost("new", (pytest.approx(math.sqrt(0.5)), 0.5), 0.5)
    assert str(cost).startswith("at most 0.59 [")
    assert (
        str(EndCost("new", (0.5, math.inf), 0.25)) == "in 1 of 2 seeds"
        and str(EndCost("new", (math.inf,), 0.5)) == "never"
    )
    assert not end_costs({1.0: whole}, "large")


def test_samples_per_parameter() -> None:
    assert seen_of(replace(TASKS["code"], batch=4, tokens=64), ended(1.0)) == 5 * 4 * 64 / 10


def test_the_text_is_the_library_without_what_was_installed_and_has_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"b.py": "b", "a/z.py": "z", "site-packages/x.py": "x", "a.txt": "t"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text * 3000)
    assert [path.relative_to(tmp_path).as_posix() for path in code.sources(tmp_path)] == ["a/z.py", "b.py"]
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    code._windows.cache_clear()
    try:
        with pytest.raises(PaperError, match="has 6,001 bytes of Python, the task 'code' needs 20,000,000"):
            code.load_sources(None, 0)
        monkeypatch.setattr(code, "LEAST", 1000)
        monkeypatch.setattr(code, "HELD", 2)
        data = code.load_sources(None, 0)
    finally:
        code._windows.cache_clear()
    assert len(data.digest) == 16 and len(data.train) == 6001 // 64 - 4
    assert torch.equal(data.train.x[0, 1:], data.train.y[0, :-1])
    task = TASKS["code"]
    assert torch.isfinite(task.loss(task.network("small", 0)(data.train.x[:3]), data.train.y[:3]))


def few_samples(task: Task) -> TaskData:
    """Instead of all data, which are large."""
    x = task.sample(256)
    targets = {"cifar": torch.zeros(256, dtype=torch.long), "code": x}
    part = TaskPart(x, targets.get(task.name, torch.zeros(256, 10)))
    return TaskData(part, part, part)


@pytest.mark.parametrize(("task", "name"), [(task.name, arm.name) for task in LONG for arm in task.arms])
def test_every_arm_can_be_made(task: str, name: str) -> None:
    method = methods(TASKS[task])[name]
    grower = JobTraining(Job(TASKS[task], method, 0), few_samples(TASKS[task])).grower
    assert grower is not None and method.kind == "long" and method.what
