"""Forged files in the results folder, checksums and all: they are computed again or refused in one line, and run no code."""

from __future__ import annotations

import random
import shutil

import pytest

from experiments import make_plan
from forging import JSON_VALUES, RAN, VALUES, Trap, altered, damaged
from sensli_lab.errors import PaperError
from sensli_lab.paper import runner, tables
from sensli_lab.paper.engine import TrainingJob
from sensli_lab.paper.store import Store
from sensli_lab.work.pages import terminal_table
from sensli_lab.work.store import read_json, read_results, write_json, write_results


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store") / "results")
    runner.run_plans([make_plan(runs=2)], store)
    return store


def forge(folder, draw):
    """Alter one of the two files of a part, and make the checksums right."""
    facts = next(folder.glob("runs-*.json"))
    kind = draw.choice(["facts", "tensors", "bytes"])
    if kind == "bytes":
        path = draw.choice([facts, facts.with_suffix(".pt")])
        forged, told = damaged(path.read_bytes(), draw)
        path.write_bytes(forged)
        return told
    content = read_json(facts)
    if kind == "facts":
        content, told = altered(content, draw, [value for value in JSON_VALUES if value != 10**400])
    else:
        tensors, told = altered(read_results(facts.with_suffix(".pt")), draw, [*VALUES, Trap()])
        content["tensors"] = write_results(facts.with_suffix(".pt"), tensors)
    write_json(facts, content)
    return told


@pytest.mark.slow
def test_forged_results_are_computed_again_or_refused(good, tmp_path, capsys):
    one = make_plan(runs=2)
    whole = good.load(one, "LI").runs["train_loss"]
    again = 0
    for seed in range(60):
        store = Store(tmp_path / str(seed))
        shutil.copytree(good.root, store.root)
        told = forge(store.folder(one, "LI"), random.Random(seed))
        try:
            again += runner.run_plans([one], store)
            results = store.load_all(one)
            terminal_table(tables.measured_table(one, results))
            assert results["LI"].runs["train_loss"].shape == whole.shape, told
        except PaperError as error:
            assert str(error), told
        except Exception as error:
            raise AssertionError(f"seed {seed}: {told}: {error!r}") from error
        shutil.rmtree(store.root)
    assert again > 30 and RAN == []


@pytest.mark.slow
def test_a_forged_state_of_a_stopped_run_is_refused_or_not_used(good, tmp_path):
    states = []

    class Watched(Store):
        def save_state(self, *arguments):
            states.append(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingJob.__init__, "__defaults__", (*TrainingJob.__init__.__defaults__[:-1], 0.0))
        runner.run_plans([make_plan(runs=2, seed=3, epochs_scale=5.0)], Watched(tmp_path / "first"))
    plan, arm, runs, state = states[0]
    for seed in range(60):
        store = Store(tmp_path / "second")
        forged, told = altered(state, random.Random(seed), VALUES)
        try:
            store.save_state(plan, arm, runs, forged)
            runner.run_plans([plan], store)
        except PaperError as error:
            assert "unfinished" in str(error), told
        except Exception as error:
            raise AssertionError(f"seed {seed}: {told}: {error!r}") from error
        shutil.rmtree(store.root)
