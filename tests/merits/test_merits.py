"""What merits print, and what they become: plain data, a pandas table, a picture. Batches as dicts."""

import json
import re
import sys
from dataclasses import replace
from html import escape
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from models import alive, batches, deep, fnn, loss_fn, points, untouched
from sensli import Grower, find_sites, insert, measure, triggers
from sensli.errors import MeasurementError, MissingExtra
from sensli.moves.point import Ref


def measured(model=None):
    model = deep(3) if model is None else model
    return measure(model, find_sites(model, points(2), what="both"), batches(), loss_fn)


def test_each_prints_as_one_line():
    model = fnn()
    merits = measured(model)
    best = merits.best
    assert repr(best) == f"Merit({best})" and "\n" not in repr(merits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=points(2),
        trigger=triggers.Every(1) & triggers.Limit(growths=3),
        tau=0.0,
    )
    assert (
        repr(grower)
        == "Grower(Sequential with 46 parameters, preset='paper': strategy='sensli', what='layers', tau=0, "
        "trigger=(Every(1) & Limit(growths=3)), 0 growths in 0 calls)"
    )
    growth = grower.step(batches(), loss_fn)
    assert repr(growth) == f"Growth({str(growth).removeprefix('growth ')})" and "\n" not in repr(growth)
    assert repr(grower).endswith("1 growth in 1 call)") and "66 parameters" in repr(grower)


@pytest.mark.parametrize(("per", "columns"), [(None, []), ("parameters", ["per parameter"]), ("flops", ["per FLOP"])])
def test_the_table_has_the_merit_per_cost_where_merits_are_compared_by_it(per, columns):
    merits = measured().per(per)
    head, _, first = str(merits).splitlines()[:3]
    dead = [] if per else ["dead units"]  # for which there is no room beside the names of these sites
    assert re.split("  +", head) == ["site", "merit", *columns, "ratio", "+parameters", "+FLOPs", *dead]
    best = merits.best
    assert not per or f"{best.value / getattr(best.site, per):.3e}" in first


def renamed(merits, stem):
    """The same merits at sites that print with a longer name."""
    long = [replace(m.site, point=replace(m.site.point, anchor=Ref(f"{stem}.{m.site.path}", None))) for m in merits]
    return merits.with_sites(long)


@pytest.mark.parametrize("per", [None, "parameters", "flops"])
def test_the_table_fits_a_terminal(per):
    merits = measured().per(per)
    for stem in ("blocks", "blocks" * 6, "blocks" * 30):
        long = renamed(merits, stem)
        lines = str(long).splitlines()
        assert max(map(len, lines)) <= 100 and "  +parameters  +FLOPs" in lines[0]
        whole = [str(merit.site) for merit in long.ranked]
        for line, name in zip(lines[2:], whole, strict=False):
            begins, cut, ends = re.split("  +", line)[0].partition("...")
            assert name.startswith(begins) and name.endswith(ends) and (cut or begins == name)
            assert len(name) < 50 or cut  # what has room is not shortened
        assert all(name in long._repr_html_() for name in map(escape, whole))


@pytest.mark.parametrize("per", [None, "parameters", "flops"])
def test_plain_data_best_first(per):
    merits = measured().per(per)
    data = merits.to_dict()
    assert data == json.loads(json.dumps(data)) and data["norm"] == merits.norm and data["compared"] == per
    for row, merit in zip(data["merits"], merits.ranked, strict=True):
        site = merit.site
        assert (row["site"], row["path"], row["kind"]) == (str(site), site.path, site.kind)
        assert (row["merit"], row["ratio"], row["parameters"]) == (merit.value, merit.ratio, site.parameters)
        assert row["merit per parameter"] == merit.value / site.parameters
        assert row["merit per FLOP"] == merit.value / site.flops


def test_pandas_gets_the_same_rows(monkeypatch):
    merits = measured()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert merits.to_pandas() == merits.to_dict()["merits"]


@pytest.mark.parametrize(
    ("package", "call", "way"),
    [("pandas", "to_pandas", "pip install pandas"), ("matplotlib", "plot", r"pip install 'sensli\[plots\]'")],
)
def test_a_missing_package_is_named(package, call, way, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"merits\.{call}\(\) needs {package}.*{way}"):
        getattr(measured(), call)()


def test_a_picture_has_one_bar_for_each_site_best_on_top():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    merits = measured().per("flops")
    axes = merits.plot()
    assert [bar.get_width() for bar in axes.patches] == [merit.value / merit.site.flops for merit in merits.ranked]
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(merit.site) for merit in merits.ranked]
    assert axes.get_xlabel() == "merit per FLOP" and axes.yaxis_inverted()
    assert merits.plot(axes) is axes
    pyplot.close("all")


class Classifier(nn.Module):
    """Its batches are dicts; the labels are for the loss."""

    def __init__(self):
        super().__init__()
        self.body = alive(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))

    def forward(self, x, *, scale=1.0):
        return self.body(x) * scale


def test_keys_that_forward_does_not_take_go_to_the_loss():
    model, pairs = Classifier(), batches()
    dicts = [{"labels": y, "x": x, "weight": torch.ones(len(x))} for x, y in pairs]

    def loss(output, batch):
        return (cross_entropy(output, batch["labels"], reduction="none") * batch["weight"]).mean()

    sites = find_sites(model, points(2))
    merits = measure(model, sites, dicts, loss)
    assert [m.value for m in merits] == pytest.approx([m.value for m in measure(model, sites, pairs, cross_entropy)])
    assert merits.loss == pytest.approx(measure(model, sites, pairs, cross_entropy).loss)
    insert(model, merits.best, check=dicts[0])
    grower = Grower(
        model,
        torch.optim.SGD(model.parameters()),
        preset="paper",
        example=points(2),
        trigger=triggers.Every(1),
        tau=0.0,
        recycle=True,
    )
    assert grower.step(dicts, loss) is not None


def test_a_misspelled_key_is_told():
    model = Classifier()
    sites = find_sites(model, points(2))
    wrong = [{"inputs": x, "labels": y} for x, y in batches()]
    with (
        untouched(model),
        pytest.raises(MeasurementError, match="'inputs', 'labels', but forward of Classifier takes none"),
    ):
        measure(model, sites, wrong, lambda output, batch: output.sum())
    # without a loss function nobody but the model has a use for labels, and it takes none
    with pytest.raises(MeasurementError, match="loss_fn is missing"):
        measure(model, sites, [{"x": x, "labels": y} for x, y in batches()])
