"""The early stop: an estimate that noise does not bias, an error rate below what was allowed, and no cost in exactness."""

import math
import random

import pytest
import torch
from torch import nn

from models import deep, fnn, labels, loss_fn, points, untouched
from sensli import find_sites, measure
from sensli.merits.confidence import Estimate, estimate, is_clear, mean_and_error, next_look, student_tail


@pytest.mark.parametrize(
    "freedom, t, tail",
    [  # the usual table of Student's distribution, one-sided
        (1, 1.0, 0.25), (1, 6.313752, 0.05), (1, 318.308839, 0.001), (2, 2.919986, 0.05), (2, 6.964557, 0.01),
        (3, 2.353363, 0.05), (3, 10.214532, 0.001), (5, 2.015048, 0.05), (10, 2.763769, 0.01), (15, 1.753050, 0.05),
        (15, 3.732834, 0.001), (30, 2.457262, 0.01), (100, 1.660234, 0.05), (7, 0.0, 0.5),
    ],
)  # fmt: skip
def test_student_tail_has_the_known_values(freedom, t, tail):
    assert student_tail(t, freedom) == pytest.approx(tail, rel=2e-6)


def test_looks_are_few_and_spread():
    looks, count = [], 0
    while count < 1000:
        count = next_look(count)
        looks.append(count)
    assert looks == [4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]


def merit_of(sums, sizes):
    """The squared norm of the mean of all groups or all but one, from their sums (groups x entries), as a function."""
    total = sums.sum(0)
    whole = (total / sum(sizes)).square().sum().item()
    left = total - sums
    without = (left / (sum(sizes) - torch.tensor(sizes, dtype=sums.dtype))[:, None]).square().sum(1).tolist()
    return lambda j: whole if j is None else without[j]


@pytest.mark.parametrize("sizes", [[1.0] * 6, [2.0, 2.0, 2.0, 1.0, 1.0, 0.5]])
def test_the_jackknife_is_unbiased_where_the_plain_estimate_is_not(sizes):
    generator = torch.Generator().manual_seed(1)
    truth, estimates, plain = torch.tensor([0.5, -0.5, 0.2, 0.0]).double(), [], []
    for _ in range(2000):
        # the sum over a group of s batches: its mean has s times less variance
        scale = torch.tensor(sizes, dtype=torch.float64)[:, None]
        sums = scale * truth + scale.sqrt() * torch.randn(len(sizes), 4, generator=generator, dtype=torch.float64)
        merit = merit_of(sums, sizes)
        estimates.append(estimate(merit, sizes).value)
        plain.append(merit(None))
    exact = truth.square().sum().item()
    error = torch.tensor(estimates).std().item() / math.sqrt(len(estimates))
    assert abs(sum(estimates) / len(estimates) - exact) < 3 * error
    bias = 4 / sum(sizes)  # the variance of the mean, summed over the four entries
    assert sum(plain) / len(plain) == pytest.approx(exact + bias, abs=5 * error)
    assert bias > 10 * error


def test_nothing_remains_no_error():
    assert mean_and_error([1.0, 2.0, 3.0], remaining=0.0) == (2.0, 0.0)
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))


def test_a_sample_estimates_what_the_whole_data_will_give():
    """Of 40 batches, 20 seen: the full pass keeps half of the noise of the sample, and so must the estimate."""
    generator = torch.Generator().manual_seed(4)
    given = torch.tensor([0.3, -0.2, 0.1]).double() + torch.randn(40, 3, generator=generator, dtype=torch.float64)
    exact, estimates, sizes = given.mean(0).square().sum().item(), [], [2.0] * 10
    for _ in range(4000):
        drawn = given[torch.randperm(40, generator=generator)[:20]].view(10, 2, 3).sum(1)
        estimates.append(estimate(merit_of(drawn, sizes), sizes, remaining=0.5).value)
    error = torch.tensor(estimates).std().item() / math.sqrt(len(estimates))
    assert sum(estimates) / len(estimates) == pytest.approx(exact, abs=3 * error)
    assert error < 0.02 * exact


