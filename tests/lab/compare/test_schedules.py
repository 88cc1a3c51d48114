"""Published schedules: the learning rates that they state, the moments, what the optimizer forgets; and the reference beyond the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sensli.growing.strategy import STRATEGIES
from sensli_lab.compare.front import fixed_curves
from sensli_lab.compare.jobs import Job, Run
from sensli_lab.compare.methods import OWN, SHAPES, Method, MethodSchedule, choose_methods, methods
from sensli_lab.compare.report import PUBLISHED
from sensli_lab.compare.tasks.registry import TASKS
from sensli_lab.compare.tasks.spirals import SPIRALS
from sensli_lab.compare.training import JobTraining, train

TINY = replace(SPIRALS, steps=12, looks=(0.2, 0.5), points=6, batch=120, looked_at=240)
DATA = TINY.load(None, 0)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (MethodSchedule("", (0.4,)), {0.0: 1, 0.5: 1, 0.75: 0.5, 1.0: 0, 1.01: 0}),
        (MethodSchedule("", (0.4,), "constant"), {0.0: 1, 0.9: 1}),
        (MethodSchedule("", (0.4,), "cosine"), {0.0: 1, 0.5: 0.5, 1.0: 0}),
        # trained to the end, then a tenth, again to the end
        (MethodSchedule("", (0.4,), rounds="each", after=0.1), {0.2: 1, 0.3: 0.5, 0.4: 0.1, 0.7: 0.1, 0.85: 0.05, 1.0: 0}),
        (MethodSchedule("", (0.5,), "tenths", "each"), {0.0: 1, 0.3: 0.1, 0.4: 0.01, 0.5: 1, 0.8: 0.1, 0.9: 0.01}),
        (MethodSchedule("", (0.2, 0.5), "tenths", "last"), {0.0: 1, 0.4: 1, 0.5: 1, 0.7: 1, 0.8: 0.1, 0.9: 0.01}),
        (MethodSchedule("", (0.5,), "constant", "each", warmup=True), {0.001: 1, 0.5: 0.02, 0.5075: 0.5, 0.6: 1}),
        (MethodSchedule("", (0.5,), "cosine to a tenth", "each"), {0.0: 1, 0.25: 0.55, 0.4999: 0.1, 0.5: 1, 1.0: 0.1}),
    ],
)  # fmt: skip
def test_the_learning_rate_of_a_schedule(schedule: MethodSchedule, rates: dict[float, float]) -> None:
    assert [schedule.rate(share) for share in rates] == pytest.approx(list(rates.values()), abs=1e-3)


def test_every_published_schedule_is_one() -> None:
    for schedule in OWN.values():
        assert schedule.shape in SHAPES and schedule.rounds in ("one", "each", "last") and schedule.words
        assert list(schedule.looks) == sorted(set(schedule.looks)) and schedule.looks[0] > 0 and schedule.looks[-1] < 1
    assert OWN.keys() <= {*STRATEGIES, "layers"} and PUBLISHED.keys() == STRATEGIES.keys(), (
        "no name is misspelt or left out"
    )
    known = methods(TINY)
    own = {method.name: method for method in choose_methods(TINY, ["own"])}
    assert {"net2net-own", "gradmax-own", "autogrow-own"} <= own.keys()
    assert all(method.schedule is OWN[name.removesuffix("-own")] for name, method in own.items())
    assert not any(known[name].schedule for name in known if not name.endswith("-own"))


def test_an_own_schedule_has_other_moments_and_the_same_flops() -> None:
    common, own = (train(Job(TINY, methods(TINY)[name], 0), DATA) for name in ("net2net", "net2net-own"))
    assert common.budget == own.budget and own.flops[-1] >= own.budget
    assert (common.looks, own.looks) == (2, 1)
    assert len(own.grown) == 2 and all(flops > 0.4 * own.budget for flops, _ in own.grown), "both layers at once"


def test_another_optimizer_begins_without_moments() -> None:
    for name, steps in (("net2net-own", 1), ("net2net", None)):
        one = JobTraining(Job(TINY, methods(TINY)[name], 0), DATA)
        while not one.run.grown:
            one.advance()
        found = {int(state["step"]) for state in one.optimizer.state.values()}
        assert found == {steps or one.run.steps}, "of Adam, for all parameters"
    assert len(one.run.grown) == 1, "one layer at a look under the common schedule"


def test_a_common_run_keeps_the_digest_that_it_had_before_there_were_schedules() -> None:
    facts = {name: Job(SPIRALS, method, 0).facts() for name, method in methods(SPIRALS).items()}
    assert not any("schedule" in facts[name] or "full" in facts[name] for name in ("small", "large", "both", "gradmax"))
    assert facts["gradmax-own"]["schedule"]["looks"] == OWN["gradmax"].looks and facts["large-full"]["full"]
    assert Job(SPIRALS, methods(SPIRALS)["small"], 0).digest == "db8e3ba87a6a"


def test_the_large_network_for_all_steps_is_beyond_the_budget_and_not_in_the_front() -> None:
    small, large, full = (train(Job(TINY, methods(TINY)[name], 0), DATA) for name in ("small", "large", "large-full"))
    assert full.steps == small.steps > large.steps == TINY.steps and full.budget > 2 * large.budget
    known = list(methods(TINY).values())
    runs: dict[str, dict[int, Run]] = {"small": {0: small}, "large": {0: large}, "large-full": {0: full}}
    fixed = fixed_curves(runs, known, 0)
    assert fixed is not None and len(fixed) == 2


@pytest.mark.parametrize("name", [name for name in methods(TASKS["text"]) if name.endswith("-own")])
def test_what_an_own_schedule_gives_the_grower_is_accepted(name: str) -> None:
    method: Method = methods(TINY)[name]
    assert JobTraining(Job(TINY, method, 0), DATA).grower is not None
