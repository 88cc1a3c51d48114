"""Sites chosen by kind, path, pattern or function, and taken by the name that they print."""

import gc
import weakref

import pytest
import torch

from models import Functional, Named, cnn, deep, fnn, images, points, snapshot
from sensli import Grower, find_sites, insert, triggers
from sensli.errors import UnknownSite


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("0", ["0.1", "0.4"]),
        ("0.4", ["0.4"]),
        ("0.*", ["0.1", "0.4"]),
        ("?.4", ["0.4"]),
        (["2"], ["2"]),
        (("conv", "linear"), ["0.1", "0.4", "2"]),
        (["0.1", "linear"], ["0.1", "2"]),
        ({"0.[4-9]"}, ["0.4"]),
        ("0.0", []),
        ("units", []),
        (None, ["0.1", "0.4", "2"]),
    ],
)
def test_where_is_a_kind_a_path_a_pattern_or_several(where, expected):
    model, x = cnn(), images(2)
    everything = [site.path for site in find_sites(model, x)]
    wanted = [path for path in everything if path in expected] if where is not None else everything
    assert [site.path for site in find_sites(model, x, where=where)] == wanted
    assert set(wanted) == set(expected) & set(everything)


def test_a_grower_looks_only_there_and_so_after_it_has_grown():
    model, x = deep(4), points(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=x,
        trigger=triggers.Every(1),
        tau=0.0,
        where=["1", "3"],
        max_factor=None,
    )
    data = [(x, torch.zeros(8, dtype=torch.long))]
    for _ in range(3):
        grower.step(data, torch.nn.functional.cross_entropy)
        assert {merit.site.path.split(".")[0] for merit in grower.last_merits} <= {"1", "3"}
    assert len(grower.history) == 3


def test_a_path_that_the_model_does_not_have_is_told_with_those_it_has():
    with pytest.raises(ValueError, match=r"No module of this Named has the path 'haed\.\*'.*'fc1', 'act1', 'fc2'"):
        find_sites(Named(), points(), where="haed.*")


@pytest.mark.parametrize("name", ["Linear(4, 4) + ReLU after 1", "after 1", "1"])
def test_a_site_is_taken_by_the_name_it_prints(name):
    model, other = fnn(), fnn()
    sites = find_sites(model, points(), where="linear")
    growth = insert(model, name, check=points())
    assert str(growth.site) == str(sites[0]) == str(insert(other, find_sites(other, points())[0]).site)
    again = insert(model, "after 3")  # known by the same search, though the model has grown since
    assert again.number == 2 and again.site.path == "3"


def test_a_name_that_is_unknown_or_ambiguous_lists_what_there_is():
    model = Functional()
    with pytest.raises(UnknownSite, match=r"no sites of this Functional are known yet\. Call find_sites"):
        insert(model, "before fc2")
    find_sites(model, points(), what="both")
    before = snapshot(model)
    with pytest.raises(UnknownSite, match=r"got 'after fc9'\. It found: .*'before fc2', 'in fc2'"):
        insert(model, "after fc9")
    with pytest.raises(
        UnknownSite, match=r"ambiguous: 2 sites of this Functional match\. Give one of '.*before fc2', '.*in fc2"
    ):
        insert(model, "fc2")
    assert snapshot(model) == before


def test_what_is_remembered_of_a_model_goes_with_it():
    model = cnn()
    find_sites(model, images(2), what="both")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
