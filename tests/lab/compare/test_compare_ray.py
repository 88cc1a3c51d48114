"""What a task of a comparison does on Ray, in this process. (`tests/lab/paper/test_ray.py` has a Ray, and runs one there.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sensli import __version__
from sensli_lab.compare import jobs, work
from sensli_lab.compare.jobs import Job, Run
from sensli_lab.compare.methods import methods
from sensli_lab.compare.tasks.registry import TASKS
from sensli_lab.compare.tasks.spirals import SPIRALS
from sensli_lab.compare.training import train
from sensli_lab.errors import PaperError
from sensli_lab.work.on_ray import stream
from sensli_lab.work.workers import WorkCall, pack, unpack

SMALL = replace(SPIRALS, steps=6, looks=(0.3,), points=4)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> work.Given:
    """What a task is sent, for a run of this process; it sets the variable that keeps it from downloading."""
    monkeypatch.setitem(TASKS, "spirals", SMALL)
    monkeypatch.setenv("SENSLI_OFFLINE", "0")
    return work.Given(Job(SMALL, methods(SMALL)["units"], 0), save_every=0.0)


def news(given: work.Given) -> list[tuple[str, Any]]:
    """What the task tells, unpacked; the end is a run or the words of one that is refused."""
    found = []
    for kind, value in stream(__version__, pack(WorkCall(work.compute_run, given))):
        if kind == "done":
            result, _ = unpack(value)
            found.append(("refused" if isinstance(result, str) else kind, result))
        else:
            found.append((kind, unpack(value) if kind == "state" else value))
    return found


def timeless(run: Run) -> dict[str, Any]:
    return {
        name: value
        for name, value in run.to_dict().items()
        if name not in ("seconds", "step_seconds", "costs", "train")
    }


@pytest.mark.slow
def test_a_task_tells_its_states_and_its_run_and_resumes_from_any_of_them(given: work.Given) -> None:
    told = news(given)
    states = [value for kind, value in told if kind == "state"]
    kind, run = told[-1]
    assert kind == "done" and len(states) > 5
    expected = timeless(train(Job(SMALL, methods(SMALL)["units"], 0), SMALL.load(None, 0)))
    assert timeless(run) == expected
    resumed = news(replace(given, state=states[-3]))
    assert sum(kind == "state" for kind, _ in resumed) == 2 and timeless(resumed[-1][1]) == expected
    again = news(replace(given, state=b"damaged"))
    assert timeless(again[-1][1]) == expected


def test_a_task_of_another_version_or_configuration_is_refused(given: work.Given) -> None:
    with pytest.raises(
        PaperError, match=r"sensli is .* there and 0\.0 here\. Install the same version on every machine\."
    ):
        next(stream("0.0", pack(WorkCall(work.compute_run, given))))
    other = replace(given.job, task=replace(SMALL, steps=7))
    with pytest.raises(PaperError, match="spirals is configured in another way there"):
        news(replace(given, job=other))


def test_what_a_method_refuses_comes_back_as_words(given: work.Given, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = replace(methods(SMALL)["units"], options={"grow": "units", "where": "conv"})
    monkeypatch.setattr(jobs, "find_method", lambda task, name: nowhere)
    ((kind, why),) = news(replace(given, job=Job(SMALL, nowhere, 0), save_every=1e9))
    assert kind == "refused" and "nowhere to grow" in why
