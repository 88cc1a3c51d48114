"""`History`: plain data that goes to JSON and comes back, and refuses what is cut short or altered."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from models import Functional, cnn, fnn, images, points, residual, untouched
from recorded import infinite
from sensli import Growth, History, find_sites, insert, replay, undo
from sensli.cli.main import main
from sensli.errors import HistoryError
from sensli.surgery.record import Decision, SiteMerit


def grown(make=fnn, x=None, **options):
    model, x = make(), points() if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = History()
    for site in find_sites(model, x, **options):
        growth = insert(model, site, optimizer=optimizer, lr_factor=0.5)
        history.append(replace(growth, details={"epoch": 3, "merit": 0.5, "ratio": 1.25}))
    return model, optimizer, history


@pytest.mark.parametrize(
    "make, x, options",
    [
        (fnn, points(2), {}),
        (Functional, points(2), {}),
        (residual, points(2), {}),
        (lambda: cnn(groups=2), images(2), {}),
        (lambda: fnn(lambda: nn.PReLU()), points(2), {"form": "parametric"}),
    ],
)
def test_growths_and_histories_round_trip(make, x, options, tmp_path):
    model, _, history = grown(make, x, **options)
    assert len(history) >= 2
    assert History.from_json(history.to_json()) == history
    for growth in history:
        again = Growth.from_dict(json.loads(json.dumps(growth.to_dict())))
        assert again == growth and str(again) == str(growth)
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history
    assert [path.name for path in tmp_path.iterdir()] == ["history.json"]
    assert [name for name, _ in replay(make(), history).named_parameters()] == [n for n, _ in model.named_parameters()]


def test_a_growth_from_json_can_be_undone():
    model, optimizer, history = grown()
    for growth in reversed(History.from_json(history.to_json())[:]):
        undo(model, growth, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1 and len(optimizer.param_groups[0]["params"]) == 6


def test_a_history_prints_as_what_happened():
    _, _, history = grown()
    assert str(history).splitlines() == [
        "growth 1: Linear(4, 4) + ReLU after 1, as grown1 (epoch 3, merit 5.00e-01, 1.25 x mean)",
        "growth 2: Linear(4, 4) + ReLU after 3, as grown2 (epoch 3, merit 5.00e-01, 1.25 x mean)",
    ]
    assert (str(History()), repr(History()), len(history[:1])) == ("no growth yet", "History(0 growths)", 1)
    assert repr(history) == "History(2 growths, the last one: Linear(4, 4) + ReLU after 3, as grown2)"
    assert (
        repr(history[0]) == "Growth(1: Linear(4, 4) + ReLU after 1, as grown1 (epoch 3, merit 5.00e-01, 1.25 x mean))"
    )
    last = history[-1]
    assert history.pop() is last and len(history) == 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_text_cut_short_is_refused(share):
    text = grown()[2].to_json()
    with pytest.raises(HistoryError, match="truncated or altered"):
        History.from_json(text[: int(len(text) * share)])


@pytest.mark.parametrize(
    "alter",
    [
        lambda data: [],
        lambda data: {"format": 1},
        lambda data: data | {"format": 99},
        lambda data: data | {"format": "1"},
        lambda data: data | {"growths": 3},
        lambda data: data | {"growths": ["grown1"]},
        lambda data: data | {"growths": {"a": 1}},
        lambda data: data["growths"][0].pop("name") and data,
        lambda data: data["growths"][0].update(site=None) or data,
        lambda data: data["growths"][0].update(renames=[1]) or data,
        lambda data: data["growths"][0].update(beside=[1]) or data,
        lambda data: data["growths"][0].update(rates={"factor": 2}) or data,
        lambda data: data["growths"][0]["site"]["point"].update(side="beneath") or data,
        lambda data: data["growths"][0]["site"]["move"].update(form="magic") or data,
        lambda data: data["growths"][0]["site"]["move"].update(width=-4) or data,
        lambda data: data["growths"][0]["site"]["move"]["activation"].update(name="Module") or data,
        lambda data: data["growths"][0]["site"]["move"]["activation"].update(arguments=[["slope", 1]]) or data,
    ],
)
def test_altered_data_is_refused(alter):
    data = alter(json.loads(grown()[2].to_json()))
    with pytest.raises(HistoryError, match=r"intact copy|Not a sensli history|Update sensli"):
        History.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "alter",
    [
        lambda g: g.update(name="grown7"),
        lambda g: g.update(number=5),
        lambda g: g.update(parameters=["grown1.linear.weight"]),
        lambda g: g["site"]["point"].update(path="nowhere"),
        lambda g: g["site"]["point"].update(path=""),
        lambda g: g["site"]["move"].update(kind="conv", kernel=[3, 3]),
    ],
)
def test_a_readable_history_that_does_not_fit_leaves_the_model_alone(alter):
    data = json.loads(grown()[2].to_json())
    alter(data["growths"][0])
    model = fnn()
    with untouched(model), pytest.raises(HistoryError):
        replay(model, History.from_dict(data))


@pytest.mark.parametrize("path", [("rates",), ("own_rate",), ("site", "point", "place")], ids=".".join)
@pytest.mark.parametrize("value", [torch.ones(2), 0, {}, "x"], ids=str)
def test_what_stands_in_place_of_a_record_is_refused_and_named(path, value):
    data = grown()[2].to_dict()
    *outer, key = path
    inner = data["growths"][0]
    for name in outer:
        inner = inner[name]
    inner[key] = value
    with pytest.raises(
        HistoryError, match="is missing" if value == {} else rf"growths\[0\]\.{'.'.join(path)} must be a "
    ):
        History.from_dict(data)


@pytest.mark.parametrize("ratio", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_does_not_know_come_back_as_they_were(ratio, tmp_path):
    _, _, history = grown()
    history[0].details.update(ratio=ratio, seen=[ratio, {"deep": ratio}, "NaN"])
    history.record.calls = 1
    merit = SiteMerit("site", "1", "after", 1.0, ratio, None, 1, 1)
    history.record.decisions.append(Decision(1, 1.0, "largest", "why", merits=(merit,), growths=(1,), chosen=(0,)))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(history.to_json(), parse_constant=refuse)
    json.dumps(history.to_dict(), allow_nan=False)
    history.save(tmp_path / "a")
    again = History.load(tmp_path / "a")
    assert again == history and str(again) == str(history)
    assert repr(again[0].details) == repr(history[0].details)
    assert repr(again.record) == repr(history.record)
    assert repr(Growth.from_dict(history[0].to_dict()).details["ratio"]) == repr(ratio)


def test_a_file_of_an_earlier_version_with_infinity_in_it_is_read():
    text = grown()[2].to_json().replace('"ratio": 1.25', '"ratio": Infinity')
    assert History.from_json(text)[0].details["ratio"] == math.inf


def test_an_infinite_ratio_is_saved_and_shown(tmp_path, capsys):
    history = infinite()
    assert history[0].details["ratio"] == math.inf
    history.save(tmp_path / "a.json")
    assert main(["report", str(tmp_path / "a.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert told["decisions"][0]["merits"][0]["ratio"] == {"float": "Infinity"}
    page = (tmp_path / "a.html").read_text()
    assert "inf x mean" in page and '"ratio":{"float":"Infinity"}' in page


def test_details_that_are_not_plain_are_refused_before_anything_is_written(tmp_path):
    _, _, history = grown()
    history[0].details["weights"] = torch.ones(2)
    with pytest.raises(HistoryError, match=r"cannot be written as JSON.*Tensor.*details of a growth"):
        history.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())
