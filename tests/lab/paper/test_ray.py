"""The experiments on a real Ray: the same numbers, a lost worker, a stop at any moment, and errors of one line."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import programs
from experiments import GOOD
from pictures import TINY, raw, tiny
from sensli import __version__
from sensli.cli.main import main
from sensli_lab.compare.jobs import Job as Run
from sensli_lab.compare.jobs import RunStore as Runs
from sensli_lab.compare.methods import methods
from sensli_lab.compare.tasks.spirals import SPIRALS
from sensli_lab.compare.training import train as compared
from sensli_lab.compare.work import compute_runs
from sensli_lab.errors import PaperError
from sensli_lab.paper import image_sets, runner
from sensli_lab.paper.engine import TrainingJob
from sensli_lab.paper.image_sets import DataError
from sensli_lab.paper.machine import Machine
from sensli_lab.paper.planning import RunOptions, parse, plan
from sensli_lab.paper.store import Store
from sensli_lab.work.on_ray import ray_place, stream
from sensli_lab.work.workers import WorkCall, pack

ray = pytest.importorskip("ray", reason="Ray is missing. Get it with: pip install 'sensli[ray]'")

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, at its start and end
]
TIMES = dict.fromkeys(("seconds", "step_seconds", "costs", "train"))  # what a clock said, and what hangs on it
LONG = {**GOOD, "runs": 2, "settings": {**GOOD["settings"], "epochs": 1000}, "arms": {"LI": {"insert_at": [300]}}}


class Brought(type(Path())):
    """A data folder that brings its images along: where it arrives, they are made up, or cannot be read if it is called so."""

    def __reduce__(self):
        return _arrived, (str(self),)


def _arrived(folder):
    image_sets._LOADERS["cifar10"] = lambda folder: raw(100 // (folder.name != "broken") + 50)
    return Path(folder)


class Held(type(Path())):
    """A data folder that holds back the worker it arrives at: after its first state it waits until the folder is there."""

    def __reduce__(self):
        return _hold, (str(self),)


def _hold(folder):
    from sensli_lab.paper import runner

    whole = runner.train_piece

    def train(job):
        def save_and_wait(state):
            job.save(state)
            wait_for(Path(folder).exists)

        return whole(replace(job, save=save_and_wait))

    runner.train_piece = train
    return Path(folder)


@pytest.fixture(scope="module", autouse=True)
def _interruptible():
    """A job in the background is started with Ctrl-C ignored, and hands that on to what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def started():
    """One Ray for all: `--on ray` uses the one that its process has, and leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setitem(image_sets._LOADERS, "cifar10", lambda folder: raw())
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.CRITICAL}
        ray.init(address="local", num_cpus=2, **options)
        yield
        assert ray.is_initialized(), "it was ours, and was shut down"
        ray.shutdown()


def planned(experiment, **options):
    return plan(parse(experiment, "mine.json"), "stated", RunOptions(**options))


def same(one, store, other):
    """Equal to the bit, but for what a clock said."""
    for arm in one.arms:
        mine, theirs = store.load(one, arm).runs, other.load(one, arm).runs
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"seconds", "look_seconds"}:
            assert torch.equal(mine[name].nan_to_num(), theirs[name].nan_to_num()), (arm, name)


def wait_for(found):
    end = time.monotonic() + programs.HANGS
    while not found():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def descendants(of, title):
    """The processes under `of` whose command begins with `title`."""
    parents, titles = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
    found = []
    for process, words in titles.items():
        above = process
        while above > 1 and above != of:
            above = parents.get(above, 0)
        if above == of and process != of and words.startswith(title):
            found.append(process)
    return found


def test_the_numbers_are_the_same_to_the_bit(tmp_path, capsys):
    plans = [planned(GOOD), planned(TINY)]
    there, here = Store(tmp_path / "ray"), Store(tmp_path / "here")
    machine = Machine(Brought("data"), "cpu")
    assert runner.run_plans(plans, there, machine, ray_place()) == 2 + 6
    lines = capsys.readouterr().out.splitlines()
    for run in (1, 2):  # the network to train from the start is known only when its partner has grown
        order = [line for line in lines if f"run {run} of 2" in line]
        grown, whole = (next(i for i, line in enumerate(order) if arm in line) for arm in ("LI", "whole"))
        assert grown < whole
    runner.run_plans(plans, here, machine)
    for one in plans:
        same(one, there, here)
    assert there.load(plans[1], "LI").facts["device"] == "cpu, 1 thread"
    assert runner.run_plans(plans, there, machine, ray_place()) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The long experiment, computed without Ray."""
    store = Store(tmp_path_factory.mktemp("whole"))
    runner.run_plans([planned(LONG)], store)
    return store


@contextmanager
def at_the_first_state(store, action):
    """A machine whose worker waits after its first state until that has arrived here and `action` was done."""
    go = Held(store.root / "go")

    def watch():
        wait_for(lambda: list(store.root.rglob("unfinished*")))
        action()
        go.mkdir()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        yield Machine(go, "cpu")
        watching.result()


def test_a_lost_worker_costs_little(tmp_path, whole, capsys):
    store, one = Store(tmp_path), planned(LONG)

    def kill():
        (worker,) = descendants(os.getpid(), "ray::sensli")
        os.kill(worker, signal.SIGKILL)

    with at_the_first_state(store, kill) as machine:
        runner.run_plans([one], store, machine, ray_place(save_every=0.0))
    out = capsys.readouterr().out
    assert "LI: 2 runs: its worker was lost (WorkerCrashedError); running it again" in out
    assert "resumed" in out
    same(one, store, whole)
    assert not list(tmp_path.rglob("unfinished*"))


