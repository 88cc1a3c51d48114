"""`site.on`: the same site of a deep copy, or of a model that was built again; a model that is not equal is refused with the difference."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from models import Functional, Listed, batches, cnn, fnn, images, labels, loss_fn, points, residual, untouched
from sensli import Site, find_sites, grow, measure
from sensli.errors import UnknownSite, UnsupportedModel
from sensli.modules.engines.distributed import Together
from sensli.surgery.dead import find_dead


class Attention(nn.Module):
    """A small attention that counts its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.q, self.k, self.v = 2, nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out(mixed).mean(1)


class Stack(nn.Module):
    """Blocks in a list, which is renumbered when one goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(residual()[1:3])
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any]]] = {
    "layer": (fnn, points, {}),
    "convolution": (lambda: cnn(norm=True), lambda: images(6), {}),
    "before": (Functional, points, {}),
    "in a list": (Listed, points, {}),
    "twin": (residual, points, {}),
    "twin in a list": (Stack, points, {}),
    "width": (fnn, points, {"what": "units", "units": 2}),
    "channels": (lambda: cnn(norm=True), lambda: images(6), {"what": "units", "units": 2}),
    "heads": (Attention, lambda: torch.randn(6, 4, 3, dtype=torch.float64), {"what": "units", "units": 1}),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    state = other.state_dict()
    assert one.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("merit", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_growing_a_copy_there_gives_the_model_that_growing_the_model_gives(name: str, merit: bool) -> None:
    make, data, options = CASES[name]
    model, x = built(make), data()
    sites: list[Site] = list(find_sites(model, x, **options))
    if merit:  # the measured rows of new units come along
        sites = [each.site for each in measure(model, sites, [(x, labels())], loss_fn)]
    assert sites
    for site in sites:
        grown, again = copy.deepcopy(model), built(make)
        again.load_state_dict(model.state_dict())
        with untouched(model):
            growths = [grow(other, site.in_model(other)) for other in (grown, again)]
        assert_equal(grown, again)
        assert str(site.in_model(model)) == str(site) == str(growths[0].site)
        with pytest.raises(UnknownSite):
            grow(built(make), site)  # only the site of the other model is one of it
        own = copy.deepcopy(model)
        sensitive = site.in_model(own)
        assert sensitive.in_model(model) == site  # and back
        grow(own, sensitive.in_model(model).in_model(own))
        assert_equal(own, grown)


def test_sites_of_one_measurement_follow_a_model_that_has_grown_elsewhere_since() -> None:
    model, x = built(Stack), points()
    first, second = find_sites(model, x)[0], find_sites(model, x)[-1]
    grow(model, first)  # the other block has another number now
    copied = copy.deepcopy(model)
    grow(copied, second.in_model(copied))
    grow(model, second)
    assert_equal(model, copied)
    with pytest.raises(UnknownSite, match=r"but other has no module 'blocks\.2'"):
        second.in_model(built(Stack))


def test_dead_units_of_a_copy_are_recycled_as_in_the_model() -> None:
    model, x = built(fnn), points()
    with torch.no_grad():
        model[0].bias[1] = -100.0
    widths = find_sites(model, x, what="units")
    (site, *_) = find_dead(model, widths, x, [(x, labels())], Together(None, "look")).sites
    copied = copy.deepcopy(model)
    grow(copied, site.in_model(copied))
    grow(model, site)
    assert_equal(model, copied)
    assert copied[0].bias[1] > -1


def test_a_site_that_is_known_by_its_path_alone_is_found_there() -> None:
    site = find_sites(built(fnn), points())[1]
    gc.collect()  # the model that it was found in is gone
    for known in (Site.from_dict(json.loads(json.dumps(site.to_dict()))), pickle.loads(pickle.dumps(site)), site):
        other = built(fnn)
        grow(other, known.in_model(other))
        assert len(other) == 6
        with pytest.raises(UnknownSite, match="not a site of this Linear"):
            known.in_model(nn.Linear(3, 2))


def test_the_original_may_be_measured_and_its_copy_grown_and_trained() -> None:
    model = built(fnn)
    data = batches()
    best = measure(model, find_sites(model, points(), what="both"), data, loss_fn).best
    copied = copy.deepcopy(model).float()  # types of numbers may differ
    grow(copied, best.site.in_model(copied), check=data[0][0].float())
    cross_entropy(copied(data[0][0].float()), data[0][1]).backward()


@pytest.mark.parametrize(
    "other, difference",
    [
        (lambda: nn.Sequential(*fnn()[:4]), "other has no module '4'"),
        (lambda: nn.Sequential(*fnn(), nn.ReLU()), "only other has a module '5'"),
        (lambda: fnn(nn.GELU), "'1' is ReLU there and GELU in other"),
        (lambda: fnn(width=5), r"'0' is Linear\(in_features=3, out_features=4, bias=True\) there and Linear\(.*5.*\) in other"),
        (Functional, "the model is Sequential there and Functional in other"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_equal_is_refused_with_the_first_difference(
    other: Callable[[], nn.Module], difference: str
) -> None:
    site, given = find_sites(keep := built(fnn), points())[0], built(other)
    with untouched(given), pytest.raises(UnknownSite, match=difference) as caught:
        site.in_model(given)
    assert "Give a deep copy" in str(caught.value) and keep


def test_shapes_that_no_setting_tells_are_compared_and_what_is_not_a_model_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.first, self.scale, self.act = nn.Linear(3, 4), nn.Parameter(torch.ones(size)), nn.ReLU()
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.act(self.first(x))) * self.scale.sum()

    model = Own(2).double()
    site = find_sites(model, points())[0]
    with pytest.raises(UnknownSite, match=r"scale is of shape \(2,\) there and of shape \(3,\) in other"):
        site.in_model(Own(3))
    with pytest.raises(UnsupportedModel, match=r"other must be an nn\.Module, got None"):
        site.in_model(None)  # type: ignore[arg-type]
