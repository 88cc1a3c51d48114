"""Names in a grown model: layers of one place are siblings, and old names change only where nothing else is possible."""

import json

import pytest
import torch.nn.functional as F
from torch import nn

from models import Functional, Listed, Named, cnn, fnn, images, points, snapshot, untouched
from sensli import History, find_sites, insert, replay, undo
from sensli.errors import HistoryError


class Pooled(nn.Module):
    """Functional activations, and modules without parameters between them and the next layer."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)
        self.drop, self.head = nn.Dropout(), nn.Linear(4, 2)
        self.skip = skip
        self.double()

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        y = F.relu(self.conv2(x))
        y = y + x if self.skip else y
        return self.head(self.drop(F.relu(y.mean((2, 3)))))


@pytest.mark.parametrize(("layer", "which"), [("auto", 0), ("residual", -1), ("parametric", 0)])
@pytest.mark.parametrize("make", [Functional, Named, fnn, Listed, cnn, Pooled], ids=lambda make: make.__name__)
def test_layers_of_one_place_are_siblings(make, layer, which):
    model, fresh, x = make().eval(), make(), images(2) if make in (cnn, Pooled) else points(4)
    before, growths = snapshot(model), []
    for _ in range(3):
        growths.append(insert(model, find_sites(model, x, form=layer)[which], check=x))
    place = growths[0].name.removesuffix("grown1")
    assert [growth.name for growth in growths] == [f"{place}grown{number}" for number in (1, 2, 3)]
    assert not any(growth.renames for growth in growths[1:])
    assert list(replay(fresh, History(growths)).state_dict()) == list(model.state_dict())
    for _ in growths:
        undo(model)
    assert snapshot(model) == before


def test_names_stay_where_a_module_without_parameters_comes_before_the_layer():
    model, x = Pooled().eval(), images(2)
    names = list(model.state_dict())
    sites = find_sites(model, x)
    assert [site.place for site in sites] == ["after pool", "after drop"]
    for site in sites:
        assert insert(model, site, check=x).renames == {}
    assert [name for name in model.state_dict() if "grown" not in name] == names


def test_names_change_where_nothing_else_is_possible():
    """The values of the pooling are read twice: a layer after it would be before the skip as well."""
    model, x = Pooled(skip=True).eval(), images(2)
    growth = insert(model, find_sites(model, x)[0], check=x)
    assert growth.name == "conv2.grown1"
    assert growth.renames == {f"conv2.{name}": f"conv2.anchor.{name}" for name in ("weight", "bias")}


def test_a_history_with_names_of_an_earlier_version_is_refused():
    model, x = Functional(), points(4)
    history = History(insert(model, find_sites(model, x)[0]) for _ in range(2))
    old = History.from_dict(json.loads(history.to_json().replace("fc2.grown2", "fc2.grown1.grown1")))
    fresh = Functional()
    with (
        untouched(fresh),
        pytest.raises(HistoryError, match=r"fc2\.grown1\.grown1 in this history, and fc2\.grown2 now"),
    ):
        replay(fresh, old)
