"""Experiment files are read strictly, and a mistake is one line that helps."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest

from experiments import GOOD
from sensli_lab.errors import BadExperiment
from sensli_lab.paper import planning, stacked, tables
from sensli_lab.paper.engine import engine
from sensli_lab.paper.planning import RunOptions, parse, plan
from sensli_lab.paper.settings import DataSettings, Network, Optimizer, Schedule, Settings, digest


def changed(path: str, value: object) -> dict:
    data = copy.deepcopy(GOOD)
    *folders, last = path.split("/")
    spot = data
    for folder in folders:
        spot = spot[folder]
    spot[last] = value
    return data


def test_recipes_and_arms_are_laid_over_the_settings():
    experiment = parse(GOOD, "mine.json")
    stated, run = (plan(experiment, recipe, RunOptions()) for recipe in ("stated", "run"))
    assert stated.arms["LI"].optimizer.lr == 0.1 and run.arms["LI"].optimizer.lr == 0.2
    assert run.arms["LI"].insert_at == (5,) and run.arms["small"].insert_at == ()
    assert run.runs == 3


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("epoch", 3, r"mine.json: unknown key 'epoch'"),
        ("settings/epoch", 3, r"unknown key 'epoch'. Did you mean 'epochs'\?"),
        ("arms/LI/select", "larget", r"arm 'LI'.*Did you mean 'largest'\?"),
        ("settings/optimizer/lrr", 1.0, r"optimizer: unknown key 'lrr'. Did you mean 'lr'\?"),
        ("settings/epochs", "many", r"epochs must be a whole number, got 'many'"),
        ("settings/epochs", True, r"epochs must be a whole number, got True"),
        ("settings/epochs", 0, r"epochs must be at least 1, got 0"),
        ("settings/batch", 451, r"batch must be between 1 and 450, got 451"),
        ("settings/network/widths", 5, r"widths must be a list, got 5"),
        ("settings/network/widths", [4, "5"], r"widths\[1\] must be a whole number, got '5'"),
        ("settings/network/widths", [4, 5], r"widths \[4, 5\] differ"),
        ("settings/network/widths", [], r"widths is empty"),
        ("settings/network/widths", [-4], r"widths must be positive, got \[-4\]"),
        ("settings/network/kind", "cmn", r"unknown kind 'cmn'. Did you mean 'cnn'\?"),
        ("settings/network/channels", [4], r"channels and repeats are settings of kind 'cnn', got kind 'fnn'"),
        ("settings/confidence", 2.0, r"confidence must be between 0 and 1 \(for example 0.99\), got 2.0"),
        ("settings/tolerance", 1.5, r"tolerance must be at least 0 and below 1, got 1.5"),
        ("settings/tolerance", 0.5, r"tolerance needs a confidence \(for example 0.99\)"),
        (
            "arms/LI",
            {"insert_at": [5], "confidence": 0.9, "select": "smallest"},
            r"confidence needs select = 'largest', got 'smallest'",
        ),
        ("settings/optimizer/momentum", 1.0, r"momentum must be at least 0 and below 1, got 1.0"),
        ("settings/schedule", {"metric": "train"}, r"unknown metric 'train'"),
        ("settings/schedule", {}, r"the schedule needs validation images"),
        ("arms/small/from_start", True, r"from_start needs an arm above it"),
        ("figures", ["cost"], r"'cost' needs the engine 'cnn'"),
        ("figures", ["norms"], r"'norms' needs an arm that grows with record_norms"),
        ("settings/optimizer/lr", -1, r"lr must be positive, got -1"),
        ("arms/LI/insert_at", [5, 5], r"insert_at must increase, got \[5, 5\]"),
        ("arms/LI/insert_at", [20], r"insert_at must be between 1 and 19 \(epochs - 1\), got \[20\]"),
        ("runs", 0, r"runs must be at least 1, got 0"),
        ("arms", {}, r"arms is empty"),
        ("arms", {"../up": {}}, r"becomes a folder"),
        ("figures", ["curve"], r"unknown figure 'curve'. Did you mean 'curves'\?"),
        ("figures", ["gradients"], r"needs an arm with record_gradients"),
        ("recipes/run/settings/optimiser", {}, r"Did you mean 'optimizer'\?"),
    ],
)
def test_mistakes_in_a_file(path, value, text):
    with pytest.raises(BadExperiment, match=text) as caught:
        parse(changed(path, value), "mine.json")
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named():
    data = copy.deepcopy(GOOD)
    del data["settings"]["batch"]
    with pytest.raises(BadExperiment, match="the key 'batch' is missing"):
        parse(data, "mine.json")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (RunOptions(runs=0), "--runs must be between 1 and 100,000, got 0"),
        (RunOptions(runs=-2), "--runs must be between 1 and 100,000, got -2"),
        (RunOptions(epochs_scale=0.0), "--epochs-scale must be positive and at most 100, got"),
        (RunOptions(epochs_scale=float("nan")), "--epochs-scale must be positive and at most 100, got"),
        (RunOptions(epochs_scale=0.01), "--epochs-scale 0.01 is too small"),
    ],
)
def test_mistakes_in_the_options(options, text):
    with pytest.raises(BadExperiment, match=text):
        plan(parse(GOOD, "mine.json"), "stated", options)


def test_scaling_keeps_epochs_and_insertions_in_proportion():
    one = plan(planning.find_experiment("13"), "stated", RunOptions(epochs_scale=0.1))
    assert one.arms["ResNet LI"].epochs == 50 and one.arms["ResNet LI"].insert_at == (10, 20, 30)


def test_any_change_of_the_settings_or_the_seed_changes_the_digest():
    one = plan(parse(GOOD, "mine.json"), "stated", RunOptions())
    other = plan(parse(GOOD, "mine.json"), "run", RunOptions())
    names = {
        digest(one.arms["LI"], 0),
        digest(one.arms["LI"], 1),
        digest(one.arms["small"], 0),
        digest(other.arms["LI"], 0),
    }
    assert len(names) == 4
    assert digest(one.arms["LI"], 0) == digest(plan(parse(GOOD, "x.json"), "stated", RunOptions()).arms["LI"], 0)


def test_a_setting_spelled_out_at_its_default_is_the_same_configuration():
    spoken = plan(parse(changed("settings/tau", 0.0), "mine.json"), "stated", RunOptions())
    silent = plan(parse(GOOD, "mine.json"), "stated", RunOptions())
    assert digest(spoken.arms["LI"], 0) == digest(silent.arms["LI"], 0)


def test_files_of_the_user(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD))
    assert planning.find_experiment(str(path)).name == "mine"
    path.write_text("{")
    with pytest.raises(BadExperiment, match="not valid JSON"):
        planning.find_experiment(str(path))
    path.write_text(json.dumps({**GOOD, "name": "2"}))
    with pytest.raises(BadExperiment, match="belongs to an experiment of the package"):
        planning.find_experiment(str(path))


def test_an_exported_experiment_is_the_same_under_another_name(tmp_path):
    for name in ("13", "where"):
        path = tmp_path / "mine.json"
        path.write_text(planning.export(name))
        mine, known = planning.find_experiment(str(path)), planning.find_experiment(name)
        assert mine == dataclasses.replace(known, name=f"my-{name}")
    assert json.loads(planning.export("13", "deep"))["name"] == "deep"
    for name, new, text in (
        ("99", None, "unknown experiment"),
        ("13", "2", "--name must not be"),
        ("13", "../x", "becomes a folder"),
    ):
        with pytest.raises(BadExperiment, match=text):
            planning.export(name, new)


def test_one_experiment_is_read_to_run_one(monkeypatch):
    read: list[str] = []
    monkeypatch.setattr(planning, "parse", lambda data, file: read.append(file) or parse(data, file))
    planning._read.cache_clear()
    assert planning.find_experiment("2").name == "2" and planning.paper_names()[1] == "2" and read == ["exp02.json"]


def test_toml_files_of_the_user(tmp_path):
    pytest.importorskip("tomllib")
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\ntitle = "t"\nshows = "s"\nruns = 2\n[settings]\nbatch = 450\nepochs = 9\n'
        '[settings.network]\nkind = "fnn"\nwidths = [4]\n[settings.optimizer]\nlr = 0.1\n[arms.LI]\ninsert_at = [3]\n'
    )
    assert plan(planning.find_experiment(str(path)), "stated", RunOptions()).arms["LI"].insert_at == (3,)


def test_the_fourteen_experiments_are_there_and_sound():
    assert planning.paper_names() == [str(number) for number in range(1, 15)]
    assert planning.GROUPS["spirals"]() == ["2", "3", "4", "6", "7", "8", "10", "11", "13"]
    assert planning.GROUPS["cnn"]() == ["1", "5", "9", "12", "14"]
    assert set(planning.further_names()) - set(planning.GROUPS["further"]()) == {"cnn-small"}, (
        "days, so only by its name"
    )
    small, first = (plan(planning.find_experiment(name), "trains", RunOptions()) for name in ("cnn-small", "1"))
    differing = {"epochs": 200, "insert_at": (50, 100, 150), "tau": 1.0}
    assert dataclasses.replace(small.arms["CNN1"], **differing) == first.arms["CNN LI"], "but for that it does not grow"
    for experiment in planning.bundled_experiments().values():
        for recipe in experiment.recipes:
            for settings in plan(experiment, recipe, RunOptions()).arms.values():
                assert engine(settings).estimate_seconds(settings, 30) > 0


PARAMETERS = [
    (Network("fnn", (5,)), [27, 57]),
    (Network("fnn", (4, 4)), [42, 62]),
    (Network("fnn", (10, 10)), [162, 272]),
    (Network("resnet", (3, 3)), [33, 54, 75, 96]),
    (Network("resnet", (3, 3, 3)), [54, 75]),
]


@pytest.mark.parametrize(("network", "sizes"), PARAMETERS, ids=str)
def test_parameters_of_the_paper(network, sizes):
    assert [stacked.count_parameters(network, grown) for grown in range(len(sizes))] == sizes


FLOPS = {  # experiment: arm -> (total, measuring, total as the paper counts places, measuring as the paper counts)
    "2": {"FNN1": (222_000, 0), "FNN2": (499_500, 0), "FNN LI": (432_270, 270)},
    "3": {"ResNet1": (333_000, 0), "ResNet2": (532_800, 0), "ResNet LI": (484_596, 396, 484_488, 288)},
    "4": {"FNN1": (222_000, 0), "FNN2": (499_500, 0), "FNN LI": (432_270, 270)},
    "13": {"ResNet1": (90_000, 0), "ResNet2": (252_000, 0), "ResNet LI": (189_036, 1_836, 188_712, 1_512)},
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_of_the_paper(name):
    one = plan(planning.find_experiment(name), "stated", RunOptions())
    for arm, expected in FLOPS[name].items():
        counts = engine(one.arms[arm]).count_arm(one.arms[arm])
        found = (counts.flops, counts.measuring, counts.flops_printed, counts.measuring_printed)
        assert found == (*expected, *(None,) * (4 - len(expected)))


def test_the_only_misprint_of_the_tables_is_marked():
    remarks = {}
    for name in FLOPS:
        table = tables.counts_table(plan(planning.find_experiment(name), "stated", RunOptions()))
        remarks.update({(name, row[0]): row[-1] for row in table.rows if row[-1]})
    assert [key for key, remark in remarks.items() if remark == "misprint"] == [("3", "ResNet2")]
    assert list(remarks.values()).count("equal") == 11
    assert any(re.search("532,000.*532,800", line) for line in tables.MISPRINTS)


def test_the_documented_example_and_the_documented_settings_are_real():
    text = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text("utf-8")
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert parse(json.loads(example.group(1)), "docs").name == "wide"
    told = set(re.findall(r"`(?:network\.|optimizer\.|data\.|schedule\.)?([a-z_]+)`", text))
    kinds = (Settings, Network, DataSettings, Optimizer, Schedule)
    fields = {f.name for kind in kinds for f in dataclasses.fields(kind)}
    untold = {"network", "optimizer", "data", "schedule", "preset"}  # containers, and what the command line sets
    assert fields - untold <= told
