"""`Saturating`: fires near the call at which what can still be won is that share of what remains, despite noise."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from models import fnn, labels, points
from sensli import Grower, load_checkpoint, save_checkpoint, triggers
from sensli.growing.saturating import Saturating
from sensli.growing.triggers import Trigger, TriggerContext


def firing(trigger: Trigger, metrics: Sequence[float], *, grows: bool = False, first: int = 1) -> list[int]:
    """The calls at which it fires; after each the model grows, or the look was in vain."""
    fired: list[int] = []
    for call, metric in enumerate(metrics, first):
        if trigger.fires(TriggerContext(call, metric)):
            fired.append(call)
            trigger.looked()
            if grows:
                trigger.grown()
    return fired


def law(
    power: float, end: float, reached: float, calls: int = 100, *, noise: float = 0.0, seed: int = 0
) -> list[float]:
    """Losses that fall to 1.25 times their end at that time of training."""
    draw = random.Random(seed)
    scale = 0.25 * end * reached**power
    return [(end + scale * (call + 0.5) ** -power) * (1 + draw.gauss(0, noise)) for call in range(calls)]


@pytest.mark.parametrize("power", [0.3, 0.5, 1.0])
@pytest.mark.parametrize(("end", "reached"), [(1.0, 20), (1e-6, 60), (1e6, 12)])
def test_it_fires_as_soon_as_what_is_left_is_that_share(power: float, end: float, reached: int) -> None:
    assert firing(Saturating(), law(power, end, reached))[0] == reached + 1


@pytest.mark.parametrize(
    ("power", "noise", "least", "most"), [(0.5, 0.001, 30, 50), (0.7, 0.003, 30, 50), (1.0, 0.01, 30, 50)]
)
def test_it_fires_near_that_moment_despite_noise(power: float, noise: float, least: int, most: int) -> None:
    calls = sorted(firing(Saturating(), law(power, 2.0, 40, noise=noise, seed=seed))[0] for seed in range(7))
    assert least <= calls[1] and calls[-2] <= most, calls


def test_single_values_far_off_and_missing_ones_count_for_little() -> None:
    losses = law(0.6, 1.0, 40, noise=0.001)
    for call in (11, 27, 30):
        losses[call] *= 3.0
    losses[20] = math.nan
    losses[21] = math.inf
    assert 30 <= firing(Saturating(), losses)[0] <= 50


@pytest.mark.parametrize("power", [0.3, 0.7, 1.2])
def test_a_loss_that_goes_to_zero_never_fires(power: float) -> None:
    for seed in range(2):
        draw = random.Random(seed)
        losses = [3.0 * (call + 0.5) ** -power * (1 + draw.gauss(0, 0.01)) for call in range(100)]
        assert firing(Saturating(), losses) == []
    assert firing(Saturating(), [0.8**call for call in range(80)]) == []
    assert firing(Saturating(), [0.0] * 30) == firing(Saturating(), [math.nan] * 30) == []


def test_a_constant_loss_fires_and_each_look_in_vain_doubles_the_wait() -> None:
    assert firing(Saturating(), [1.0] * 70) == [8, 16, 32, 64]
    assert firing(Saturating(calls=5), [0.3] * 50, grows=True) == [5, 15, 45]
    assert firing(Saturating(calls=5, apart=0), [0.3] * 16, grows=True) == [5, 10, 15]
    draw = random.Random(0)
    assert firing(Saturating(), [1.0 + draw.gauss(0, 0.01) for _ in range(20)])


def test_a_metric_that_rises_never_fires() -> None:
    draw = random.Random(0)
    accuracy = [1 - 0.8 * 0.93**call + draw.gauss(0, 0.01) for call in range(40)]
    assert firing(Saturating(), accuracy) == firing(Saturating(), [1.0 + 0.01 * call for call in range(40)]) == []


def test_a_negative_metric_warns_and_does_not_fire() -> None:
    with pytest.warns(UserWarning, match=r"needs a loss whose least value is 0.*Use Diminishing"):
        assert firing(Saturating(), [-1.0] * 10) == []
    with warnings.catch_warnings(action="ignore"):
        assert firing(Saturating(), [*law(0.5, 1.0, 20, 10), -1.0, *law(0.5, 1.0, 20, 40)[11:]]) != []


def test_the_jump_after_a_growth_does_not_count() -> None:
    before = law(0.5, 1.0, 20, 21)
    # A copied stack: twice the loss, back within eight calls; then the larger network falls towards a lower end.
    jump = [before[-1] * (1 + 2.0**-call) for call in range(8)]
    after = [
        0.8 + 0.449 * ((20 + call) / 20) ** -0.5 for call in range(90)
    ]  # as if it had begun 20 calls earlier; R = c / 4 at 81
    trigger = Saturating()
    assert firing(trigger, before, grows=True) == [21]
    assert firing(trigger, jump) == []
    assert trigger.state_dict()["points"] == []
    found = firing(trigger, after)
    assert found and 20 <= found[0] <= 90


def test_a_long_training_is_kept_in_few_numbers_and_fires_at_the_right_call() -> None:
    trigger, losses = Saturating(calls=500), law(0.5, 1.0, 700, 800, noise=0.001)
    found = firing(trigger, losses)
    assert 600 <= found[0] <= 780
    state = trigger.state_dict()
    assert len(state["points"]) <= 64 and sum(count for _, _, count in state["points"]) == 800


def test_it_waits_for_steps_where_they_are_counted() -> None:
    trigger = Saturating(steps=100) & triggers.Limit(growths=1)
    assert repr(Saturating(0.2, steps=100)) == "Saturating(0.2, calls=8, apart=2, steps=100)"
    fired = [call for call in range(1, 30) if trigger.fires(TriggerContext(call, 1.0, steps=10 * call))]
    assert fired[0] == 10  # what it saw before counts
    unknown = Saturating(steps=100)
    assert [call for call in range(1, 10) if unknown.fires(TriggerContext(call, 1.0))] == [8, 9]


def test_it_needs_a_metric() -> None:
    assert Saturating().needs_metric
    with pytest.raises(ValueError, match=r"Saturating needs a metric: call grower\.step"):
        Saturating().fires(TriggerContext(1, None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0}, r"share must be between 0 and 1 \(for example 0\.25\), got 0"),
        ({"share": 1.5}, "share must be between 0 and 1"),
        ({"share": "much"}, "share must be between 0 and 1"),
        ({"calls": 4}, r"calls must be a whole number of at least 5 \(for example 8\), got 4"),
        ({"calls": 8.0}, "calls must be a whole number"),
        ({"steps": -1}, r"steps must be a whole number of at least 0 \(for example 1000\), got -1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Saturating(**arguments)


def test_it_resumes_from_its_state_to_the_bit() -> None:
    losses = law(0.5, 1.0, 9, 90, noise=0.02, seed=3)
    losses[4] = math.nan
    whole = firing(Saturating(calls=5), losses, grows=True)
    assert len(whole) > 2
    for cut in range(1, 90, 7):
        first, second = Saturating(calls=5), Saturating(calls=5)
        begun = firing(first, losses[:cut], grows=True)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.state_dict() == first.state_dict()
        assert begun + firing(second, losses[cut:], grows=True, first=cut + 1) == whole


@pytest.mark.parametrize(
    "change",
    [
        {"begun": -1}, {"time": 1.5}, {"time": True}, {"level": "1"}, {"level": math.nan}, {"level": -1.0}, {"waited": None},
        {"vain": 64}, {"points": None}, {"points": [[1.0, 2.0]]}, {"points": [[1.0, math.inf, 1]]}, {"points": [[1.0, 1.0, 0]]},
        {"points": [[1.0, -1.0, 1]]}, {"points": [[1.0, 1.0, 1]] * 65}, {"width": 0}, {"more": 1},
    ],
)  # fmt: skip
def test_a_state_that_is_not_one_is_refused(change: dict[str, Any]) -> None:
    trigger = Saturating()
    firing(trigger, law(0.5, 1.0, 20, 12))
    state = trigger.state_dict()
    with pytest.raises(ValueError, match="needs counts, a level, and sums of times and values"):
        trigger.load_state_dict({**state, **change})
    assert trigger.state_dict() == state
    with pytest.raises(ValueError, match="needs counts"):
        trigger.load_state_dict(triggers.Diminishing().state_dict())


def test_a_grower_grows_when_it_fires_and_resumes(tmp_path: Path) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def make_grower(model: Any, optimizer: Any, scheduler: Any = None) -> Grower:
        trigger = (triggers.Saturating(calls=5) & triggers.Limit(growths=2)) | triggers.At(17)
        return Grower(model, optimizer, preset="paper", example=points(1), trigger=trigger, tau=0.0, floor=0)

    losses = law(0.5, 1.0, 9, 17)
    model, data, file = fnn(), [(points(), labels())], tmp_path / "run.ckpt"
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer)
    for call, loss in enumerate(losses, 1):
        grower.step(data, cross_entropy, metric=loss)
        if call == 8:
            save_checkpoint(file, model, optimizer=optimizer, grower=grower)
    again = load_checkpoint(file, fnn, make_optimizer, make_grower=make_grower).grower
    assert again is not None
    for loss in losses[8:]:
        again.step(data, cross_entropy, metric=loss)
    for one in (grower, again):
        assert next(look.call for look in one.history.record.decisions) == 10 and len(one.history) >= 2
    assert again.state_dict() == grower.state_dict()
