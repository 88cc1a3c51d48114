"""The front and its ratio on curves made by hand."""

from __future__ import annotations

import math

import pytest

from sensli_lab.compare.front import LossCurve, front_at, front_ratios

SMALL = LossCurve((0.0, 10.0, 20.0, 100.0), (8.0, 4.0, 3.0, 2.5))
LARGE = LossCurve((0.0, 40.0, 80.0, 100.0), (8.0, 4.0, 1.0, 0.5))


def test_a_level_is_reached_on_the_line_between_two_points() -> None:
    assert SMALL.reached(4.0) == 10.0 and SMALL.reached(3.5) == 15.0 and SMALL.reached(9.0) == 0.0
    assert SMALL.reached(2.0) == math.inf


def test_a_level_counts_when_it_is_reached_first() -> None:
    assert LossCurve((0.0, 10.0, 20.0, 30.0), (4.0, 2.0, 3.0, 1.0)).reached(2.5) == 7.5


def test_the_front_is_the_best_of_all_so_far() -> None:
    assert front_at([SMALL, LARGE], 10.0) == 4.0 and front_at([SMALL, LARGE], 80.0) == 1.0
    assert front_at([SMALL, LARGE], 15.0) == 3.5
    assert front_at([LossCurve((0.0, 10.0, 20.0), (4.0, 2.0, 3.0))], 20.0) == 2.0


def test_a_run_that_is_the_front_has_the_ratio_one() -> None:
    both = front_ratios(LARGE, [LARGE])
    assert both.end == both.worst == pytest.approx(1.0) == both.mean


def test_a_run_that_takes_twice_as_long_has_the_ratio_two() -> None:
    slow = LossCurve(tuple(2 * flops for flops in LARGE.flops), LARGE.losses)
    ratios = front_ratios(slow, [LARGE])
    assert ratios.end == ratios.worst == pytest.approx(2.0) and ratios.mean == pytest.approx(2.0)
    fast = front_ratios(LARGE, [slow])
    assert fast.end == pytest.approx(0.5) and fast.worst < 1


def test_the_end_is_the_lowest_loss_that_both_reached() -> None:
    # it stops at 2: there the large network needed 80 - 40 / 3 FLOPs
    grown = LossCurve((0.0, 10.0, 100.0), (8.0, 4.0, 2.0))
    ratios = front_ratios(grown, [SMALL, LARGE])
    assert ratios.end == pytest.approx(100 / (40 + 40 * 2 / 3))
    # at 3 the small network needed 20 and this run 55
    assert ratios.worst == pytest.approx(55 / 20, rel=0.05)
    # one that is better than all fixed networks is compared where those end
    better = front_ratios(LossCurve((0.0, 50.0, 100.0), (8.0, 0.5, 0.1)), [SMALL, LARGE])
    assert better.end == pytest.approx(0.5)


def test_a_curve_that_diverges_is_compared_by_what_it_reached() -> None:
    ratios = front_ratios(LossCurve((0.0, 20.0, 100.0), (8.0, 4.0, math.nan)), [SMALL])
    assert ratios.end == pytest.approx(2.0)


def test_nothing_that_was_reached_at_once_divides_by_zero() -> None:
    ratios = front_ratios(LossCurve((0.0, 100.0), (1.0, 2.0)), [LossCurve((0.0, 100.0), (1.0, 2.0))])
    assert ratios.end == 1.0
