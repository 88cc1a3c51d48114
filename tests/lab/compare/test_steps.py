"""Replayed steps: equal to ordinary ones to the bit, and left out wherever that is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, AdamW

from sensli import find_sites, insert
from sensli_lab.compare import steps
from sensli_lab.compare.steps import ReplayedSteps, record_passes

X, Y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))


def grown(form: str) -> nn.Module:
    """With a layer of this form that has left its start, and a parameter that nothing uses."""
    model = network()
    insert(model, find_sites(model, X[:1], form=form)[1])
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    return model


def trained(model: nn.Module, optimizer: Any, replays: bool, count: int = 90, batches: bool = False) -> tuple[Any, ...]:
    """Losses, values and states after steps with a rate that changes; whether passes and updates were replayed."""
    taking = ReplayedSteps(model, optimizer, cross_entropy, constant=not batches)
    losses = []
    for step in range(count):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
        batch = (X[step % 20 : step % 20 + 8], Y[step % 20 : step % 20 + 8]) if batches else (X, Y)
        losses.append(taking.take(*batch) if replays else taking._ordinary(*batch))
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*losses, *model.parameters(), *states], taking._passes is not None, taking._parts is not None


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: Adam(p, lr=0.01)])
@pytest.mark.parametrize(
    "model", [network, *(lambda form=form: grown(form) for form in ("relu", "residual", "parametric"))]
)
def test_replayed_steps_are_ordinary_ones_to_the_bit(model: Callable[[], nn.Module], make: Callable[..., Any]) -> None:
    results = [trained(one, make(one.parameters()), replays) for replays in (True, False) for one in [model()]]
    assert results[0][1:] == (True, True) and results[1][1:] == (False, False)
    assert len(results[0][0]) == len(results[1][0])
    assert all(torch.equal(one, other) for one, other in zip(results[0][0], results[1][0], strict=True))


def test_batches_of_each_step_are_replayed_too() -> None:
    results = [
        trained(one, Adam(one.parameters()), replays, batches=True) for replays in (True, False) for one in [network()]
    ]
    assert results[0][1:] == (True, True)
    assert all(torch.equal(one, other) for one, other in zip(results[0][0], results[1][0], strict=True))


def test_parameters_of_unequal_age_and_of_several_groups_take_their_own_steps() -> None:
    def run(replays: bool) -> tuple[Any, ...]:
        model = network()
        optimizer = Adam(model[0].parameters(), lr=0.01)  # type: ignore[index]
        trained(model, optimizer, False, count=5)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.03, "betas": (0.8, 0.9)})  # type: ignore[index]
        optimizer.param_groups[0]["params"] += list(model[4].parameters())  # type: ignore[index]
        return trained(model, optimizer, replays)

    quick, slow = run(True), run(False)
    assert quick[1:] == (True, True)
    assert all(torch.equal(one, other) for one, other in zip(quick[0], slow[0], strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9),
        lambda p: SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: AdamW(p, lr=0.01),
        lambda p: Adam(p, lr=0.01, amsgrad=True),
        lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    ],
)  # fmt: skip
def test_another_optimizer_takes_its_own_step_on_replayed_gradients(make: Callable[..., Any]) -> None:
    results = [
        trained(one, make(one.parameters()), replays, count=9) for replays in (True, False) for one in [network()]
    ]
    assert results[0][1:] == (True, False)
    assert all(torch.equal(one, other) for one, other in zip(results[0][0], results[1][0], strict=True))


def test_what_hangs_on_the_steps_of_an_optimizer_is_called_with_fresh_gradients() -> None:
    def run(replays: bool) -> tuple[Any, ...]:
        model = network()
        optimizer = SGD(model.parameters(), lr=0.1)

        def decay(optimizer: Any, args: Any, kwargs: Any) -> None:
            for parameter in model.parameters():
                parameter.grad = parameter.grad + 0.1 * parameter.detach()

        def shorten(optimizer: Any, args: Any, kwargs: Any) -> None:
            model[0].weight.data *= 0.999  # type: ignore[index,operator]

        optimizer.register_step_pre_hook(decay)
        optimizer.register_step_post_hook(shorten)
        return trained(model, optimizer, replays)

    quick, slow = run(True), run(False)
    assert quick[1:] == (True, True)
    assert all(torch.equal(one, other) for one, other in zip(quick[0], slow[0], strict=True))


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: Adam(p, lr=0.01), lambda p: AdamW(p, lr=0.01)])
@pytest.mark.parametrize("warmup", [3, 40])  # over when updates are compared, and long after
def test_a_warm_up_counts_replayed_steps_as_others(warmup: int, make: Callable[..., Any]) -> None:
    def run(replays: bool) -> tuple[Any, ...]:
        model = network()
        optimizer = make(model.parameters())
        trained(model, optimizer, False, count=5)
        insert(model, find_sites(model, X[:1])[1], optimizer=optimizer, warmup=warmup)
        insert(model, find_sites(model, X[:1], what="units", units=2)[0], optimizer=optimizer, warmup=warmup + 5)
        first = trained(model, optimizer, replays, count=30)
        trained(model, optimizer, replays, count=30)
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        return first

    quick, slow = run(True), run(False)
    assert quick[1:] == (True, not isinstance(make([nn.Parameter(torch.zeros(1))]), AdamW))
    assert all(torch.equal(one, other) for one, other in zip(quick[0], slow[0], strict=True))


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def _hooked() -> nn.Module:
    model = network()
    model[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Linear(3, 2), Deciding()),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.RReLU()),
        _hooked,
    ],
)  # fmt: skip
def test_what_may_differ_from_step_to_step_is_not_recorded(model: Callable[[], nn.Module]) -> None:
    assert record_passes(model(), cross_entropy, (X, Y), constant=True) is None
    torch.manual_seed(0)
    one = model()
    results, passes, _ = trained(one, SGD(one.parameters(), lr=0.1), True, count=3)
    assert not passes and len(results) >= 5


def test_passes_that_differ_by_a_bit_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = steps.record_passes

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = wrong(*args, **kwargs)
        assert found is not None
        found._calls.append((torch.Tensor.mul_, (found.gradients[0], 1 + 2e-7), {}))
        return found

    monkeypatch.setattr(steps, "record_passes", changed)
    model = network()
    assert trained(model, SGD(model.parameters(), lr=0.1), True, count=3)[1:] == (False, False)


def test_an_update_that_differs_by_a_bit_is_left_to_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensli_lab.compare.steps.UpdatePart.step", lambda part: part.parameters[0].data.mul_(1 + 2e-7))
    model = network()
    assert trained(model, SGD(model.parameters(), lr=0.1), True, count=3)[1:] == (True, False)


def test_a_regression_is_replayed() -> None:
    model, target = network(), torch.randn(40, 2, generator=torch.Generator().manual_seed(3))
    passes = record_passes(model, mse_loss, (X, target), constant=True)
    assert passes is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    passes.replay(X, target)
    loss = mse_loss(model(X), target)
    assert torch.equal(loss, passes.loss)
    assert all(map(torch.equal, torch.autograd.grad(loss, list(model.parameters())), passes.gradients))
