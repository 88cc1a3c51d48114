"""How new units start: the function is kept, and the merit is the gradient of what is new in the network that is really wider."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli import Probe, find_sites, grow, measure, undo
from sensli.errors import MeasurementError
from sensli.moves.sites import Site
from sensli.moves.width.starts import STARTS
from widening import new_gradients, widened


class Depthwise(nn.Module):
    """A norm, a depthwise convolution, slopes and a flattened map between those that make units and those that read them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.deep, self.slopes = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.PReLU(4)
        self.out = nn.Linear(4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slopes(self.deep(F.relu(self.norm(self.first(x)))))
        return self.out(F.max_pool2d(x, 2).flatten(1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(4, 10), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, -1)
        return self.out(a * b.sigmoid())


class Stream(nn.Module):
    """Units that three layers make together, and that two read; one of them does both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.inner = nn.ModuleList([nn.Linear(5, 5, bias=False), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.inner:
            x = x + layer(x)
        return self.out(x.tanh())


def mlp(activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6, bias=bias), activation(), nn.Linear(6, 5, bias=bias), activation(), nn.Linear(5, 3)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding="same", padding_mode="circular", bias=False),
        nn.AvgPool2d(2), nn.GELU(), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6, 4)),
    "tanh": (lambda: mlp(nn.Tanh, bias=False), (6, 4)),
    "in place": (lambda: mlp(lambda: nn.ReLU(inplace=True)), (6, 4)),
    "convolutions": (convolutions, (6, 2, 4, 4)),
    "depthwise": (Depthwise, (6, 2, 4, 4)),
    "gated": (Gated, (6, 4)),
    "stream": (Stream, (6, 4)),
    "encoder": (lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), nn.Linear(4, 3)), (6, 3, 4)),
}  # fmt: skip
ABLE = {"gradmax": ("mlp", "tanh", "in place", "convolutions", "encoder"), "net2net": tuple(MODELS)}
CASES = [(start, name) for start, names in ABLE.items() for name in names]


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    x = torch.randn(shape, dtype=torch.float64)
    return build().double(), x, torch.arange(len(x)) % 3


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(1), target)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("start", "name"), CASES)
def test_the_function_is_kept_and_the_merit_is_the_gradient_of_what_is_new(
    start: str, name: str, training: bool
) -> None:
    """Of the rows for "gradmax", whose columns are given; otherwise of the columns."""
    model, x, y = made(name)
    model.train(training)
    sites = find_sites(model, x, what="units", units=2, init=start)
    assert sites, sites.explain()
    parts = [(x[:2], y[:2]), (x[2:], y[2:])] if not training else [(x, y)]
    for merit in measure(model, sites, parts, mean_loss, norm="frobenius"):
        wider, edit = widened(model, merit.site)
        torch.testing.assert_close(wider(x), model(x), rtol=1e-12, atol=1e-12)
        mean_loss(wider(x), y).backward()
        assert (
            merit.value == pytest.approx(new_gradients(edit, "row" if start == "gradmax" else "column"), rel=1e-10)
            and merit.value > 0
        )
        plain, _ = widened(model, site := sites[[str(s) for s in sites].index(str(merit.site))])  # never measured
        torch.testing.assert_close(plain(x), model(x), rtol=1e-12, atol=1e-12)
        again = measure(model, [merit], [(x, y)], mean_loss, norm="frobenius")  # what it carries
        assert again[0].value == pytest.approx(merit.value, rel=1e-10) and str(site) == str(merit.site)


def test_the_columns_of_gradmax_give_the_largest_gradient_of_all_of_their_size() -> None:
    model, x, y = made("tanh")
    site = find_sites(model, x, what="units", units=2, init="gradmax")[0]
    best = measure(model, [site], [(x, y)], mean_loss, norm="frobenius")[0]
    entries = best.site.move._entries
    size = 0.5 * model[2].weight.norm(dim=0).mean()
    columns = entries.values[1]
    torch.testing.assert_close(columns.norm(dim=0), size.detach().expand(2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        other = torch.linalg.qr(torch.randn(5, 2, dtype=torch.float64, generator=generator)).Q * size.detach()
        move = replace(best.site.move, _entries=replace(entries, values=(entries.values[0], other)))
        there = measure(model, [replace(best.site, move=move)], [(x, y)], mean_loss, norm="frobenius")[0]
        assert there.value < best.value


def test_rows_that_are_zero_learn_from_the_first_step_on_after_a_relu_too() -> None:
    model, x, y = made("mlp")
    growth = grow(model, find_sites(model, x, what="units", units=2, init="gradmax")[0])
    assert model[0].weight[6:].abs().max() == 0 and model[0].bias[6:].max() == torch.finfo(torch.float64).eps
    mean_loss(model(x), y).backward()
    assert model[0].weight.grad[6:].norm(dim=1).min() > 0 and growth.site.move.start == "gradmax"


def test_the_natural_merit_of_units_that_are_zero_is_refused() -> None:
    model, x, y = made("mlp")
    sites = find_sites(model, x, what="units", init="gradmax")
    with pytest.raises(MeasurementError, match="norm='natural' is not known for"):
        measure(model, sites, [(x, y)], mean_loss, norm="natural")
    assert measure(model, sites, [(x, y)], mean_loss).best.value > 0  # no hook is left


class Left(nn.Module):
    """A sigmoid far to the left: its units do nearly nothing, and are not zero."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x - self.by)


REFUSED = {
    "a norm": (Depthwise, (6, 2, 4, 4), "first", "norm is a norm that makes them all equally large"),
    "a norm without weights": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1)), (3, 2, 4, 4), "0", "a norm on the way",
    ),
    "a sigmoid": (lambda: mlp(nn.Sigmoid), (6, 4), "0", "units that are zero where their rows are"),
    "a small sigmoid": (lambda: mlp(lambda: Left(11)), (6, 4), "0", "units that are zero where their rows are"),
    "a very small sigmoid": (lambda: mlp(lambda: Left(25)).double(), (6, 4), "0", "units that are zero where their rows are"),
    "a relu without a bias": (lambda: mlp(bias=False), (6, 4), "0", "torch's ReLU has the slope 0 at 0"),
    "a gate": (Gated, (6, 4), "both", "units that one row makes"),
    "a stream": (Stream, (6, 4), "stem", "units that one row makes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_units_that_cannot_start_at_zero_are_refused_with_the_reason(name: str) -> None:
    build, shape, path, reason = REFUSED[name]
    torch.manual_seed(0)
    model = build()
    sites = find_sites(model, torch.randn(shape, dtype=next(model.parameters()).dtype), what="units", init="gradmax")
    assert path not in {site.path for site in sites} and reason in dict(sites.skipped)[path]


class Numbered(nn.Module):
    """Units of which some in the middle are different from all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 90), nn.Linear(90, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        number = torch.arange(x.shape[-1])
        return self.out(torch.where((number > 40) & (number < 80), 2 * x, x))


def test_copies_that_are_not_like_their_sources_are_refused() -> None:
    model, x = Numbered(), torch.randn(2, 4)
    assert find_sites(model, x, what="units", units=9)  # new units, and candidates for them, are like the last one
    sites = find_sites(model, x, what="units", units=9, init="net2net")
    assert dict(sites.skipped)["first"] == "no more units: copies of them change what the model returns"


def test_copies_have_all_that_their_sources_have_and_share_what_reads_them() -> None:
    model, x, _ = made("depthwise")
    model.norm.running_mean.normal_(), model.norm.running_var.uniform_()
    old = {name: value.clone() for name, value in model.state_dict().items()}
    growth = grow(model, find_sites(model, x, what="units", units=6, init="net2net")[0], check=x)
    sources = growth.site.move.sources
    assert len(sources) == 6 and Site.from_dict(json.loads(json.dumps(growth.site.to_dict()))).move.sources == sources
    new = model.state_dict()
    for name in (
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.running_mean",
        "norm.running_var",
        "deep.weight",
        "slopes.weight",
    ):
        assert torch.equal(new[name], torch.cat([old[name], old[name][list(sources)]])), name
    for unit in range(4):
        columns = new["out.weight"].unflatten(1, (10, 4))[
            :, [unit, *(4 + i for i, s in enumerate(sources) if s == unit)]
        ]
        expected = old["out.weight"].unflatten(1, (4, 4))[:, [unit]] / columns.shape[1]
        torch.testing.assert_close(columns, expected.expand_as(columns))


@pytest.mark.parametrize(("momentum", "equal"), [(0.0, True), (0.9, False)])
def test_copies_stay_equal_under_plain_sgd_alone(momentum: float, equal: bool) -> None:
    model, x, y = made("tanh")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    mean_loss(model(x), y).backward()
    optimizer.step()
    growth = grow(model, find_sites(model, x, what="units", units=1, init="net2net")[0], optimizer=optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(model(x), y).backward()
        optimizer.step()
    source = growth.site.move.sources[0]
    assert torch.allclose(model[0].weight[6], model[0].weight[source], rtol=1e-12) == equal


@pytest.mark.parametrize("start", STARTS)
def test_a_probe_measures_the_same(start: str) -> None:
    model, x, y = made("mlp")
    sites = find_sites(model, x, what="both", init=start)
    measured = measure(model, sites, [(x, y)], mean_loss, norm="frobenius")
    # Rows that are made for the data are known after a measurement alone: the probe is given what was measured.
    with Probe(model, measured if start == "sensitive" else sites, norm="frobenius") as probe:
        mean_loss(model(x), y).backward()
    assert [m.value for m in probe.merits()] == pytest.approx([m.value for m in measured], rel=1e-10)


@pytest.mark.parametrize("start", STARTS)
def test_nothing_is_drawn_from_the_global_random_state(start: str) -> None:
    model, x, y = made("mlp")
    state = torch.get_rng_state()
    merits = measure(model, find_sites(model, x, what="units", init=start), [(x, y)], mean_loss)
    grow(model, merits.best)
    assert torch.equal(torch.get_rng_state(), state)


class Beside(nn.Module):
    """A width that is read in the middle of the inputs of another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 4, 1)
        self.both, self.out = nn.Linear(7 * 4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left(x), self.right(x)], 1).tanh()
        return self.out(self.both(x.flatten(1)).tanh())


