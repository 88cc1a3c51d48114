"""A pass whose graph nobody goes back through saves nothing for that, and gives what it would have given."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sensli import find_sites, measure
from sensli.modules.copies import without_saving
from sensli.moves.width import replica
from tests.helpers.memory import peak


def test_what_operations_would_save_is_let_go() -> None:
    x = torch.randn(4, requires_grad=True)
    seen: list[weakref.ref[Tensor]] = []

    def work() -> Tensor:
        between = x.exp()  # saved by its own backward, and by that of the square
        seen.append(weakref.ref(between))
        return between.square()

    def is_alive(unless: bool) -> bool:
        result = without_saving(work, unless=unless)
        assert result.grad_fn is not None and torch.equal(result, x.exp().square())
        return seen.pop()() is not None

    assert is_alive(unless=True) and not is_alive(unless=False)


@pytest.mark.parametrize("swallows", [False, True])
def test_work_that_takes_a_gradient_is_done_again(swallows: bool) -> None:
    x, runs = torch.randn(4, requires_grad=True), []

    def work() -> Tensor:
        runs.append(None)
        try:
            return torch.autograd.grad(x.pow(3).sum(), x)[0]
        except RuntimeError:
            if swallows:
                return torch.zeros(4)
            raise

    assert torch.equal(without_saving(work), 3 * x.detach().square()) and len(runs) == 2
    assert torch.equal(without_saving(work, unless=True), 3 * x.detach().square()) and len(runs) == 3


def test_other_failures_go_through_at_once() -> None:
    runs = []

    def work() -> None:
        runs.append(None)
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"):
        without_saving(work)
    assert len(runs) == 1


class _WithForce(nn.Module):
    """Takes a gradient of its input itself, and draws: both are the same when the code runs once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(place.pow(4).sum(), place)
        units = (self.first(torch.cat([x, force], 1)) + 0.1 * torch.rand(1)).tanh()
        return self.second(units)


def test_units_of_a_model_that_takes_a_gradient_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, y = _WithForce().double(), torch.randn(5, 3).double(), torch.randn(5, 1).double()
    found = []
    for saves in (False, True):
        if saves:
            monkeypatch.setattr(replica, "without_saving", lambda work, **_: work())
        torch.manual_seed(1)  # the model draws
        (site,) = find_sites(model, x, what="units", units=2, init="random")
        (merit,) = measure(model, [site], [(x, y)], mse_loss, norm="frobenius", ratio=False)
        found.append(merit.value)
    assert found[0] == found[1] > 0


class _Ramp(nn.Module):
    """Counts its passes; its units are read three times as large from the fourth on."""

    def __init__(self, takes_gradients: bool) -> None:
        super().__init__()
        self.first, self.second, self.takes_gradients = nn.Linear(6, 8), nn.Linear(8, 1), takes_gradients
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1  # type: ignore[operator, has-type]
        force = 3 * x.square()
        if self.takes_gradients:
            with torch.enable_grad():
                place = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(place.pow(3).sum(), place)
        units = (self.first(x + 0.1 * force)).tanh()
        return self.second(units if self.passes < 4 else 3 * units)


def test_what_a_model_counts_is_counted_once_where_its_code_runs_again() -> None:
    found = []
    for takes_gradients in (False, True):
        torch.manual_seed(0)
        model, x, y = _Ramp(takes_gradients).double(), torch.randn(5, 6).double(), torch.randn(5, 1).double()
        (site,) = find_sites(model, x, what="units", init="random")
        (merit,) = measure(model, [site], [(x, y), (x.flip(0), y), (-x, y)], mse_loss, norm="frobenius", ratio=False)
        found.append(merit.value)
    assert found[0] == pytest.approx(found[1], rel=1e-12) and found[0] > 0


def test_a_search_for_units_holds_few_activations() -> None:
    count, batch = 40, 4096
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Tanh() for _ in range(count)), nn.Linear(8, 2))
    most = peak(lambda: find_sites(model, torch.randn(batch, 8), what="units"))
    assert most < 1.6 * count * batch * 8 * 4, most / (count * batch * 8 * 4)
