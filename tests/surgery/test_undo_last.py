"""`undo(model)`: the last growth, from the record that the model carries itself."""

import copy
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from models import Named, cnn, deep, images, points, residual, snapshot, untouched
from sensli import History, find_sites, grow, insert, replay, undo
from sensli.errors import HistoryError
from sensli.modules.grown import RECORDS


def trained(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return optimizer, StepLR(optimizer, 3)


@pytest.mark.parametrize(
    ("make", "example"), [(deep, points), (Named, points), (cnn, images), (residual, points)], ids=lambda m: m.__name__
)
@pytest.mark.parametrize("options", [{}, {"lr_factor": 0.5}, {"new_lr_factor": 2.0}, {"freeze_rest": True}], ids=str)
def test_everything_is_to_the_bit_as_before(make, example, options):
    model, x = make(), example(4)
    optimizer, scheduler = trained(model)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    growths = [
        insert(model, find_sites(model, x)[-1], optimizer=optimizer, scheduler=scheduler, **options) for _ in range(2)
    ]
    assert [undo(model, optimizer=optimizer, scheduler=scheduler).number for _ in range(2)] == [2, 1]
    assert snapshot(model, optimizer) == before
    assert not any(RECORDS in vars(module) for module in model.modules()) and len(growths) == 2
    with untouched(model), pytest.raises(HistoryError, match=r"nothing to undo: this .* has not grown"):
        undo(model)


def test_units_and_layers_in_turn():
    model, x = deep(3), points(4)
    before = snapshot(model)
    for what in ("units", "layers", "units"):
        grow(model, find_sites(model, x, what=what, units=2)[0])
    assert [bool(undo(model).resized) for _ in range(3)] == [True, False, True]
    assert snapshot(model) == before


def test_a_copy_a_pickled_and_a_replayed_model_carry_it_too():
    model, x = Named(), points(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    history = History([insert(model, find_sites(model, x)[0], optimizer=optimizer, lr_factor=0.5)])
    again = replay(Named(), History.from_json(history.to_json()))
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), again):
        assert undo(each).to_dict() == history[0].to_dict()
        assert list(each.state_dict()) == list(Named().state_dict())
    # the record of then says what the rates were: they go back also where another optimizer has followed since
    resumed = replay(Named(), history)
    optimizer = torch.optim.Adam(resumed.parameters(), lr=0.05)
    undo(resumed, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_without_a_record_the_growth_is_asked_for():
    model = deep()
    growth = insert(model, find_sites(model, points())[0])
    delattr(model.get_submodule(growth.name), RECORDS)
    with (
        untouched(model),
        pytest.raises(HistoryError, match="growth is missing, and this Sequential carries no record"),
    ):
        undo(model)
    assert undo(model, growth) is growth
