"""`History`: plain data that goes to JSON and comes back, and refuses what is cut short or altered."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from models import Functional, cnn, fnn, images, points, residual, untouched
from sensli import Growth, History, find_sites, insert, replay, undo
from sensli.errors import HistoryError


def grown(make=fnn, x=None, **options):
    model, x = make(), points() if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = History()
    for site in find_sites(model, x, **options):
        growth = insert(model, site, optimizer=optimizer, lr_scale=0.5)
        history.append(replace(growth, details={"epoch": 3, "merit": 0.5, "ratio": 1.25}))
    return model, optimizer, history


@pytest.mark.parametrize(
    "make, x, options",
    [
        (fnn, points(2), {}),
        (Functional, points(2), {}),
        (residual, points(2), {}),
        (lambda: cnn(groups=2), images(2), {}),
        (lambda: fnn(lambda: nn.PReLU()), points(2), {"layer": "parametric"}),
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
    assert (str(History()), repr(history), len(history[:1])) == ("no growth yet", "History(2 growths)", 1)
    last = history[-1]
    assert history.pop() is last and len(history) == 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_text_cut_short_is_refused(share):
    text = grown()[2].to_json()
    with pytest.raises(HistoryError, match="cut short or altered"):
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
        lambda data: data["growths"][0]["site"].update(side="beneath") or data,
        lambda data: data["growths"][0]["site"]["layer"].update(form="magic") or data,
        lambda data: data["growths"][0]["site"]["layer"].update(width=-4) or data,
        lambda data: data["growths"][0]["site"]["layer"]["activation"].update(name="Module") or data,
        lambda data: data["growths"][0]["site"]["layer"]["activation"].update(arguments=[["slope", 1]]) or data,
    ],
)
def test_altered_data_is_refused(alter):
    data = alter(json.loads(grown()[2].to_json()))
    with pytest.raises(HistoryError, match=r"intact copy|no history|Update sensli"):
        History.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "alter",
    [
        lambda g: g.update(name="grown7"),
        lambda g: g.update(number=5),
        lambda g: g.update(parameters=["grown1.linear.weight"]),
        lambda g: g["site"].update(path="nowhere"),
        lambda g: g["site"].update(path=""),
        lambda g: g["site"]["layer"].update(kind="conv", kernel=[3, 3]),
    ],
)
def test_a_readable_history_that_does_not_fit_leaves_the_model_alone(alter):
    data = json.loads(grown()[2].to_json())
    alter(data["growths"][0])
    model = fnn()
    with untouched(model), pytest.raises(HistoryError):
        replay(model, History.from_dict(data))
