"""Methods that split units: old entries move with the growth, and come back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rivals import convolutions, data, grown, mean_loss, mlp
from sensli import Grower, find_sites, grow, undo
from sensli.errors import ZeroMerits
from sensli.growing.triggers import Every
from sensli.moves.sites import Site
from sensli.moves.width.width import Width
from sensli_lab.methods.pairs import pair_of
from sensli_lab.methods.splitting import (
    BETA,
    EPS,
    STEPS,
    Smooth,
    Splitting,
    curvatures,
    smallest_eigenvalues,
    split_site,
)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, 2)
    ).double()  # fmt: skip
    for _ in range(5):
        model(torch.randn(20, 2, 6, 6).double())
    return model.eval()


def sites_of(model: nn.Module, batches: Any) -> Any:
    return find_sites(model, batches[0][0], what="units", units=1, init="net2net")


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (mlp(), data()),
        (mlp(nn.Softplus), data()),
        (convolutions(), data((2, 6, 6), 2)),
        (normed(), data((2, 6, 6), 2)),
    ],
)
def test_the_smallest_eigenvalue_is_the_second_order_change_that_is_measured(
    model: nn.Sequential, batches: list[tuple[Tensor, Tensor]]
) -> None:
    small = 1e-3
    for pair, curvature in curvatures(model, sites_of(model, batches), batches, F.cross_entropy):
        values, vectors = smallest_eigenvalues(pair.h, curvature, pair.samples, torch.Generator())
        none = torch.zeros(0, pair.h.shape[1]), torch.zeros(0, pair.existing_columns.shape[1])
        for unit in range(pair.width.units):
            wide = grown(model, split_site(pair, [unit], small * vectors[[unit]], *none))
            change = (mean_loss(wide, batches) - mean_loss(model, batches)) * 2 / small**2
            torch.testing.assert_close(change, values[unit], rtol=1e-3, atol=1e-7)


def test_lanczos_finds_what_the_whole_matrix_has() -> None:
    generator = torch.Generator().manual_seed(0)
    width = 3 * STEPS
    h = torch.randn(50, width, generator=generator).double() * torch.linspace(0.1, 2, width)
    curvature = torch.randn(50, 4, generator=generator).double()
    curvature[:, 3] = 0.0  # a unit that is linear on all data
    values, vectors = smallest_eigenvalues(h, curvature, 50, generator)
    for unit in range(4):
        matrix = h.T @ (curvature[:, [unit]] * h) / 50
        slow = torch.linalg.eigvalsh(matrix)[0]
        assert slow - 1e-9 <= values[unit] <= 0.98 * slow + 1e-12
        torch.testing.assert_close(vectors[unit] @ matrix @ vectors[unit], values[unit], rtol=1e-6, atol=1e-12)


def test_a_relu_has_the_curvature_of_a_softplus_and_its_own_value_and_slope() -> None:
    x = torch.linspace(-2, 2, 9).double().requires_grad_()
    for function in (F.relu, lambda x: F.leaky_relu(x, 0.1), nn.ReLU(inplace=True)):
        with Smooth():
            y = function(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x)
        (plain,) = torch.autograd.grad(F.leaky_relu(x, 0.1 if y[0] else 0.0).sum(), x)
        assert torch.equal(slope[x != 0], plain[x != 0])
        share = torch.sigmoid(BETA * x)
        torch.testing.assert_close(bend, (0.9 if y[0] else 1.0) * BETA * share * (1 - share))
    assert x[0] == -2


def test_splitting_takes_the_smallest_eigenvalues_of_all_layers() -> None:
    model, batches = mlp(), data()
    for units, wanted in ((3, 3), (0.5, 5)):  # of 11 units
        merits = Splitting(units=units).score(model, sites_of(model, batches), batches, F.cross_entropy)
        slow = []
        for pair, curvature in curvatures(model, sites_of(model, batches), batches, F.cross_entropy):
            for unit in range(pair.width.units):
                matrix = pair.h.T @ (curvature[:, [unit]] * pair.h) / pair.samples
                slow.append((float(torch.linalg.eigvalsh(matrix)[0]), pair.site.path, unit))
        best = [each for each in sorted(slow) if each[0] < 0][:wanted]
        taken = {(merit.site.path, unit) for merit in merits if merit.value for unit in merit.site.move.sources}  # type: ignore[attr-defined]
        assert taken == {(path, unit) for _, path, unit in best}
        total = sum(merit.value for merit in merits)
        assert total == pytest.approx(-(EPS**2) / 2 * sum(value for value, _, _ in best))


def test_nothing_is_split_where_no_eigenvalue_is_below_zero() -> None:
    model, batches = mlp(nn.Identity), data()  # halves of linear units can do nothing that the unit cannot
    with pytest.raises(ZeroMerits, match="no more units would help"):
        Splitting(units=0.9).score(model, sites_of(model, batches), batches, F.cross_entropy)


def split_and_new(model: nn.Module, batches: Any, index: int = 0) -> Site:
    """Units 0 and 2 part, and one new unit comes, with everything drawn."""
    pair: Any = pair_of(sites_of(model, batches)[index], model)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    rows, columns = pair.existing_rows.shape[1], pair.existing_columns.shape[1]
    return split_site(pair, [0, 2], drawn(2, rows), drawn(1, rows), drawn(1, columns))


@pytest.mark.parametrize(("model", "batches"), [(mlp(), data()), (normed(), data((2, 6, 6), 2))])
def test_halves_share_what_read_the_unit_and_new_units_come_beside_them(model: nn.Sequential, batches: Any) -> None:
    site, wide = split_and_new(model, batches), grown(model, split_and_new(model, batches))
    assert isinstance(site.move, Width) and site.move.sources == (0, 2, -1)
    units, last = site.move.units, model[-1].weight if len(model) == 6 else model[2].weight
    entries = site.move._entries
    assert entries is not None
    row, shift = entries.values[0], entries.shifts[0]
    assert row is not None and shift is not None
    old, new = model[0].weight, wide[0].weight  # type: ignore[index]
    torch.testing.assert_close(new[:units], old + shift)
    torch.testing.assert_close(new[units : units + 2], old[[0, 2]] - shift[[0, 2]])
    assert torch.equal(new[units + 2], row[2])
    columns = (wide[-1] if len(model) == 6 else wide[2]).weight  # type: ignore[index]
    inner = last.shape[1] // units
    own = columns.unflatten(1, (units + 3, inner))
    before = last.unflatten(1, (units, inner))
    assert torch.equal(own[:, 0], before[:, 0] / 2) and torch.equal(own[:, units + 1], before[:, 2] / 2)
    assert torch.equal(own[:, 1], before[:, 1]) and not torch.equal(own[:, -1], torch.zeros_like(own[:, -1]))
    if len(model) == 6:
        assert torch.equal(wide[1].running_var[units : units + 2], model[1].running_var[[0, 2]])  # type: ignore[index,union-attr]
        assert wide[1].weight[-1] == 1 and wide[1].bias[-1] == 0  # type: ignore[index]


@pytest.mark.parametrize("steps", [0, 1])
def test_old_entries_come_back(steps: int) -> None:
    """To the bit without a step in between; after one the halves become one again."""
    model, batches = mlp(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    mean_loss(model, batches).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    growth = grow(model, split_and_new(model, batches), optimizer=optimizer)
    assert not torch.equal(model[0].weight[:5], before[0]["0.weight"])
    for _ in range(steps):
        mean_loss(model, batches).backward()
        optimizer.step()
    columns = model[2].weight.detach().clone()
    undo(model, growth, optimizer=optimizer)
    if steps:
        torch.testing.assert_close(model[2].weight[:, 0], columns[:, 0] + columns[:, 5])
        torch.testing.assert_close(model[2].weight[:, 1], columns[:, 1])
        return
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    for now, then in zip(optimizer.state.values(), before[1]["state"].values(), strict=True):
        assert all(torch.equal(now[key], then[key]) for key in then)


def test_two_neighbouring_layers_split_at_one_look() -> None:
    """What was found for the second one holds although the first has other units now."""
    model, batches = mlp(), data()
    before = mean_loss(model, batches).item()
    told: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=batches[0][0],
        trigger=Every(1),
        strategy="splitting",
        units=0.9,
        max_factor=None,
        log=told.append,
    )
    grower.step(batches, F.cross_entropy)
    assert len(grower.history) == 2 and "not kept" in str(told[0])
    assert grower.last_merits is not None
    predicted = sum(merit.value for merit in grower.last_merits)
    assert before - mean_loss(model, batches).item() == pytest.approx(predicted, rel=0.2)


def test_neighbouring_layers_split_to_the_same_network_in_either_order() -> None:
    """What is found for one of them before the other has grown is copied and shared as the weights are."""
    model, batches = mlp(), data()
    outputs = []
    for order in ((0, 1), (1, 0)):
        sites, wide = [split_and_new(model, batches, index) for index in order], copy.deepcopy(model)
        for site in sites:
            edit = site.by_path().move.plan(wide, site.by_path())
            edit.build()
            edit.apply()
        outputs.append(wide(batches[0][0]))
    torch.testing.assert_close(*outputs)
    assert not torch.allclose(outputs[0], model(batches[0][0]))


def test_an_average_gets_copies_of_its_own_units_and_the_new_ones_of_the_model() -> None:
    from sensli.surgery.averaging import follow

    model, batches = mlp(), data()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        averaged.module[0].weight.mul_(0.5)
    old = averaged.module[0].weight.detach().clone()
    follow(averaged, grow(model, split_and_new(model, batches)), model)
    new = averaged.module[0].weight
    assert torch.equal(new[:7], torch.cat([old, old[[0, 2]]])) and torch.equal(new[7], model[0].weight[7])
