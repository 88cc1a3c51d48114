"""`Diminishing`: fires where the curve of the metric over FLOPs is flat against its own past, whatever the units and despite noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from models import fnn, labels, points
from sensli import Grower, Trial, load_checkpoint, save_checkpoint, triggers
from sensli.growing.triggers import Diminishing, Trigger, TriggerContext


def firing(
    trigger: Trigger,
    metrics: Sequence[float],
    flops: Callable[[int], int] = lambda growths: 100,
    verdict: str = "grows",
) -> list[int]:
    """The calls at which it fires; after each the model grows, or a trial refuses, or nothing passes the threshold."""
    fired: list[int] = []
    for call, metric in enumerate(metrics, 1):
        if trigger.fires(
            TriggerContext(call, metric, len(fired), {"flops": flops(len(fired) if verdict == "grows" else 0)})
        ):
            fired.append(call)
            trigger.looked()
            if verdict == "grows":
                trigger.grown()
            if verdict != "nothing passes":
                trigger.judged(verdict == "grows")
    return fired


def by_hand(losses: Sequence[float], flops: int, share: float, window: int) -> int:
    """The first call at which it should fire, from the whole curve."""
    for call in range(window + 1, len(losses) + 1):
        last = [(flops * (i + 1), losses[i]) for i in range(call - window, call)]
        slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for k, b in enumerate(last) for a in last[:k])
        half = len(slopes) // 2
        now = slopes[half] if len(slopes) % 2 else (slopes[half - 1] + slopes[half]) / 2
        middle = last[window // 2]  # of an odd number of values that fall
        mean = (middle[1] - losses[0]) / (middle[0] - flops)
        if -now <= share * -mean:
            return call
    return 0


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_it_fires_where_the_slope_is_that_share_of_the_mean_one(power: float, share: float) -> None:
    losses = [(call + 1) ** -power for call in range(60)]
    expected = by_hand(losses, 100, share, 5)
    assert firing(Diminishing(share), losses)[:1] == ([expected] if expected else [])
    # neither the units of the loss nor those of the FLOPs matter, and a metric may be one that rises
    for factor, offset, cost in ((1e6, 0.0, 1), (1e-6, 3.0, 10**12)):
        again = [factor * loss + offset for loss in losses]
        assert firing(Diminishing(share), again, lambda _, cost=cost: cost)[:1] == ([expected] if expected else [])
        assert firing(Diminishing(share, mode="max"), [-loss for loss in again])[:1] == ([expected] if expected else [])


def test_a_steady_fall_never_fires_despite_noise_and_single_values_far_off() -> None:
    draw = random.Random(0)
    assert firing(Diminishing(), [100.0 - call for call in range(100)]) == []
    assert firing(Diminishing(), [100.0 - call + draw.uniform(-0.5, 0.5) for call in range(100)]) == []
    spiked = [100.0 - call + (50.0 if call % 10 == 7 else 0.0) for call in range(100)]
    assert firing(Diminishing(), spiked) == []
    assert firing(Diminishing(), [math.nan if call % 3 else 100.0 - call for call in range(100)]) == []
    assert firing(Diminishing(window=2), [math.nan] * 9) == []


def test_a_flat_curve_fires_each_time_the_window_is_full_again() -> None:
    assert firing(Diminishing(window=4), [1.0] * 20) == [5, 9, 13, 17]
    assert firing(Diminishing(window=4), [1.0] * 20, verdict="nothing passes") == [5, 9, 13, 17]
    rising = [1.0 + 0.1 * call for call in range(12)]
    assert firing(Diminishing(window=4), rising) == [5, 9]


def test_each_time_that_not_growing_wins_doubles_the_wait_until_a_growth_wins() -> None:
    assert firing(Diminishing(window=2), [1.0] * 40, verdict="refused") == [3, 7, 15, 31]
    trigger = Diminishing(window=2)
    assert firing(trigger, [1.0] * 8, verdict="refused") == [3, 7]
    trigger.judged(True)
    assert firing(trigger, [1.0] * 6, verdict="refused") == [1, 5]


def test_a_growth_begins_a_time_whose_flops_are_those_of_the_larger_model() -> None:
    # Flat at the seventh call. Afterwards it falls again, from the loss of then: that is new, and not a small share of what was before.
    losses = [10.0, 9, 8, 7, 6, 6, 6, 6, 6, *(6 - 0.5 * call for call in range(1, 9))]
    assert firing(Diminishing(window=3), losses, lambda growths: 100 if growths == 0 else 1000) == [7]
    # The loss falls by one at every call, but from the eighth on a call costs twenty times as much.
    trigger = Diminishing(window=3)
    fired = [c for c in range(1, 9) if trigger.fires(TriggerContext(c, 20.0 - c, 0, {"flops": 100 if c < 8 else 2000}))]
    assert fired == [8]


def test_it_needs_a_metric() -> None:
    with pytest.raises(ValueError, match=r"Diminishing needs a metric: call grower\.step"):
        Diminishing().fires(TriggerContext(1, None, 0, {"flops": 1}))


def test_it_resumes_from_its_state_to_the_bit() -> None:
    draw = random.Random(1)
    losses = [(call + 1) ** -0.7 + draw.uniform(0, 0.05) for call in range(80)]
    whole = firing(Diminishing(0.5, window=3), losses, verdict="refused")
    assert len(whole) > 2
    for cut in range(1, 40, 3):
        first, second = Diminishing(0.5, window=3), Diminishing(0.5, window=3)
        begun = firing(first, losses[:cut], verdict="refused")
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = firing(second, losses[cut:], verdict="refused")
        assert begun + [cut + call for call in rest] == whole


@pytest.mark.parametrize(
    "change",
    [
        {"spent": math.inf}, {"spent": "1"}, {"first": [1]}, {"first": 3}, {"recent": None}, {"recent": [[1, math.nan]]},
        {"recent": [[1, "2"]]}, {"waited": -1}, {"waited": True}, {"declined": 1.5}, {"declined": 64}, {"more": 1},
    ],
)  # fmt: skip
def test_a_state_that_is_not_one_is_refused(change: dict[str, Any]) -> None:
    trigger = Diminishing(window=2)
    firing(trigger, [3.0, 2.0, 1.5])
    state = trigger.state_dict()
    with pytest.raises(ValueError, match="needs FLOPs, pairs of FLOPs and values"):
        trigger.load_state_dict({**state, **change})
    assert trigger.state_dict() == state


def test_a_grower_looks_tries_backs_off_and_resumes(tmp_path: Path) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def make_grower(model: Any, optimizer: Any, scheduler: Any = None) -> Grower:
        trial = Trial(1, metric=lambda model: sum(p.numel() for p in model.parameters()))  # not growing wins
        trigger = triggers.Diminishing(window=2) & triggers.Limit(growths=3)
        return Grower(model, optimizer, preset="paper", example=points(1), trigger=trigger, tau=0.0, trial=trial)

    model, data, file = fnn(), [(points(), labels())], tmp_path / "run.ckpt"
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer)
    for call in range(1, 16):
        grower.step(data, cross_entropy, metric=1.0)
        if call == 9:
            save_checkpoint(file, model, optimizer=optimizer, grower=grower)
    again = load_checkpoint(file, fnn, make_optimizer, make_grower=make_grower).grower
    assert again is not None
    for _ in range(6):
        again.step(data, cross_entropy, metric=1.0)
    for one in (grower, again):
        assert [look.call for look in one.history.record.decisions] == [3, 7, 15] and not one.history
