"""Rows of new units that are made for the data: units as large as the others, in the directions that the loss asks for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli import find_sites, grow, measure
from sensli.merits.measuring import first_of_batch
from sensli.moves.width.gauge import directions
from sensli.moves.width.replica import inputs_of


def chosen(model: nn.Module, x: Tensor, y: Tensor, **options: object) -> dict[str, dict[str, Tensor]]:
    """The new rows and biases that were measured, by the layer that gets them."""
    found = {}
    for merit in measure(model, find_sites(model, x, what="units", **options), [(x, y)], F.cross_entropy):
        move = merit.site.move
        pairs = zip(move.axes, move._entries.values, strict=True)
        found[merit.site.path] = {axis.name: value for axis, value in pairs if axis.fill == "row"}
    return found


def wanted(there: Tensor, bias: bool, cut: bool = True) -> Tensor:
    """The mean square of new units: of each that is there its variance, or with ReLU twice that of what is above zero if that is less."""
    there = there.detach()
    moved = there - there.mean(0) if bias else there
    each = [
        min(float(m.square().mean()), 2 * float(t.relu().square().mean()) if cut else torch.inf)
        for m, t in zip(moved.T, there.T, strict=True)
    ]
    return there.new_tensor(sum(each) / len(each))


@pytest.mark.parametrize("bias", [True, False])
def test_new_units_are_as_large_as_those_that_are_there(bias: bool) -> None:
    """On the samples that were seen beforehand: of eight vectors all."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 6, bias=bias), nn.ReLU(), nn.Linear(6, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3)
    ).double()
    with torch.no_grad():
        model[0].weight.mul_(
            torch.linspace(1, 30, 6)[:, None]
        )  # the spread of the weights does not tell how large units are
    x, y = torch.randn(8, 5, dtype=torch.float64) * 10 + 3, torch.arange(8) % 3
    for path, new in chosen(model, x, y, units=4).items():
        given = model[: int(path)](x)
        made, there = F.linear(given, new["weight"], new.get("bias")), model[int(path)](given)
        torch.testing.assert_close(made.square().mean(0), wanted(there, bias, cut=path == "0").expand(4))
        assert not bias or made.mean(0).abs().max() < 1e-12


def test_units_that_are_nearly_always_off_count_by_what_their_readers_get() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 3
    with torch.no_grad():
        model[0].bias.copy_(0.1 - model[0](x).amax(0))  # each is on for one sample at least, and hardly
    new = chosen(model, x, y, units=2)["0"]
    read = F.linear(x, new["weight"], new["bias"]).relu().square().mean()
    assert read < 2 * model[:2](x).square().mean()  # by the variance it would be more than ten times as much
    assert model[0](x).var(0).mean() > 20 * model[:2](x).square().mean()


def test_a_width_that_was_never_measured_gets_random_rows_that_fit_the_checked_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 5, dtype=torch.float64) * 10 + 3
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].weight.mul_(torch.linspace(1, 30, 6)[:, None])
    there = model[0](x)
    grow(model, find_sites(model, x[:1], what="units", units=4)[0], check=(x, None))
    made = model[0](x)[:, 6:]
    torch.testing.assert_close(made.square().mean(0), wanted(there, True).expand(4))
    assert made.mean(0).abs().max() < 1e-12


def test_channels_are_as_large_as_those_that_are_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 4), nn.Flatten()).double()
    x, y = torch.rand(64, 2, 4, 4, dtype=torch.float64), torch.arange(64) % 3
    new, x = chosen(model, x, y)["0"], x[:8]  # an eighth is seen: 128 places
    made = F.conv2d(x, new["weight"], new["bias"], padding=1)
    assert made.mean().abs() < 1e-12
    there = model[0](x).movedim(1, -1).flatten(0, 2)
    torch.testing.assert_close(made.square().mean(), wanted(there, True))