@pytest.mark.parametrize("start", ["sensitive", "random", "gradmax"])
@pytest.mark.parametrize("order", ["0 2", "2 0", "left both", "right both"])
def test_the_second_of_two_neighbours_gets_what_was_measured(start: str, order: str) -> None:
    """Its merit is the gradient in the network that both have made wider."""
    torch.manual_seed(0)
    one, two = order.split()
    model, shape = (Beside(), (6, 2, 2, 2)) if two == "both" else (mlp(nn.Tanh), (6, 4))
    x, y = torch.randn(shape, dtype=torch.float64), torch.arange(6) % 3
    before = model.double()(x)
    sites = find_sites(model, x, what="units", units=2, init=start)
    merits = {merit.site.path: merit for merit in measure(model, sites, [(x, y)], mean_loss, norm="frobenius")}
    growths = [grow(model, merits[one]), grow(model, merits[two], check=x)]
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    mean_loss(model(x), y).backward()
    site, name = growths[1].site, growths[1].name
    edit = site.move.made(model, site, model.get_submodule(name), name)
    expected = new_gradients(edit, "row" if start == "gradmax" else "column")
    assert merits[two].value == pytest.approx(expected, rel=1e-10)
    for growth in reversed(growths):
        undo(model, growth)
    plain, _ = widened(model, merits[two].site)
    grow(model, merits[two])  # nothing is left of the first
    assert all(torch.equal(mine, its) for mine, its in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.library
@pytest.mark.parametrize(("start", "blocks"), [("gradmax", [0, 0]), ("net2net", [2])])
def test_blocks_of_one_configuration_start_as_they_can(start: str, blocks: list[int]) -> None:
    """All at once, or with a start for which each is different, one by one; the function is kept and the merit is right."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).double().eval()
    tokens = torch.randint(0, 30, (4, 8))
    sites = find_sites(model, {"input_ids": tokens}, what="units", units=2, init=start)
    sites = [site for site in sites if site.path.endswith("c_fc")]
    assert [site.move.blocks for site in sites] == blocks

    def loss(network: nn.Module) -> Tensor:
        return F.cross_entropy(network(tokens).logits.flatten(0, 1), tokens.flatten())

    batch = {"input_ids": tokens}
    for merit in measure(
        model, sites, [batch], lambda output, _: F.cross_entropy(output.logits.flatten(0, 1), tokens.flatten())
    ):
        wider, edit = widened(model, merit.site)
        torch.testing.assert_close(loss(wider), loss(model), rtol=1e-12, atol=0)
        loss(wider).backward()
        expected = new_gradients(edit, "row" if start == "gradmax" else "column")
        assert merit.value == pytest.approx(expected, rel=1e-10)


def _huge(output: Tensor, target: Tensor) -> Tensor:
    return 1e38 * F.cross_entropy(output, target)


def _bent(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + (0 * output).sum().sqrt()  # finite, and its gradient is not


@pytest.mark.parametrize("start", ["sensitive", "random", "net2net", "gradmax"])
@pytest.mark.parametrize("scale, loss", [(1e30, F.cross_entropy), (1e20, F.cross_entropy), (1.0, _huge), (1.0, _bent)])
def test_a_training_that_diverges_is_told_or_measured(start: str, scale: float, loss: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    sites = find_sites(model, x[:2], what="units", init=start)
    for norm in ("frobenius", "operator", *(["natural"] if start != "gradmax" else [])):
        try:
            merits = measure(model, sites, [(scale * x, y)], loss, norm=norm)
        except MeasurementError as error:
            assert "finite" in str(error) or "diverged" in str(error) or "are zero" in str(error)
        else:
            assert loss is not _bent and all(math.isfinite(merit.value) for merit in merits)
