"""Results are whole or noticed, computed once, and never mixed; a stopped run goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from experiments import GOOD, make_plan
from sensli_lab.compare.jobs import Run
from sensli_lab.errors import NoResults, StoreError
from sensli_lab.paper import runner, stacked
from sensli_lab.paper.engine import TrainingJob
from sensli_lab.paper.planning import RunOptions, parse, plan
from sensli_lab.paper.store import Store
from sensli_lab.work.store import Damaged, read_json, read_results


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results")


@pytest.fixture
def trained(monkeypatch):
    """The jobs that were really trained."""
    jobs = []
    train = stacked.train_runs
    monkeypatch.setattr(stacked, "train_runs", lambda job: jobs.append(job) or train(job))
    return jobs


def test_what_is_stored_is_what_was_trained(store):
    one = make_plan()
    runner.run_plans([one], store)
    result = store.load(one, "LI")
    direct = stacked.train_runs(TrainingJob(one.arms["LI"], one.seed, (0, 1, 2)))
    for name, values in direct.runs.items():
        assert torch.equal(result.runs[name].nan_to_num(), values.nan_to_num())
    assert {"commit", "versions", "seeds", "settings", "counts", "seconds", "seed"} <= result.facts.keys()
    assert result.facts["counts"]["parameters"] == [42, 62]


def test_only_missing_runs_are_computed(store, trained):
    runner.run_plans([make_plan(runs=2)], store)
    assert [job.runs for job in trained] == [(0, 1), (0, 1)]
    assert runner.run_plans([make_plan(runs=2)], store) == 0
    runner.run_plans([make_plan(runs=4)], store)
    assert [job.runs for job in trained[2:]] == [(2, 3), (2, 3)]
    assert store.load(make_plan(runs=4), "LI").runs["train_loss"].shape == (4, 21)
    assert store.load(make_plan(runs=1), "LI").runs["train_loss"].shape == (1, 21)


def test_a_changed_configuration_is_never_mixed_with_old_results(store, trained):
    runner.run_plans([make_plan()], store)
    for other in (make_plan(seed=1), make_plan(epochs_scale=2.0), make_plan("run")):
        with pytest.raises(NoResults, match="0 of 3 runs are stored"):
            store.load(other, "LI")
        assert runner.run_plans([other], store) == 2
    assert len(trained) == 8


@pytest.mark.parametrize("suffix", [".pt", ".json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damaged_results_are_noticed_and_recomputed(store, trained, capsys, suffix, damage):
    one = make_plan()
    runner.run_plans([one], store)
    whole = store.load(one, "LI").runs["train_loss"]
    path = next(store.folder(one, "LI").glob(f"runs-*{suffix}"))
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(content) // 2
        broken = content[:middle] + (b"" if damage == "cut" else bytes([content[middle] ^ 1]) + content[middle + 1 :])
        path.write_bytes(broken)
    noticed = not (suffix == ".json" and damage == "gone")  # without its JSON a part does not exist
    with pytest.raises(NoResults, match="1 damaged" if noticed else "0 of 3 runs"):
        store.load(one, "LI")
    assert runner.run_plans([one], store) == 1
    assert ("damaged" in capsys.readouterr().out) is noticed
    assert torch.equal(store.load(one, "LI").runs["train_loss"], whole)


def test_a_stopped_run_goes_on_where_it_was(store, trained, monkeypatch, capsys):
    one = make_plan(epochs_scale=5.0)  # 100 epochs: states may be saved after 25, 50 and 75

    def stop_after_two(self, *arguments, save=Store.save_state):
        save(self, *arguments)
        stop_after_two.calls += 1
        if stop_after_two.calls == 2:
            raise KeyboardInterrupt

    stop_after_two.calls = 0
    monkeypatch.setattr(Store, "save_state", stop_after_two)
    monkeypatch.setattr(TrainingJob, "save_every", 0.0)
    monkeypatch.setattr(TrainingJob.__init__, "__defaults__", (*TrainingJob.__init__.__defaults__[:-1], 0.0))
    with pytest.raises(KeyboardInterrupt):
        runner.run_plans([one], store)
    runner.run_plans([one], store)
    assert [job.state is not None for job in trained] == [False, True, False]
    assert trained[1].state["epoch"] == 25
    assert "resumed" in capsys.readouterr().out
    fresh = stacked.train_runs(TrainingJob(one.arms["LI"], one.seed, (0, 1, 2)))
    assert torch.equal(store.load(one, "LI").runs["train_loss"], fresh.runs["train_loss"])
    assert not list(store.root.rglob("unfinished*"))


def test_a_half_written_state_is_not_used(store, trained):
    one = make_plan()
    store.save_state(one, "LI", [0, 1, 2], {"engine": {}, "seconds": 1.0, "runs": [0, 1, 2]})
    path = next(store.root.rglob("unfinished*"))
    path.write_bytes(path.read_bytes()[:-7])
    runner.run_plans([one], store)
    assert trained[0].state is None


def test_a_state_of_other_runs_is_not_used(store, trained):
    one = make_plan()
    store.save_state(one, "LI", [0, 1, 2], {"engine": {}, "seconds": 1.0, "runs": [0, 2]})
    runner.run_plans([one], store)
    assert trained[0].state is None


def test_no_temporary_file_survives(store):
    runner.run_plans([make_plan()], store)
    assert not [path for path in store.root.rglob("*") if path.name.startswith(".")]


def test_results_are_for_people_too(store):
    runner.run_plans([make_plan()], store)
    facts = json.loads(next(store.root.rglob("*.json")).read_text())
    assert facts["arm"] in ("LI", "small") and len(facts["seeds"]) == 3


def test_an_unwritable_folder_is_said_before_anything_is_trained(tmp_path, trained):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        runner.run_plans([make_plan()], Store(blocked / "results"))
    assert not trained


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder(tmp_path, trained):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        runner.run_plans([make_plan()], Store(tmp_path / "results"))


def test_an_arm_that_another_experiment_has_computed_is_not_computed_again(tmp_path):
    store = Store(tmp_path)
    first = plan(parse({**GOOD, "name": "first"}, "first.json"), "stated", RunOptions())
    second = plan(parse({**GOOD, "name": "second", "runs": GOOD["runs"] + 1}, "second.json"), "stated", RunOptions())
    runner.run_plans([first], store)
    assert all(store.missing(second, arm) == [GOOD["runs"]] for arm in second.arms)  # one run more
    runner.run_plans([second], store)
    for arm in second.arms:
        mine, theirs = store.load(second, arm).runs["train_loss"], store.load(first, arm).runs["train_loss"]
        assert len(mine) == len(theirs) + 1 and torch.equal(mine[: len(theirs)], theirs)


def test_the_results_that_come_with_the_report_can_be_read() -> None:
    stored = sorted((Path(__file__).parents[3] / "docs" / "replication" / "results").rglob("runs-*.json"))
    assert stored
    for path in stored:
        assert read_results(path.with_suffix(".pt"), read_json(path)["tensors"])["runs"]


@pytest.mark.parametrize("depth", [300, 900, 3_000, 100_000])
def test_a_file_that_is_nested_too_deeply_is_damaged(depth, tmp_path):
    """Whichever step fails: reading, the checksum, or what goes through the entries afterwards."""
    nested = "[" * depth + "]" * depth
    for text in (nested, '{"a": ' + nested + "}"):
        (tmp_path / "deep.json").write_text(text)
        with pytest.raises(Damaged):
            read_json(tmp_path / "deep.json")
    data: object = 1.0
    for _ in range(depth):
        data = [data]
    with pytest.raises(Damaged):
        Run.from_dict({"flops": data})