def same(value, groups=4):
    return Estimate(value, (value,) * groups)


def clear(*sites, confidence=0.99, **more):
    return is_clear(sites, [1.0] * len(sites[0].without), look=1, confidence=confidence, **more)


def test_unanimous_values_are_clear_and_equal_ones_are_not():
    assert clear(same(2.0), same(1.0))
    assert not clear(same(1.0), same(1.0))
    assert not clear(same(-1.0), same(-2.0), confidence=0.5)
    assert clear(same(1.0), same(0.0))  # a dead site has no logarithm, and is no rival
    assert clear(Estimate(1.0, (1.0, 1.1, 0.9)))  # a single site has none


def test_what_all_sites_have_in_common_cancels():
    """One batch in four nearly doubles all merits: the difference swings, the quotient does not."""
    swing = (2.0, 2.2, 1.9, 1.1)
    ahead = Estimate(2.0, swing)
    assert clear(ahead, Estimate(1.0, tuple(value / 2 * (1 + 0.001 * k) for k, value in enumerate(swing))))
    assert not clear(ahead, Estimate(1.0, (1.0, 0.6, 1.7, 1.0)))


def test_a_tolerance_settles_what_is_level():
    level = Estimate(1.0, (1.0, 1.001, 0.999, 1.0)), Estimate(0.999, (0.999, 0.998, 1.0, 0.999))
    assert not clear(*level) and not clear(*level, tolerance=0.001)
    assert clear(*level, tolerance=0.1)
    negative = Estimate(1.0, (1.0, 1.01, 0.99, 1.0)), Estimate(0.5, (0.5, -0.1, 0.5, 0.6))  # by the difference
    assert not clear(*negative) and clear(*negative, tolerance=0.99)


def decisions(true, noise, confidence, tolerance, spread=0.0, runs=400):
    """Of so many samples of batches: how many led to a decision, and how many to site 1."""
    generator = torch.Generator().manual_seed(2)
    decided = second = 0
    for _ in range(runs):
        sums, sizes, look, count = torch.zeros(16, *true.shape, dtype=torch.float64), [0.0] * 16, 0, 0
        while count < 96:
            draw = true + noise * torch.randn(true.shape, generator=generator, dtype=torch.float64)
            draw *= math.exp(spread * torch.randn((), generator=generator).item())
            sums[count % 16] += draw
            sizes[count % 16] += 1
            count += 1
            if count < 4 or next_look(count - 1) != count:
                continue
            look += 1
            kept = sizes[:count]
            sites = [estimate(merit_of(sums[:count, site], kept), kept) for site in range(2)]
            if is_clear(sites, kept, look=look, confidence=confidence, tolerance=tolerance):
                decided += 1
                second += sites[1].value > sites[0].value
                break
    return decided / runs, second / runs


@pytest.mark.slow
@pytest.mark.parametrize(("confidence", "tolerance"), [(0.9, 0.1), pytest.param(0.99, 0.0, marks=pytest.mark.thorough)])
def test_the_error_rate_over_many_decisions_is_below_what_was_allowed(confidence, tolerance):
    """Two sites of nearly equal merit and much noise, looked at again and again: the hard case for repeated looks."""
    true = torch.zeros(2, 3, dtype=torch.float64)
    # site 0 is the better one, by a little more than the tolerance; site 1 has the more noise
    true[:, 0] = torch.tensor([0.5, 0.45]) * torch.tensor([1.0, math.sqrt(1 - tolerance)])
    noise = torch.tensor([0.4, 0.8], dtype=torch.float64)[:, None]
    decided, wrong = decisions(true, noise, confidence, tolerance)
    assert decided > 0 and wrong <= 1 - confidence


