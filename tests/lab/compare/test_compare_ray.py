"""What a task of a comparison does on Ray, in this process. (`tests/lab/paper/test_ray.py` has a Ray, and runs one there.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sensli import __version__
from sensli_lab.compare import work
from sensli_lab.compare.jobs import Job, Run
from sensli_lab.compare.methods import methods
from sensli_lab.compare.tasks.registry import TASKS
from sensli_lab.compare.tasks.spirals import SPIRALS
from sensli_lab.compare.training import train
from sensli_lab.errors import PaperError

SMALL = replace(SPIRALS, steps=6, looks=(0.3,), points=4)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a task is sent, for a run of this process; it sets the variable that keeps it from downloading."""
    monkeypatch.setitem(TASKS, "spirals", SMALL)
    monkeypatch.setenv("SENSLI_OFFLINE", "0")
    job = Job(SMALL, methods(SMALL)["units"], 0)
    return {
        "task": "spirals", "method": "units", "seed": 0, "budget": 1.0, "digest": job.digest, "state": None, "folder": None,
        "threads": 1, "save_every": 0.0,
    }  # fmt: skip


def timeless(run: Run) -> dict[str, Any]:
    return {
        name: value
        for name, value in run.to_dict().items()
        if name not in ("seconds", "step_seconds", "costs", "train")
    }


@pytest.mark.slow
def test_a_task_tells_its_states_and_its_run_and_resumes_from_any_of_them(given: dict[str, Any]) -> None:
    news = list(work.work(__version__, given))
    states = [value for kind, value in news if kind == "state"]
    kind, run = news[-1]
    assert kind == "done" and len(states) > 5
    expected = timeless(train(Job(SMALL, methods(SMALL)["units"], 0), SMALL.load(None, 0)))
    assert timeless(Run.from_dict(run)) == expected
    resumed = list(work.work(__version__, {**given, "state": states[-3]}))
    assert sum(kind == "state" for kind, _ in resumed) == 2 and timeless(Run.from_dict(resumed[-1][1])) == expected
    again = list(work.work(__version__, {**given, "state": b"damaged"}))
    assert timeless(Run.from_dict(again[-1][1])) == expected


def test_a_task_of_another_version_or_configuration_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(
        PaperError, match=r"sensli is .* there and 0\.0 here\. Install the same version on every machine\."
    ):
        next(work.work("0.0", given))
    with pytest.raises(PaperError, match="spirals is configured in another way there"):
        next(work.work(__version__, {**given, "digest": "other"}))


def test_what_a_method_refuses_comes_back_as_words(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = replace(methods(SMALL)["units"], options={"grow": "units", "where": "conv"})
    monkeypatch.setattr(work, "named", lambda task, name: nowhere)
    ((kind, why),) = work.work(__version__, {**given, "digest": Job(SMALL, nowhere, 0).digest, "save_every": 1e9})
    assert kind == "refused" and "nowhere to grow" in why
