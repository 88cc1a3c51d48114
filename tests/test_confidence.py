"""The early stop: an estimate that noise does not bias, an error rate below what was allowed, and no cost in exactness."""

import math
import random

import pytest
import torch
from torch import nn

from models import deep, fnn, labels, loss_fn, points, untouched
from sensli import find_sites, measure
from sensli.confidence import is_clear, mean_and_error, next_look, pseudo_values, student_tail


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
        values = pseudo_values(merit, sizes)
        estimates.append(sum(values) / len(values))
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


def test_unanimous_values_are_clear_and_equal_ones_are_not():
    assert is_clear([[2.0] * 4, [1.0] * 4], look=1, confidence=0.99, remaining=1.0)
    assert not is_clear([[1.0] * 4, [1.0] * 4], look=1, confidence=0.99, remaining=1.0)
    assert not is_clear([[-1.0] * 4, [-2.0] * 4], look=1, confidence=0.5, remaining=1.0)
    assert is_clear([[1.0, 1.1, 0.9]], look=1, confidence=0.99, remaining=1.0)  # a single site has no rival


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_the_error_rate_over_many_decisions_is_below_what_was_allowed(confidence):
    """Two sites of nearly equal merit and much noise, looked at again and again: the hard case for repeated looks."""
    generator = torch.Generator().manual_seed(2)
    true = torch.zeros(2, 3, dtype=torch.float64)
    true[:, 0] = torch.tensor([0.5, 0.45])  # site 0 is the better one, by a little; site 1 has the more noise
    noise = torch.tensor([0.4, 0.8], dtype=torch.float64)[:, None]
    wrong = decided = 0
    runs = 400
    for _ in range(runs):
        sums, sizes, look, count = torch.zeros(16, 2, 3, dtype=torch.float64), [0.0] * 16, 0, 0
        while count < 96:
            draw = true + noise * torch.randn(2, 3, generator=generator, dtype=torch.float64)
            sums[count % 16] += draw
            sizes[count % 16] += 1
            count += 1
            if count < 4 or next_look(count - 1) != count:
                continue
            look += 1
            kept = sizes[:count]
            pseudo = [pseudo_values(merit_of(sums[:count, site], kept), kept) for site in range(2)]
            if is_clear(pseudo, look=look, confidence=confidence, remaining=1.0):
                decided += 1
                wrong += sum(pseudo[1]) > sum(pseudo[0])
                break
    assert wrong / runs <= 1 - confidence
    assert decided > 0


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
    model, given = lopsided(), data(200, 0.1, size=32)
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
    model, given = fnn(), [(points(), labels()) for _ in range(count)]
    sites = find_sites(model, points())
    exact = measure(model, sites, given, loss_fn)
    sampled = measure(model, sites, loader(given), loss_fn, confidence=1 - 1e-9)
    assert (sampled.clear, sampled.batches) == (False, count)
    assert [(m.value, m.ratio) for m in sampled] == [(m.value, m.ratio) for m in exact]
    assert "not clear" in str(sampled) and exact.clear is None


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
