"""Comparisons on a real Ray: the same numbers, a stop that resumes, and errors of one line; what a task does, in this process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensli import __version__
from sensli.paper.compare import on_ray, work
from sensli.paper.compare.job import Job
from sensli.paper.compare.methods import methods
from sensli.paper.compare.on_ray import Ray
from sensli.paper.compare.run import Run
from sensli.paper.compare.store import Store
from sensli.paper.compare.tasks import TASKS
from sensli.paper.compare.tasks.spirals import SPIRALS
from sensli.paper.compare.training import train
from sensli.paper.errors import PaperError
from sensli.paper.running.cluster import connected

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
    news = list(on_ray.work(__version__, given))
    states = [value for kind, value in news if kind == "state"]
    kind, run = news[-1]
    assert kind == "done" and len(states) > 5
    expected = timeless(train(Job(SMALL, methods(SMALL)["units"], 0), SMALL.load(None, 0)))
    assert timeless(Run.from_dict(run)) == expected
    resumed = list(on_ray.work(__version__, {**given, "state": states[-3]}))
    assert sum(kind == "state" for kind, _ in resumed) == 2 and timeless(Run.from_dict(resumed[-1][1])) == expected
    again = list(on_ray.work(__version__, {**given, "state": b"damaged"}))
    assert timeless(Run.from_dict(again[-1][1])) == expected


def test_a_task_of_another_version_or_configuration_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(
        PaperError, match=r"sensli is .* there and 0\.0 here\. Install the same version on every machine\."
    ):
        next(on_ray.work("0.0", given))
    with pytest.raises(PaperError, match="spirals is configured in another way there"):
        next(on_ray.work(__version__, {**given, "digest": "other"}))


def test_what_a_method_refuses_comes_back_as_words(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = replace(methods(SMALL)["units"], options={"grow": "units", "where": "conv"})
    monkeypatch.setattr(on_ray, "methods", lambda task: {"units": nowhere})
    ((kind, why),) = on_ray.work(__version__, {**given, "digest": Job(SMALL, nowhere, 0).digest, "save_every": 1e9})
    assert kind == "refused" and "nowhere to grow" in why


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as for the experiments on Ray")
@pytest.mark.filterwarnings("ignore")
def test_the_same_runs_on_a_real_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("ray", reason="Ray is missing. Get it with: pip install 'sensli[ray]'")
    monkeypatch.setattr("sensli.paper.compare.store.provenance", dict)
    store, jobs = Store(tmp_path), [Job(SPIRALS, methods(SPIRALS)[name], 0, 0.01) for name in ("small", "units")]
    with connected("local"):  # one start for both
        with pytest.raises(PaperError, match=r"--ray-cpus must be between 1 and \d+ \(the CPUs of the largest"):
            work.compute(jobs, store, ray=Ray(cpus=999))
        assert work.compute(jobs, store, ray=Ray()) == []
    assert capsys.readouterr().out.count(": done") == 2
    for job in jobs:
        assert timeless(store.load(job)) == timeless(train(job, SPIRALS.load(None, 0)))  # type: ignore[arg-type]
    assert work.compute(jobs, store, ray=Ray(address="nobody:1")) == [], "nothing is missing, so nobody is asked"
