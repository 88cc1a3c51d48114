"""The statements of `docs/methods/definitions.md`, each against what autograd says of the network that has really grown, in float64."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sensli import find_sites, grow, measure

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "definitions.md"
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).double()
Y = torch.randint(2, (12,), generator=torch.Generator().manual_seed(2))
BATCHES = [(X[:8], Y[:8]), (X[8:], Y[8:])]  # not equally large


def plain(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 5), activation(), nn.Linear(5, 2)).double()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the mean loss over all samples, by autograd; zero where none arrives."""
    model.zero_grad()
    cross_entropy(model(X), Y).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def grown(model: nn.Module, site: Any) -> tuple[str, dict[str, Tensor]]:
    """The name of the growth in a copy that has really grown there, and the gradients of this copy."""
    again = copy.deepcopy(model)
    growth = grow(again, site.in_model(again))
    return growth.name, gradients(again)


def of_layer(name: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in found.items() if key.startswith(f"{name}.")}


def same(value: float | None, expected: Tensor | float) -> None:
    torch.testing.assert_close(
        torch.tensor(value, dtype=torch.float64), torch.as_tensor(expected).double(), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("form", ["relu", "parametric"])
def test_a_layer_is_worth_the_gradient_of_its_weight_without_the_bias(form: str) -> None:
    """Without the parameter of a parametric activation either."""
    model = plain(nn.ReLU if form == "relu" else nn.Tanh)
    for merit in measure(model, find_sites(model, X[:2], form=form), BATCHES, cross_entropy):
        parts = of_layer(*grown(model, merit.site))
        (weight,) = (value for name, value in parts.items() if name.endswith("weight"))
        (bias,) = (value for name, value in parts.items() if name.endswith("bias"))
        same(merit.value, weight.square().sum())
        assert bias.abs().max() > 0


def test_a_residual_layer_is_worth_the_gradient_of_its_second_map_which_is_zero() -> None:
    model = plain(nn.Tanh)
    for merit in measure(model, find_sites(model, X[:2], form="residual"), BATCHES, cross_entropy):
        parts = of_layer(*grown(model, merit.site))
        same(merit.value, parts["second.weight"].square().sum())
        assert not parts["first.weight"].any() and not parts["first.bias"].any()


def test_a_twin_is_worth_the_gradient_of_its_maps_that_are_zero_without_their_biases() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Block(), Block(), Block(), nn.Linear(4, 2)).double()
    for merit in measure(model, find_sites(model, X[:2]), BATCHES, cross_entropy):
        again = copy.deepcopy(model)
        name = grow(again, merit.site.in_model(again)).name
        twin = again.get_submodule(name)
        zero = {key for key, value in twin.named_parameters() if not value.any()}
        maps = [key for key in zero if not key.endswith("bias")]
        parts = of_layer(name, gradients(again))
        assert maps and zero - set(maps), "there is a bias to leave out"
        same(merit.value, sum(parts[key].square().sum() for key in maps))
        assert any(parts[key].any() for key in zero - set(maps))


@pytest.mark.parametrize("start", ["sensitive", "random", "gradmax", "net2net"])
def test_units_are_worth_the_gradient_of_what_is_zero_at_first(start: str) -> None:
    """The columns that read them; with "gradmax" the rows that make them, with the biases of these rows; copies have no zeros."""
    model = plain(nn.Tanh)
    for merit in measure(model, find_sites(model, X[:2], what="units", units=2, init=start), BATCHES, cross_entropy):
        again = copy.deepcopy(model)
        growth = grow(again, merit.site.in_model(again))
        found = gradients(again)
        maker = int(growth.name)
        old = model[maker].out_features  # type: ignore[index,union-attr]
        columns = found[f"{maker + 2}.weight"][:, old:]
        rows = torch.cat([found[f"{maker}.weight"][old:], found[f"{maker}.bias"][old:, None]], 1)
        same(merit.value, (rows if start == "gradmax" else columns).square().sum())
        assert start == "net2net" or (columns if start == "gradmax" else rows).abs().max() < 1e-12


def test_the_ratio_has_the_unweighted_mean_over_weights_and_the_share_their_sum() -> None:
    """Of parameters with two dimensions or more that train, each once; those that no gradient reaches count as zero."""
    model: Any = plain()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, 3).double()))
    model[2].weight.requires_grad_(False)
    merits = measure(model, find_sites(model, X[:2]), BATCHES, cross_entropy)
    squares = {name: value.square().sum() for name, value in gradients(model).items()}
    own = [squares["0.weight"], squares["4.weight"], squares["unused"]]
    assert own[2] == 0 and squares["0.bias"] > 0
    for merit in merits:
        same(merit.ratio, merit.value / (sum(own) / 3))
        same(merit.share, merit.value / sum(own))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.act, self.last.weight = nn.ReLU(), self.mid.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.act(self.mid(self.act(self.first(x)))))[:, :2]

    torch.manual_seed(0)
    tied = Tied().double()
    merit = measure(tied, find_sites(tied, X[:2]), BATCHES, cross_entropy)[0]
    found = gradients(tied)
    assert "last.weight" not in found
    same(merit.ratio, merit.value / ((found["first.weight"].square().sum() + found["mid.weight"].square().sum()) / 2))


def test_auto_is_the_operator_norm_where_all_sites_are_convolutions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4), nn.ReLU(),
        nn.Linear(4, 2),
    ).double()  # fmt: skip
    x = torch.randn(12, 1, 4, 4).double()
    chosen: dict[str, Callable[..., Any]] = {
        "operator": lambda: find_sites(model, x[:2], where="conv"),
        "frobenius": lambda: find_sites(model, x[:2]),
    }
    for norm, sites in chosen.items():
        found = measure(model, sites(), [(x, Y)], cross_entropy)
        assert found.norm == norm
        assert [m.value for m in found] == [
            m.value for m in measure(model, sites(), [(x, Y)], cross_entropy, norm=norm)
        ]
    both = find_sites(model, x[:2], what="both", units=1)
    assert measure(model, [s for s in both if s.kind in ("conv", "units")], [(x, Y)], cross_entropy).norm == "frobenius"


def test_the_page_names_the_test_of_each_statement() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert named == {name for name in globals() if name.startswith("test_")} - {
        "test_the_page_names_the_test_of_each_statement"
    }
