"""`Probe` rides on the user's own step: the same merits, the same gradients, no trace."""

import copy

import pytest
import torch
from torch import nn

from models import Named, alive, batches, cnn, deep, fnn, images, labels, loss_fn, points, snapshot, untouched
from sensli import Probe, find_sites, grow, measure, undo
from sensli.errors import MeasurementError

MODELS = {
    "fnn": (fnn, points, {}),
    "named": (Named, points, {}),
    "tanh": (lambda: fnn(nn.Tanh), points, {}),
    "cnn": (cnn, images, {}),
    "parametric": (lambda: fnn(nn.GELU), points, {"form": "parametric"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_probe_equals_measure_and_the_step_is_the_same_to_the_bit(name):
    make, data, options = MODELS[name]
    model = make()
    plain = copy.deepcopy(model)
    x, y = data(6), labels(6)
    sites = find_sites(model, x, **options)
    measured = measure(model, sites, [(x, y)], loss_fn)
    with Probe(model, sites) as probe:
        loss = loss_fn(model(x), y)
        loss.backward()
    plain_loss = loss_fn(plain(x), y)
    plain_loss.backward()
    merits = probe.merits()
    assert [m.value for m in merits] == pytest.approx([m.value for m in measured], rel=1e-12)
    assert [m.ratio for m in merits] == pytest.approx([m.ratio for m in measured], rel=1e-12)
    assert merits.norm == measured.norm and [m.dead for m in merits] == [m.dead for m in measured]
    assert torch.equal(loss, plain_loss)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_accumulation_over_batches_means_the_same_as_for_grad():
    model, data = fnn(), batches((6, 6, 3))
    sites, total = find_sites(model, points()), sum(len(y) for _, y in data)
    with Probe(model, sites) as probe:
        for x, y in data:
            (loss_fn(model(x), y) * len(y) / total).backward()
    measured = measure(model, sites, data, loss_fn)
    assert [m.value for m in probe.merits()] == pytest.approx([m.value for m in measured], rel=1e-12)
    assert [m.ratio for m in probe.merits()] == pytest.approx([m.ratio for m in measured], rel=1e-12)
    assert probe.merits().batches == 3


def test_clearing_gradients_between_passes_does_not_reach_the_probe():
    model, (x, y) = fnn(), batches((6,))[0]
    sites = find_sites(model, points())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Probe(model, sites) as probe:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            (loss_fn(model(x), y) / 3).backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad.mul_(7)  # clipping and the like
    measured = measure(model, sites, [(x, y)], loss_fn)
    assert [m.ratio for m in probe.merits()] == pytest.approx([m.ratio for m in measured], rel=1e-12)


def test_evaluation_inside_the_context_counts_nothing():
    model, (x, y) = fnn(), batches((6,))[0]
    sites = find_sites(model, points())
    with Probe(model, sites, ratio=False) as probe:
        loss_fn(model(x), y).backward()
        with torch.no_grad():
            model(points())
        loss_fn(model(points()), y)  # never goes back
    assert [m.value for m in probe.merits()] == [m.value for m in measure(model, sites, [(x, y)], loss_fn)]
    assert probe.merits()[0].ratio is None


def test_a_backward_pass_after_the_context_counts_nothing():
    model, (x, y) = fnn(), batches((6,))[0]
    with Probe(model, find_sites(model, points())) as probe:
        loss = loss_fn(model(x), y)
    loss.backward()
    with pytest.raises(MeasurementError, match="saw no backward pass"):
        probe.merits()


def test_frozen_front_and_a_weight_frozen_later():
    model, (x, y) = fnn(), batches((6,))[0]
    model[0].requires_grad_(False)
    sites = find_sites(model, points())
    measured = measure(model, sites, [(x, y)], loss_fn)
    probe = Probe(model, sites)
    model[2].weight.requires_grad_(False)
    with probe:
        loss_fn(model(x), y).backward()
    assert [m.value for m in probe.merits()] == pytest.approx([m.value for m in measured], rel=1e-12)
    assert model[0].weight.grad is None


def test_double_backward_leaves_no_graph_behind():
    model, (x, y) = alive(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), batches((6,))[0]
    sites = find_sites(model, points())
    with Probe(model, sites) as probe:
        torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()), create_graph=True)
    assert not probe._catch.sites[0].sums["gradient"].total().requires_grad
    assert probe.merits()[0].value == pytest.approx(measure(model, sites, [(x, y)], loss_fn)[0].value, rel=1e-12)


def test_no_hook_survives_whatever_happens_inside():
    model, (x, y) = fnn(), batches((6,))[0]
    sites = find_sites(model, points())
    before = snapshot(model)["hooks"]
    with pytest.raises(RuntimeError, match="mine"), Probe(model, sites):
        raise RuntimeError("mine")
    with pytest.raises(RuntimeError), Probe(model, sites):
        model(torch.zeros(2, 9, dtype=torch.float64))
    probe = Probe(model, sites)
    with probe, pytest.raises(MeasurementError, match="open already"):
        probe.__enter__()
    with probe:  # usable again, and it goes on counting
        loss_fn(model(x), y).backward()
    assert snapshot(model)["hooks"] == before and not any(p._backward_hooks for p in model.parameters())


def test_making_a_probe_touches_nothing():
    model = cnn(norm=True)
    sites = find_sites(model, images())
    with untouched(model):
        Probe(model, sites)
        with Probe(model, sites):
            pass


@pytest.mark.parametrize("kind", ["layers", "units"])
def test_a_probe_of_a_model_that_has_changed_since_is_refused(kind: str) -> None:
    """In somebody's own training step: before a hook is set, and not as an error in the backward pass."""
    model = deep()
    growth = grow(model, find_sites(model, points(2), what="units", units=2)[0])
    probe = Probe(model, find_sites(model, points(2), what=kind))
    undo(model, growth)
    with pytest.raises(MeasurementError, match="has grown or shrunk since this probe was made"), probe:
        pass
    model(points(4)).sum().backward()
