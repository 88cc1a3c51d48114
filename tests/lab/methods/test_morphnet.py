"""MorphNet: the regulariser against its formula, and the three looks: begin, remove, widen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rivals import data, mean_loss, mlp
from sensli import Grower, count_flops, load_checkpoint, save_checkpoint, undo
from sensli.growing.triggers import Every
from sensli_lab.methods.morphnet import EXPAND, REST, SHRINK, THRESHOLD, MorphNet


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 2),
    ).double()  # fmt: skip
    nn.init.uniform_(model[1].weight)
    return model


def growing(model: nn.Module, optimizer: Any, batches: Any, **options: Any) -> Grower:
    return Grower(
        model, optimizer, preset="paper",
            example=batches[0][0], trigger=Every(1), strategy="morphnet", max_factor=None, **{"units": 0.5, **options}
    )  # fmt: skip


def shape_of(model: nn.Module) -> list[int]:
    return [len(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]


def test_the_regulariser_is_part_of_every_gradient_from_the_first_look_to_the_second() -> None:
    """FLOPs of one unit, by hand: a channel of the first layer is 36 positions x 2 x 9 in and 16 positions x 6 x 9 out, twice."""
    model, batches = normed(), data((2, 6, 6), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    grower = growing(model, optimizer, batches)
    assert grower.step(batches, F.cross_entropy) is None and grower.strategy.phase == SHRINK  # type: ignore[attr-defined]
    flops = int(count_flops(model, batches[0][0]))

    def price() -> Tensor:
        first = 2 * (36 * 18 + 16 * 54) / flops * model[1].weight.abs().sum()
        second = 2 * (16 * 36 + 2) / flops * model[3].weight.square().mean((1, 2, 3)).sqrt().sum()
        return first + second

    expected = torch.autograd.grad(mean_loss(model, batches) + price(), list(model.parameters()))
    mean_loss(model, batches).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    for parameter, old, gradient in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(old - parameter, gradient)
    grower.step(batches, F.cross_entropy)  # nothing has become small, so it widens
    assert grower.strategy.phase == REST and shape_of(model) == [6, 9, 2]  # type: ignore[attr-defined]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    mean_loss(model, batches).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    for parameter, old, plain in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(old - parameter, plain)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_regulariser_survives_undo(resumed: bool) -> None:
    """It goes on with the units that the layers have then."""
    model, batches = normed(), data((2, 6, 6), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    grower = growing(model, optimizer, batches)
    for _ in range(3):  # begins, widens, begins again with the larger widths
        optimizer.zero_grad()
        mean_loss(model, batches).backward()
        if not resumed:
            optimizer.step()
        grower.step(batches, F.cross_entropy)
    assert shape_of(model) == [6, 9, 2] and grower.strategy.phase == SHRINK  # type: ignore[attr-defined]
    while grower.history:
        undo(model, grower.history.pop(), optimizer=optimizer)
    if resumed:  # in a state that knows the larger ones alone
        grower.load_state_dict(grower.state_dict())
    flops = grower.strategy.sparsity.flops  # type: ignore[attr-defined]
    costs = [width["move"]["flops"] / width["move"]["more"] for width in grower.strategy.sparsity.watched]  # type: ignore[attr-defined]
    first = costs[0] / flops * model[1].weight.abs().sum()
    second = costs[1] / flops * model[3].weight.square().mean((1, 2, 3)).sqrt().sum()
    expected = torch.autograd.grad(mean_loss(model, batches) + first + second, list(model.parameters()))
    optimizer.zero_grad()
    mean_loss(model, batches).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    for parameter, old, gradient in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(old - parameter, gradient)


def test_the_regulariser_leaves_out_what_is_gone() -> None:
    model, batches = normed(), data((2, 6, 6), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growing(model, optimizer, batches).step(batches, F.cross_entropy)
    model[3], model[7] = nn.Conv2d(4, 5, 3).double(), nn.Linear(5, 2).double()  # of somebody else
    mean_loss(model, batches).backward()
    optimizer.step()


def test_it_removes_small_units_then_widens_alike_and_draws_again() -> None:
    model, batches, told = mlp(), data(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grower = growing(model, optimizer, batches, log=told.append)
    grower.step(batches, F.cross_entropy)
    with torch.no_grad():
        model[0].weight[[1, 3]] *= 0.1 * THRESHOLD
        model[2].weight[:] *= 1e-5  # two units of a layer stay
    start = copy.deepcopy(model)
    grower.step(batches, F.cross_entropy)
    assert shape_of(model) == [3, 2, 3] and grower.strategy.phase == EXPAND  # type: ignore[attr-defined]
    assert torch.equal(model[0].weight, start[0].weight[[0, 2, 4]])
    largest = start[2].weight.norm(dim=1).topk(2).indices.sort().values
    assert torch.equal(model[2].weight, start[2].weight[largest][:, [0, 2, 4]])
    shrunk = copy.deepcopy(model)
    grower.step(batches, F.cross_entropy)
    assert shape_of(model) == [5, 3, 3] and len(grower.history) == 4  # 3 + 1.5 is 5
    assert (
        "not kept" in str(told[1])
        and ": -2 dead units in 0" in str(told[1])
        and "-2" in str(told[1]).split("FLOPs")[0].split(",")[-1]
    )
    assert "widened all layers alike" in told[2].reason
    assert not told[0].growths
    for index, parts in (
        (0, (slice(0, 3), slice(0, 4))),
        (2, (slice(0, 2), slice(0, 3))),
        (4, (slice(0, 3), slice(0, 2))),
    ):
        old, new = shrunk[index].weight, model[index].weight
        assert old.shape == new[parts].shape and (new[parts] != old).all()
        assert (new.abs() <= old[0].numel() ** -0.5).all()
    assert torch.equal(model[0].bias, torch.zeros(5).double())
    for growth in reversed(grower.history):
        undo(model, growth, optimizer=optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, start.state_dict()[name]), name


def test_units_become_sparse() -> None:
    batches, found = data(), {}
    for strategy in ("morphnet", "net2net"):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        grower = Grower(
            model, optimizer, preset="paper", example=batches[0][0], trigger=Every(1), max_factor=None,
            **({"strategy": "morphnet"} if strategy == "morphnet" else {"tau": 1e9}),
        )  # fmt: skip
        grower.step(batches, F.cross_entropy)
        for _ in range(150):
            optimizer.zero_grad()
            mean_loss(model, batches).backward()
            optimizer.step()
        found[strategy] = sum(int((model[i].weight.square().mean(1).sqrt() < 0.1).sum()) for i in (0, 2))
    assert found["morphnet"] > found["net2net"]


def test_the_regulariser_survives_a_checkpoint(tmp_path: Path) -> None:
    batches = data()

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        mean_loss(model, batches).backward()
        optimizer.step()

    model = mlp()
    optimizer = make_optimizer(model)
    grower = growing(model, optimizer, batches)
    grower.step(batches, F.cross_entropy)
    save_checkpoint(tmp_path / "a.pt", model, optimizer=optimizer, grower=grower)
    found = load_checkpoint(
        tmp_path / "a.pt",
        mlp,
        make_optimizer,
        make_grower=lambda model, optimizer, _: growing(model, optimizer, batches),
    )
    for one, its, own in ((model, optimizer, grower), (found.model, found.optimizer, found.grower)):
        step(one, its)
        assert own is not None
        own.step(batches, F.cross_entropy)
        step(one, its)
    for name, value in model.state_dict().items():
        assert torch.equal(value, found.model.state_dict()[name]), name


def test_a_damaged_state_is_refused() -> None:
    strategy = MorphNet()
    state = strategy.state_dict()
    for key, value in (("phase", "bored"), ("flops", 0)):
        with pytest.raises(ValueError, match="phase is"):
            strategy.load_state_dict({**state, key: value})