@pytest.mark.thorough
def test_batches_that_differ_by_factors_make_it_err_a_few_times_as_often():
    """What the limits page says: no t-test is exact for the few batches of an early look."""
    true = torch.zeros(2, 5, dtype=torch.float64)
    true[:, 0] = 1.0
    noise = torch.tensor([2.0, 0.5], dtype=torch.float64)[:, None]
    decided, _ = decisions(true, noise, 0.99, 0.0, spread=0.7, runs=600)
    assert 0.01 < decided <= 0.035  # all of them are wrong: the two are worth the same


def data(count, noise, seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(size, 3, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [
        (x, ((x[:, 0] + noise * torch.randn(size, generator=generator, dtype=torch.float64)) > 0).long()) for x in xs
    ]


def lopsided():
    """One site far more worthwhile than the others."""
    model = deep(3)
    with torch.no_grad():
        model[0].weight.mul_(4)
        model[2].weight.mul_(0.05)
    return model


def test_a_clear_case_stops_early_and_says_how_many_batches_it_took():
    model, given = lopsided(), data(200, 0.1, size=256)
    sites = find_sites(model, points())
    full = measure(model, sites, given, loss_fn)
    with untouched(model):
        quick = measure(model, sites, given, loss_fn, confidence=0.99)
    assert quick.clear and quick.batches < 40 and quick.best.site == full.best.site
    assert f"over {quick.batches} batches" in str(quick) and "clear at the level 0.99" in str(quick)
    assert quick.best.value == pytest.approx(full.best.value, rel=0.5)
    assert quick.best.ratio == pytest.approx(full.best.ratio, rel=0.5)


@pytest.mark.parametrize("loader", [list, iter], ids=["list", "generator"])
@pytest.mark.parametrize("count", [3, 8, 16, 23, 40])
def test_an_unclear_case_uses_all_batches_and_is_exact_to_the_bit(count, loader):
    model, given = fnn(), data(count, noise=9.0)
    sites = list(find_sites(model, points())) * 2  # each has a rival that is exactly as good
    exact = measure(model, sites, given, loss_fn)
    sampled = measure(model, sites, loader(given), loss_fn, confidence=0.6)
    assert (sampled.clear, sampled.batches) == (False, count)
    assert [(m.value, m.ratio) for m in sampled] == [(m.value, m.ratio) for m in exact]
    assert "not clear" in str(sampled) and exact.clear is None


def test_a_level_that_means_nothing_is_refused():
    model, given = fnn(), data(4, 0.1)
    sites = find_sites(model, points())
    for options, text in (
        ({"confidence": 1.0}, "confidence must be between 0 and 1 .*, got 1.0"),
        ({"confidence": 0.9, "tolerance": 1.0}, "tolerance must be at least 0 and below 1 .*, got 1.0"),
        ({"tolerance": 0.1}, "tolerance=0.1 needs confidence="),
    ):
        with pytest.raises(ValueError, match=text), untouched(model):
            measure(model, sites, given, loss_fn, **options)


def test_the_table_says_what_was_allowed():
    model = lopsided()
    merits = measure(model, find_sites(model, points()), data(200, 0.1), loss_fn, confidence=0.9, tolerance=0.2)
    assert "clear at the level 0.9, 20% allowed" in str(merits)


def test_max_batches_is_no_proof_that_all_was_seen():
    model, given = fnn(), [(points(), labels()) for _ in range(200)]
    sites = find_sites(model, points())
    assert not measure(model, sites, given, loss_fn, confidence=1 - 1e-9, max_batches=8).clear


def test_early_decisions_agree_with_the_full_pass():
    random.seed(0)
    model, given = lopsided(), data(64, 0.5)
    sites = find_sites(model, points())
    best = measure(model, sites, given, loss_fn).best.site
    for _ in range(20):
        random.shuffle(given)
        quick = measure(model, sites, given, loss_fn, confidence=0.95, ratio=False)
        assert quick.best.site == best


def test_a_single_site_is_clear_at_the_first_look():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    merits = measure(model, find_sites(model, points()), data(50, 0.1), loss_fn, confidence=0.99)
    assert (merits.clear, merits.batches) == (True, 4)
