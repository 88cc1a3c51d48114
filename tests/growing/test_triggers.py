"""Triggers as tables: the values they see and the calls at which they fire."""

import pytest

from models import fnn, points
from sensli import find_sites
from sensli.growing.triggers import At, Every, Limit, Plateau, Trigger, TriggerContext


def firing(trigger, metrics=None, calls=12, growths=None, sizes=None, grows=True):
    """The calls at which a trigger fires; it grows whenever it fires, unless the growths are given or it never `grows`."""
    fired = []
    for call in range(1, calls + 1):
        metric = None if metrics is None else metrics[call - 1]
        count = len(fired) if growths is None else growths[call - 1]
        if trigger.fires(TriggerContext(call, metric, count, {} if sizes is None else sizes[call - 1])):
            fired.append(call)
            trigger.looked()
            if grows:
                trigger.grown()
    return fired


@pytest.mark.parametrize(
    "trigger, fires",
    [
        (At(3), [3]),
        (At(5, 2, 5), [2, 5]),
        (At(99), []),
        (Every(1), list(range(1, 13))),
        (Every(5), [5, 10]),
        (Every(5) | At(1), [1, 5, 10]),
        (Every(2) & Every(3), [6, 12]),
        (Every(2) & Limit(growths=2), [2, 4]),
        (Every(4) & Limit(growths=2) | At(11), [4, 8, 11]),
        ((Every(4) | At(3)) & Limit(growths=2), [3, 4]),
        (Limit(growths=3), [1, 2, 3]),
    ],
    ids=repr,
)
def test_counting_triggers(trigger, fires):
    assert firing(trigger) == fires


NAN = float("nan")


@pytest.mark.parametrize(
    "trigger, metrics, fires",
    [
        (Plateau(2), [5, 4, 3, 3, 3, 3, 3], [5, 7]),
        (Plateau(3), [5, 4, 3, 3, 2, 2, 2, 2, 2, 2, 2], [8, 11]),
        (Plateau(2), [1, 2, 3, 0.5, 1, 1], [3, 6]),
        (Plateau(2, mode="max"), [1, 2, 3, 3, 3, 4, 4, 4], [5, 8]),
        (Plateau(2, threshold=0.1), [100, 95, 92, 89, 85, 81], [3, 6]),
        (Plateau(2, min_delta=2.5), [100, 98, 97, 96, 95, 90, 89], [5]),
        (Plateau(2, min_delta=1, mode="max"), [1, 1.5, 2.5, 3, 3.25, 3.5], [5]),
        (Plateau(2, min_delta=0.001, threshold=0.1), [100, 95, 92, 89], [3]),
        (Plateau(1), [1, 1, 0.5, 0.5], [2, 4]),
        (Plateau(2), [NAN, NAN, 1, NAN, float("inf"), 0.5], [2, 5]),
        (Plateau(2), [-1, -2, -2, -2], [4]),
        (Plateau(2) & Every(4), [3, 3, 3, 3, 3, 3, 3, 3], [4, 8]),
        (Plateau(3) & Every(3), [3] * 13, [6, 9, 12]),
        (Every(3) & Plateau(3), [3] * 13, [6, 9, 12]),
        (Plateau(4) & Every(3), [3] * 13, [6, 12]),
        (Plateau(2) & Every(4), [5, 5, 5, 4, 4, 4, 4, 4], [8]),
        ((Plateau(3) | At(1)) & Every(3), [3] * 13, [6, 9, 12]),
        (Plateau(2) & Limit(growths=1), [3] * 9, [3]),
        (Plateau(3) | At(2), [3] * 9, [2, 5, 8]),
    ],
    ids=repr,
)
def test_plateau(trigger, metrics, fires):
    assert firing(trigger, metrics, len(metrics)) == fires


def test_plateau_sees_every_metric_on_both_sides_of_a_pair():
    quiet, loud = At(4) & Plateau(2), Plateau(2) & At(4)
    assert firing(quiet, [1, 1, 1, 1], 4) == firing(loud, [1, 1, 1, 1], 4) == [4]
    assert quiet.right.best == loud.left.best == 1


@pytest.mark.parametrize(
    "trigger, fires",
    [
        (Plateau(3), [4, 7, 10]),
        (Plateau(3) & Every(3), [6, 9, 12]),
        (Plateau(3) | At(2), [2, 4, 7, 10]),  # the look at 2 was not the plateau's
        ((Plateau(3) & Every(5)) | At(4), [4, 5, 10]),
    ],
    ids=repr,
)
def test_a_part_counts_on_until_the_whole_fires(trigger, fires):
    assert firing(trigger, [3] * 12, 12, grows=False) == fires


@pytest.mark.parametrize(
    "combine",
    [
        lambda: Every(2) and Limit(growths=2),
        lambda: Every(2) or Limit(growths=2),
        lambda: not Every(2),
        lambda: bool(At(1) & At(2)),
    ],
)
def test_triggers_have_no_truth_value(combine):
    with pytest.raises(TypeError, match=r"Every\(2\) & Limit\(growths=2\)"):
        combine()


