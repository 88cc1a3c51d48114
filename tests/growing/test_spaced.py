"""`Spaced`: after a growth the training must take as many times the FLOPs as the square of what a step costs more."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from models import fnn, labels, points
from sensli import Grower, count_flops, triggers
from sensli.growing.triggers import Spaced, TriggerContext


def firing(trigger: Spaced, flops: list[int], grows: set[int], first: int = 1) -> list[int]:
    """The calls at which it fires; the network has grown at some of them, so that the next call costs more."""
    fired = []
    for call, cost in enumerate(flops, first):
        if trigger.fires(TriggerContext(call, None, 0, {"flops": cost})):
            fired.append(call)
        if call in grows:
            trigger.grown()
    return fired


def test_it_waits_by_the_square_of_what_a_step_costs_more() -> None:
    # 4 calls of 10, then 20 each: the next growth at 160, which is 6 more of them
    assert firing(Spaced(), [10] * 4 + [20] * 8, {4}) == [1, 2, 3, 4, 10, 11, 12]
    # then 30 each, 2.25 times 160 is 360: 7 more
    assert firing(Spaced(), [10] * 4 + [20] * 6 + [30] * 8, {4, 10}) == [1, 2, 3, 4, 10, 17, 18]
    assert firing(Spaced(1), [10] * 4 + [20] * 8, {4}) == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    assert firing(Spaced(0), [10] * 4 + [20] * 8, {4}) == list(range(1, 13))


def test_before_the_first_growth_it_always_fires_and_a_smaller_network_waits_no_longer() -> None:
    assert firing(Spaced(), [10] * 9, set()) == list(range(1, 10))
    assert firing(Spaced(), [10] * 4 + [20] * 2 + [10] * 20, {4})[4:] == list(
        range(14, 27)
    )  # taken back: 160 stays due


def test_asking_beforehand_changes_nothing() -> None:
    trigger = Spaced()
    firing(trigger, [10] * 4, {4})
    before = trigger.state_dict()
    assert not trigger.may_fire(TriggerContext(5, None, 0, {"flops": 20}))
    assert trigger.may_fire(TriggerContext(5, None, 0, {"flops": 10}))
    assert trigger.state_dict() == before


@pytest.mark.parametrize("split", [2, 4, 5, 8])
def test_a_resumed_one_fires_as_it_would_have(split: int) -> None:
    flops, whole = [10] * 4 + [20] * 8, firing(Spaced(), [10] * 4 + [20] * 8, {4})
    first, second = Spaced(), Spaced()
    fired = firing(first, flops[:split], {4})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert fired + firing(second, flops[split:], {4}, split + 1) == whole


def test_it_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"power must be .*, got -1"):
        Spaced(-1)
    with pytest.raises(ValueError, match=r"Spaced\(\) needs four counts of FLOPs, got \{\}"):
        Spaced().load_state_dict({})
    with pytest.raises(ValueError, match="four counts of FLOPs"):
        Spaced().load_state_dict({**Spaced().state_dict(), "due": float("nan")})


def test_a_network_waits_for_its_compute() -> None:
    torch.manual_seed(0)
    model = fnn().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [(points(32).float(), labels(32))]
    trigger = triggers.Every(1) & triggers.Spaced() & triggers.Limit(growths=4)
    grower = Grower(model, optimizer, trigger=trigger, what="units", units=0.5, example=data[0][0])
    spent, growths = 0.0, []  # at each growth: what was spent by then, and FLOPs before and after it
    for _ in range(200):
        before = count_flops(model, data[0][0])
        spent += before
        due = growths[-1][0] * (growths[-1][2] / growths[-1][1]) ** 2 if growths else 0.0
        grown = grower.step(data, cross_entropy) is not None
        assert grown == (spent >= due and len(growths) < 4)
        if grown:
            growths.append((spent, before, count_flops(model, data[0][0])))
    assert len(growths) == 4