def test_what_was_stopped_goes_on_without_ray(tmp_path, whole, capsys):
    store, one = Store(tmp_path), planned(LONG)
    with (
        at_the_first_state(store, lambda: os.kill(os.getpid(), signal.SIGINT)) as machine,
        pytest.raises(KeyboardInterrupt),
    ):
        runner.run_plans([one], store, machine, ray_place(save_every=0.0))
    wait_for(lambda: not descendants(os.getpid(), "ray::sensli"))
    runner.run_plans([one], store)
    assert "resumed" in capsys.readouterr().out
    same(one, store, whole)


@pytest.mark.thorough  # its Ray takes a quarter of a minute; the test above stops and resumes too
def test_ctrl_c_of_the_command_with_a_ray_of_its_own(tmp_path, capsys):
    arms = {"quick": {"epochs": 5}, "slow": {"epochs": 60_000}}
    experiment = {**GOOD, "runs": 1, "arms": arms, "recipes": {"stated": {}}}
    (tmp_path / "mine.json").write_text(json.dumps(experiment))
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}  # a line is here when it is printed
    command = [sys.executable, "-m", "sensli.cli", "paper", "run", "mine.json", "--on", "ray", "--out", "out"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
    try:
        before = next(line for line in process.stdout if "quick: 1 run, " in line)
        below = descendants(process.pid, "")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=programs.HANGS)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "Interrupted. Run the same command again to resume.\n")
    assert "slow" not in before + out
    assert below
    wait_for(lambda: not any(Path(f"/proc/{one}").exists() for one in below))
    one = planned({**experiment, "arms": {"quick": arms["quick"]}})
    assert runner.run_plans([one], Store(tmp_path / "out")) == 0
    assert Store(tmp_path / "out").missing(planned(experiment), "slow") == [0]


def test_an_error_in_a_task_is_one_line(tmp_path):
    store = Store(tmp_path / "out")
    with pytest.raises(
        PaperError, match=r"before the first run, on \S+: ZeroDivisionError: .*test_ray.py, line \d+\)"
    ) as found:
        runner.run_plans([planned(TINY)], store, Machine(Brought(tmp_path / "broken"), "cpu"), ray_place())
    assert "\n" not in str(found.value) and f'File "{__file__}", line' in str(found.value.__cause__)
    missing = tiny(data={"name": "fashion_mnist", "train": 96, "validation": 32})
    text = rf"on \S+: Fashion-MNIST is incomplete in {tmp_path}\S+ and cannot be downloaded \(SENSLI_OFFLINE is set, as"
    with pytest.raises(DataError, match=text):
        runner.run_plans([planned(missing)], store, Machine(tmp_path, "cpu"), ray_place())


def test_a_cancelled_training_ends(monkeypatch):
    """Ray closes the stream of a task that it cancels; its process stays, and must not go on computing."""
    monkeypatch.setenv("SENSLI_OFFLINE", "1")  # as the task does, for the rest of its process
    slow = planned({**GOOD, "settings": {**GOOD["settings"], "epochs": 1_000_000}}).arms["small"]
    job = TrainingJob(slow, 0, (0,), machine=Machine(device="cpu"), save_every=1e9)
    before = set(threading.enumerate())
    news = stream(__version__, pack(WorkCall(runner.compute_job, job)))
    assert next(news) == ("share", 0.0)
    assert set(threading.enumerate()) > before
    news.close()
    wait_for(lambda: set(threading.enumerate()) <= before)


def test_another_version_on_a_machine_is_said():
    with pytest.raises(PaperError, match=rf"on \S+: sensli is {__version__} there and 0\.0 here\. Install the same"):
        next(stream("0.0", b"not looked at"))


def test_a_comparison_makes_the_same_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sensli_lab.compare.jobs.provenance", dict)
    store, jobs = Runs(tmp_path), [Run(SPIRALS, methods(SPIRALS)[name], 0, 0.01) for name in ("small", "units")]
    with pytest.raises(PaperError, match=r"--ray-cpus must be between 1 and 2 \(the CPUs of the largest"):
        compute_runs(jobs, store, place=ray_place(cpus=999))
    assert compute_runs(jobs, store, place=ray_place()) == []
    assert capsys.readouterr().out.count(": done") == 2
    for job in jobs:
        mine, there = (run.to_dict() for run in (compared(job, SPIRALS.load(None, 0)), store.load(job)))
        assert {**mine, **TIMES} == {**there, **TIMES}
    assert compute_runs(jobs, store, place=ray_place(address="nobody:1")) == [], (
        "nothing is missing, so nobody is asked"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["2", "--ray-address", "auto"], "--ray-address needs --on ray"),
        (["2", "--on", "ray", "--ray-address", "nonsense"], "--ray-address must be HOST:PORT of the cluster's head"),
        (["2", "--on", "ray", "--ray-address", "ray://127.0.0.1:9"], "cluster's head"),  # the client has no streams
        (
            ["2", "--on", "ray", "--ray-address", "127.0.0.1:9"],
            "127.0.0.1:9: no answer (Connection refused)",
        ),
        (
            ["2", "--on", "ray", "--ray-cpus", "3"],
            "--ray-cpus must be between 1 and 2 (the CPUs of the largest machine), got 3.",
        ),
        (["5", "--on", "ray", "--device", "cuda"], "--device cuda is not available: no machine of this Ray has a GPU"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, words, text):
    assert call(tmp_path, words) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_without_ray_it_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert call(tmp_path, ["2", "--on", "ray"]) == 2
    assert "Get it with: pip install 'sensli[ray]'" in capsys.readouterr().err


def call(folder, words):
    return main(["paper", "run", *words, "--out", str(folder / "out")])