@pytest.mark.parametrize("outputs", [5, 80])
def test_directions_are_the_singular_vectors_of_the_bypass(outputs: int) -> None:
    """Of few outputs exactly, of many about; each with the better sign."""
    generator = torch.Generator().manual_seed(0)
    given, back = (torch.randn(100, n, generator=generator, dtype=torch.float64) for n in (20, outputs))
    given = given + 2
    back = back + (given - 2)[:, :3] @ torch.diag(torch.tensor([9.0, 6.0, 3.0]).double()) @ back[:3]
    rows = directions(given, back, 3)
    centred = given - given.mean(0)
    expected = torch.linalg.svd(centred.T @ back).U[:, :3].T
    cosines = (F.normalize(rows) * expected).sum(1).abs()
    assert cosines.min() > (1 - 1e-9 if outputs == 5 else 0.95)
    for row in rows:
        above, below = ((centred @ turned).relu() @ back for turned in (row, -row))
        assert above.norm() >= below.norm()


def test_directions_that_are_rounding_errors_are_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    given, one = torch.randn(30, 6, generator=generator), torch.randn(30, 1, generator=generator)
    assert len(directions(given, torch.cat([one, -one], 1), 4)) == 1  # two classes: what one gets the other loses


def test_the_unit_that_the_data_ask_for_is_found() -> None:
    torch.manual_seed(0)
    x, wanted = torch.randn(1000, 10), F.normalize(torch.randn(10), dim=0)
    y = (x @ wanted).relu()[:, None]
    model = nn.Sequential(nn.Linear(10, 2), nn.ReLU(), nn.Linear(2, 1))
    site = find_sites(model, x[:2], what="units", units=1)[0]
    merit = measure(model, [site], [(x, y)], F.mse_loss)[0]
    grow(model, merit)
    assert F.cosine_similarity(model[0].weight[2], wanted, dim=0) > 0.9


CONVOLUTIONS = [
    (nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2), (5, 3, 11)),
    (nn.Conv2d(3, 4, (3, 2), padding="same", padding_mode="circular", bias=False), (40, 3, 6, 5)),
    (nn.Conv3d(2, 3, 2), (2, 2, 3, 4, 3)),
    (nn.Linear(4, 3), (5, 6, 7, 4)),
]


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS)
def test_what_rows_multiply_at_some_places_gives_what_the_layer_gives_there(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    seen = inputs_of(layer, x)
    assert seen is not None
    places, inputs = seen
    made = layer(x) if isinstance(layer, nn.Linear) else layer(x).movedim(1, -1)
    expected = inputs @ layer.weight.flatten(1).T + (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(places.nearby(made), expected)
    pooled = made.mean(tuple(range(1, made.dim() - 1)))
    torch.testing.assert_close(
        places.nearby(pooled), pooled[places.at[0]]
    )  # a reader may see one vector of each sample


def test_few_samples_of_a_batch() -> None:
    x, y = torch.arange(12).view(6, 2), torch.arange(6)
    assert (
        torch.equal(first_of_batch((x, y), 4)[1], y[:4])
        and len(first_of_batch({"x": x, "scale": torch.tensor(2.0)}, 4)["x"]) == 4
    )
    graph = {"nodes": x, "edges": torch.zeros(2, 9).long()}  # edges would point to nodes that are not there
    assert first_of_batch(graph, 4) is graph


class OfMany(nn.Module):
    """Needs batches of a certain size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.seen, self.least = nn.Linear(4, 5), nn.Linear(5, 3), [], 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) < self.least:
            raise ValueError("too few")
        return self.out(self.first(x).relu())


def test_a_model_that_does_not_run_with_few_samples_is_measured_nevertheless() -> None:
    torch.manual_seed(0)
    model, x, y = OfMany(), torch.randn(48, 4), torch.arange(48) % 3
    sites = find_sites(model, x, what="units", units=2)
    model.seen.clear()
    model.least = 40
    merits = measure(model, sites, [(x, y)], F.cross_entropy)
    assert model.seen[0] == 8 and model.seen[1] == 48 and merits.best.value > 0


def test_a_layer_whose_units_are_all_dead_gets_units_that_are_not() -> None:
    """Biases of dead units are far too low for any other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    x, y = torch.randn(64, 5), torch.arange(64) % 2
    merit = measure(model, find_sites(model, x, what="units", units=2), [(x, y)], F.cross_entropy).best
    grow(model, merit)
    assert (model[:2](x) > 0).any(0).tolist() == [False, False, False, True, True]
