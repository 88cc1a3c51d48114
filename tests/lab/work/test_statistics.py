"""Intervals and verdicts."""

from __future__ import annotations

import pytest
import torch

from sensli_lab.work.statistics import band, compare_pairs, format_number, interval, overall_verdict, smooth, t_quantile


@pytest.mark.parametrize(
    ("degrees", "value"),
    [
        (1, 12.70620),
        (4, 2.77645),
        (5, 2.57058),
        (6, 2.44691),
        (9, 2.26216),
        (29, 2.04523),
        (39, 2.02269),
        (999, 1.96234),
    ],
)
def test_student_quantiles(degrees, value):
    assert t_quantile(degrees) == pytest.approx(value, abs=1e-5)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(4000, 8, generator=generator)
    hits = sum(interval(row).low < 0 < interval(row).high for row in samples)
    assert 0.94 < hits / 4000 < 0.96


@pytest.mark.parametrize(("shift", "verdict"), [(-1.0, "confirmed"), (1.0, "opposite"), (0.0, "not confirmed")])
def test_verdicts(shift, verdict):
    second = torch.arange(10.0)
    first = second + shift + 0.1 * torch.tensor([1.0, -1.0] * 5)
    pair = compare_pairs(first, second)
    assert pair.verdict() == verdict
    assert pair.difference.mean == pytest.approx(shift, abs=1e-6)


def test_one_run_has_no_verdict():
    pair = compare_pairs(torch.tensor([0.0]), torch.tensor([1.0]))
    assert pair.verdict() == "not confirmed" and "one run" in str(pair.difference)


def test_a_run_that_diverged_is_not_hidden():
    pair = compare_pairs(torch.tensor([0.0, float("nan")]), torch.tensor([1.0, 1.0]))
    assert pair.verdict() == "not confirmed"


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (["confirmed", "awaiting"], "confirmed"),
        (["confirmed", "opposite"], "confirmed in part"),
        (["not confirmed", "opposite"], "not confirmed"),
        (["opposite", "opposite"], "opposite"),
        (["awaiting"], "awaiting"),
    ],
)
def test_the_verdict_of_a_claim(parts, whole):
    assert overall_verdict(parts) == whole


def test_smoothing_is_a_moving_average_of_what_came_before():
    curve = torch.tensor([[1.0, 3.0, 5.0, 7.0]])
    assert smooth(curve, 2).tolist() == [[1.0, 2.0, 4.0, 6.0]]
    assert torch.equal(smooth(curve, 1), curve)


def test_bands_and_numbers():
    mean, half = band(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    assert mean.tolist() == [2.0, 2.0] and half[1] == 0 and half[0] > 1
    assert [format_number(value) for value in (0.1234, 12.34, 1234.0, 0.0001, 0.0)] == [
        "0.123",
        "12.3",
        "1234",
        "1.0e-04",
        "0.000",
    ]
