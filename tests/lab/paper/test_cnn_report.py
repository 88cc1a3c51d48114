"""Figures, tables and checks of the CNN experiments, from small results and from made-up ones."""

from __future__ import annotations

import json

import pytest
import torch

from pictures import raw, tiny
from sensli.cli.main import main
from sensli_lab.paper import cnn, evidence, image_sets, runner, tables
from sensli_lab.paper.evidence import NOT_LEARNT, Cheaper, NewGradient, SamePlace, Separation, Smaller, ThresholdCheck
from sensli_lab.paper.planning import RunOptions, parse, plan
from sensli_lab.paper.store import Store
from sensli_lab.work.statistics import AWAITING, CONFIRMED, NOT_CONFIRMED


class Stored:
    """Evidence from one plan, whatever is asked for."""

    def __init__(self, one, results):
        self.one, self.results = one, results

    def each(self, name, recipes=()):
        yield self.one, self.results


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(image_sets._LOADERS, "cifar10", lambda folder: raw())
        cnn.cached_images.cache_clear()
        file = tiny(insert_at=[2])
        file["arms"]["LI"] = {"record_gradients": True, "record_norms": True}
        file["figures"] = ["curves", "cost", "gradients", "norms", "heatmaps"]
        folder = tmp_path_factory.mktemp("trained")
        (folder / "tiny.json").write_text(json.dumps(file))
        one = plan(parse(file, "tiny.json"), "stated", RunOptions())
        store = Store(folder / "results")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        runner.run_plans([one], store)
        torch.set_num_threads(threads)
        yield one, store
        cnn.cached_images.cache_clear()


@pytest.mark.slow
def test_show_draws_all_figures_and_says_the_ratios(trained, capsys, monkeypatch):
    _, store = trained
    monkeypatch.chdir(store.root.parent)
    assert main(["paper", "show", "tiny.json"]) == 0
    out = capsys.readouterr().out
    assert "LI over whole: FLOPs ratio" in out and "from the insertions alone" in out
    for kind in ("curves", "cost", "gradients", "norms", "heatmaps"):
        assert (store.root / "figures" / f"exp-tiny-stated-{kind}.png").stat().st_size > 2000


def test_ratios(trained):
    one, store = trained
    assert evidence.pair(one) == ("LI", "whole")
    found = evidence.ratios(store.load(one, "LI"), store.load(one, "whole"))
    # half of the epochs with two convolutions, half with three, all with four channels and of two map sizes
    assert 0.5 < found.chosen.mean < found.computed.mean < found.flops.mean
    assert 0 < found.looking.mean < 1 and found.steady.mean > 0


def test_the_checks_of_the_claims(trained):
    one, store = trained
    stored = Stored(one, store.load_all(one))
    assert Cheaper("1", "LI", "whole").weigh(stored)[0].measured.startswith("FLOPs ratio")
    assert "new layer's norm over the mean" in NewGradient("5", "LI").weigh(stored)[0].measured
    assert "of 2 runs" in ThresholdCheck("1", "LI").weigh(stored)[0].measured
    assert "clearest:" in Separation("5", "LI").weigh(stored)[0].measured
    assert "chosen over times and runs: place" in SamePlace("12").weigh(stored)[0].measured


def test_networks_at_chance_level_are_inconclusive(trained):
    one, store = trained
    results = store.load_all(one)
    for arm in ("LI", "whole"):
        results[arm].runs["test_error"][:] = 0.9
    finding = Smaller("1", "LI", "whole").weigh(Stored(one, results))[0]
    assert (
        finding.verdict == "inconclusive: the network did not learn"
        and "at chance level: LI and whole" in finding.measured
    )
    assert any("says nothing" in line for line in tables.remarks(one, results))
    assert evidence.at_chance(results["LI"]) and NOT_LEARNT in evidence.UNDECIDED


def test_separation_has_no_unit_and_finds_the_clearest_norm():
    noise = torch.randn(20, 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centre = torch.tensor([5.0, 1.0, 3.0], dtype=torch.float64).view(1, 3, 1)
    values = torch.cat((centre + noise, 1e6 * (centre + noise), centre + 0.1 * noise), 2)
    found = evidence.separation(values)
    assert found[0] == pytest.approx(found[1].item()) and found[2] == pytest.approx(10 * found[0].item(), rel=0.5)
    assert found[0] == pytest.approx(2, rel=0.5)


def test_what_is_not_there_is_awaited(tmp_path):
    nothing = evidence.Evidence(Store(tmp_path), RunOptions())
    for check in (Separation("5", "CNN LI"), SamePlace("12")):
        (finding,) = check.weigh(nothing)
        assert finding.verdict == AWAITING and "--preset laptop" in finding.measured
    assert {CONFIRMED, NOT_CONFIRMED}.isdisjoint(evidence.UNDECIDED)
