"""`Pays`: what a growth adds to the gradient against what it adds to the FLOPs, as one would compute it by hand."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from models import fnn, labels, points
from sensli import Grower, Probe, count_flops, find_sites, measure, triggers
from sensli.growing.triggers import At, Diminishing, Every, Limit, Pays, TriggerContext, payoff
from sensli_lab.methods.controls import RandomUnits


def data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return fnn(width=6).double(), points(64), labels(64)


def by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The squared norm of the gradient of all existing weights."""
    again = copy.deepcopy(model)
    cross_entropy(again(x), y).backward()
    return sum(float(p.grad.square().sum()) for p in again.parameters() if p.ndim >= 2 and p.grad is not None)


@pytest.mark.parametrize("grow", ["layers", "units", "both"])
def test_a_share_is_the_merit_of_the_gradient_of_all_weights(grow: str) -> None:
    model, x, y = data()
    sites = find_sites(model, x[:1], what=grow)
    whole, merits = by_hand(model, x, y), measure(model, sites, [(x[:40], y[:40]), (x[40:], y[40:])], cross_entropy)
    assert [merit.share for merit in merits] == pytest.approx([merit.value / whole for merit in merits], rel=1e-10)
    assert merits[0].to_dict()["share"] == merits[0].share
    with Probe(model, merits) as probe:
        cross_entropy(model(x), y).backward()
    assert [merit.share for merit in probe.merits()] == pytest.approx([merit.share for merit in merits], rel=1e-10)
    assert measure(model, sites, [(x, y)], cross_entropy, ratio=False)[0].share is None


def test_what_pays_is_let_through_and_nothing_else() -> None:
    model, x, y = data()
    merits = measure(model, find_sites(model, x[:1], what="units", units=2), [(x, y)], cross_entropy)
    before = count_flops(model, x[:1])
    found = {}
    for merit in merits:
        wider = copy.deepcopy(model)
        grower = Grower(wider, preset="paper", example=x[:1], trigger=triggers.Every(1), what="units", units=2, tau=0.0, max_factor=None,
                        select=lambda merits, place=str(merit.site): next(m for m in merits if str(m.site) == place))  # fmt: skip
        grower.step([(x, y)], cross_entropy)
        found[str(merit.site)] = merit.value / by_hand(model, x, y) / (count_flops(wider, x[:1]) / before - 1)
    assert {str(m.site): payoff(m, before) for m in merits} == pytest.approx(found, rel=1e-9)
    largest = max(found.values())
    for factor, grows in ((largest * 0.999, True), (largest * 1.001, False)):
        grower = Grower(
            copy.deepcopy(model),
            preset="paper",
            example=x[:1],
            trigger=Pays(factor),
            what="units",
            units=2,
            tau=0.0,
            max_factor=None,
        )
        growth = grower.step([(x, y)], cross_entropy)
        assert (growth is not None) == grows
        if growth is not None:
            assert found[str(growth.site)] == largest
        else:
            reason = grower.history.record.decisions[0].reason
            assert re.search(
                r"would add [\d.]+% to the gradient and [\d.]+% to the FLOPs: a payoff of [\d.]+, below", reason
            )


def calls(trigger: triggers.Trigger, until: int, grown: tuple[int, ...] = ()) -> list[int]:
    fired = []
    for call in range(1, until + 1):
        if trigger.fires(TriggerContext(call)):
            fired.append(call)
            trigger.looked()
            if call in grown:
                trigger.grown()
    return fired


def test_it_waits_twice_as_long_after_each_look_in_vain() -> None:
    assert calls(Pays(), 40) == [1, 3, 7, 15, 31]
    assert calls(Pays(), 12, grown=(1, 2, 7)) == [1, 2, 3, 5, 9]
    assert calls(Pays(), 12, grown=(1, 2, 5)) == [1, 2, 3, 5, 6, 8, 12]


def test_a_limit_binds_only_the_side_that_fired() -> None:
    """What returns diminish for need not pay: the other side lets it through."""
    model, x, y = data()
    grower = Grower(
        model, preset="paper", example=x[:1], trigger=Pays(1e9) | At(3), what="units", tau=0.0, max_factor=None
    )
    assert [grower.step([(x, y)], cross_entropy) is not None for _ in range(4)] == [False, False, True, False]
    grower = Grower(
        model,
        preset="paper",
        example=x[:1],
        trigger=Pays(1e-9) & Limit(growths=2),
        what="units",
        tau=0.0,
        max_factor=None,
    )
    assert [grower.step([(x, y)], cross_entropy) is not None for _ in range(4)] == [True, True, False, False]


def test_it_resumes_where_it_was_and_refuses_other_states() -> None:
    whole, first, second = Pays(), Pays(), Pays()
    expected = calls(whole, 20)
    fired = calls(first, 9)
    second.load_state_dict(first.state_dict())
    assert (
        fired + [call for call in range(10, 21) if second.fires(TriggerContext(call)) and second.looked() is None]
        == expected
    )
    for wrong in ({}, {"waited": 1}, {"waited": -1, "vain": 0}, {"waited": 1.0, "vain": 0}, {"waited": 0, "vain": 64}):
        with pytest.raises(ValueError, match=r"Pays\(2\) needs two counts, waited and vain, got"):
            second.load_state_dict(wrong)
    assert second.state_dict() == {"waited": 5, "vain": 4}


@pytest.mark.parametrize("factor", [0, -1, math.nan, math.inf, "2", True])
def test_a_wrong_factor_is_refused(factor: object) -> None:
    with pytest.raises((ValueError, TypeError), match="factor must be"):
        Pays(factor)  # type: ignore[arg-type]


class Unsaid(RandomUnits):
    """A strategy that does not say that its merits have no share."""

    shares = True


def test_a_strategy_without_shares_is_refused_before_anything_changes() -> None:
    model, x, y = data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for trigger in (Pays(), Every(2) & (Diminishing() | Pays())):
        with pytest.raises(
            ValueError, match=r"^Pays\(2\) needs merits that are compared with the existing weights, which this"
        ):
            Grower(model, preset="paper", example=x[:1], trigger=trigger, strategy="random-units", max_factor=None)
    grower = Grower(model, preset="paper", example=x[:1], trigger=Pays(), strategy=Unsaid(), max_factor=None)
    with pytest.raises(
        ValueError, match=r"Pays needs merits that are compared with the existing weights, but that of '.*' is not"
    ):
        grower.step([(x, y)], cross_entropy)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        n: v.tolist() for n, v in before.items()
    }
    assert grower.calls == 0 and len(grower.history) == 0