@pytest.mark.parametrize(
    "state",
    [
        {}, {"left": {}}, {"left": {}, "right": {}}, {"left": {"best": 2.0, "waited": 3}, "right": {"best": 1.0}},
        {"left": {"best": 2.0, "waited": 3}, "right": {"waited": 1}}, {"left": {"best": "2", "waited": 3}, "right": {}},
        {"left": {"best": 2.0, "waited": -1}, "right": {}}, {"left": {"best": 2.0, "waited": 1.5}, "right": {}},
        {"left": {"best": float("nan"), "waited": 1}, "right": {}}, {"left": None, "right": {}}, [], None, "state", 3,
    ],
    ids=repr,
)  # fmt: skip
def test_a_state_that_does_not_fit_changes_nothing(state):
    trigger = Plateau(3) & Every(2)
    firing(trigger, [1, 1], 2)
    before = trigger.state_dict()
    with pytest.raises((ValueError, TypeError, KeyError)):
        trigger.load_state_dict(state)
    assert trigger.state_dict() == before


def test_plateau_without_a_metric_says_how_to_give_one():
    with pytest.raises(ValueError, match="metric=loss"):
        firing(Plateau(2) & Limit(growths=1), None, 1)


def site():
    return find_sites(fnn(), points())[0]  # 20 parameters, 32 FLOPs, one layer


@pytest.mark.parametrize(
    "limits, sizes, fires, allows",
    [
        ({"parameters": 100}, {"parameters": 80}, True, True),
        ({"parameters": 100}, {"parameters": 81}, True, False),
        ({"parameters": 100}, {"parameters": 100}, False, False),
        ({"flops": 100}, {"flops": 68}, True, True),
        ({"flops": 100}, {"flops": 69}, True, False),
        ({"depth": 4}, {"depth": 3}, True, True),
        ({"depth": 4}, {"depth": 4}, False, False),
        ({"depth": 9, "parameters": 100}, {"depth": 3, "parameters": 81}, True, False),
    ],
)
def test_budget(limits, sizes, fires, allows):
    budget, context = Limit(**limits), TriggerContext(1, sizes=sizes)
    assert (budget.fires(context), budget.allows(site(), context)) == (fires, allows)


def test_limits_bind_the_side_they_were_combined_with():
    context = TriggerContext(4, growths=2, sizes={"parameters": 95})
    both = Every(2) & Limit(parameters=100)
    assert both.fires(context) and not both.allows(site(), context)
    either = Every(2) & Limit(parameters=100) | At(4)
    assert either.fires(context) and either.allows(site(), context)  # At(4) has no budget
    late = Every(2) & Limit(parameters=100) | At(5)
    assert late.fires(context) and not late.allows(site(), context)
    assert not (Every(1) & Limit(growths=2)).allows(site(), context)


def test_a_trigger_goes_on_from_its_state():
    metrics = [5, 4, 4, 4, 3, 3, 3, 3]
    whole = firing(Plateau(3) | Plateau(2, mode="max"), metrics, 8, growths=[0] * 8)
    first, second = Plateau(3) | Plateau(2, mode="max"), Plateau(3) | Plateau(2, mode="max")
    split = [first.fires(TriggerContext(c, m)) for c, m in enumerate(metrics[:3], 1)]
    second.load_state_dict(first.state_dict())
    split += [second.fires(TriggerContext(c, m)) for c, m in enumerate(metrics[3:], 4)]
    reference = Plateau(3) | Plateau(2, mode="max")
    assert split == [reference.fires(TriggerContext(c, m)) for c, m in enumerate(metrics, 1)]
    assert whole


def test_a_trigger_of_ones_own_combines_too():
    class Odd(Trigger):
        def fires(self, context):
            return context.call % 2 == 1

    assert firing(Odd() & Limit(growths=2)) == [1, 3]


def test_a_trigger_of_ones_own_without_its_question_is_told():
    with pytest.raises(NotImplementedError, match=r"Mute must define fires\(self, context\)"):
        type("Mute", (Trigger,), {})().fires(TriggerContext(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: At(), lambda: At(0), lambda: At(1.5), lambda: Every(0), lambda: Every("3"), lambda: Plateau(0),
        lambda: Plateau(2, mode="best"), lambda: Limit(growths=0), lambda: Limit(), lambda: Limit(depth=0),
    ],
)  # fmt: skip
def test_senseless_triggers_are_refused(make):
    with pytest.raises(ValueError, match=r"must be .*, got|needs .*, got none"):
        make()


def test_only_triggers_combine():
    with pytest.raises(TypeError, match="another trigger"):
        Every(3) & 5
    assert (
        repr(Every(3) & Limit(growths=2) | Limit(parameters=5000))
        == "((Every(3) & Limit(growths=2)) | Limit(parameters=5,000))"
    )
