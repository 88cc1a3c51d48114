"""Widths: which units can become more, that the function stays, and that the merit is the gradient of the columns that would read them."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import sensli
from oracle import gradients
from sensli import Probe, find_sites, measure
from sensli.errors import MeasurementError, UnknownSite, UnsupportedSite, ZeroMerits
from sensli.moves.sites import Site
from sensli.moves.width.finding import Siting
from sensli.moves.width.widening import Widening
from widening import column_gradients, redrawn, widened


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, padding="same", groups=4, padding_mode="reflect")
        self.second = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False, padding_mode="circular")
        self.back = nn.ConvTranspose2d(6, 5, 2, stride=2, output_padding=1)
        self.slopes = nn.PReLU(5)
        self.hidden, self.out = nn.Linear(5 * 2 * 2, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.hardswish(self.second(F.relu6(self.depthwise(x))))
        x = F.adaptive_avg_pool2d(self.slopes(self.back(x)), 2)
        return self.out(torch.tanh(self.hidden(x.flatten(1))))


class Gated(nn.Module):
    """Two ways to write a gate, and a stream that a norm mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
        self.both, self.back, self.out = nn.Linear(6, 10), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        a, b = self.both(x).chunk(2, -1)
        return self.out((x + self.back(a * b.sigmoid())).mean(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.narrow = nn.ModuleList([nn.Conv2d(4, 3, 1) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(3) for _ in range(2)])
        self.wide = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1) for _ in range(2)])
        self.squeeze, self.excite, self.out = nn.Linear(4, 2), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for narrow, norm, wide in zip(self.narrow, self.norms, self.wide, strict=True):
            x = F.relu(x + wide(F.relu(norm(narrow(x)))))
        x = x * self.excite(F.relu(self.squeeze(x.mean((2, 3))))).sigmoid()[:, :, None, None]
        return self.out(x.mean((2, 3)))


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv1d(2, 3, 3, padding=1),
            nn.Conv1d(5, 4, 3, padding=1, dilation=1),
            nn.Conv1d(9, 3, 1),
        )
        self.out = nn.Linear(3 * 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, F.gelu(self.a(x))], 1)
        x = torch.cat([x, F.gelu(self.b(x))], 1)
        return self.out(self.c(x).transpose(1, 2).flatten(1))  # channels lie inside of the positions


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Dropout(0.0), nn.Tanh(), nn.Linear(6, 3))


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 3, 3, padding=1),
        nn.InstanceNorm3d(3, affine=True, track_running_stats=True),
        nn.ReLU(),
        nn.AvgPool3d(2),
        nn.ConvTranspose3d(3, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 64, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "mlp": (mlp, (6, 4), ["0", "2"]),
    "convolutions": (Convolutions, (4, 3, 8, 8), ["first", "second", "back", "hidden"]),
    "gated": (Gated, (4, 5, 6), ["gate", "both"]),
    "residual": (Residual, (4, 3, 4, 4), ["stem.0", "narrow.0", "narrow.1", "squeeze"]),
    "concatenated": (Concatenated, (4, 2, 5), ["a", "b", "c"]),
    "volumes": (volumes, (3, 2, 4, 4, 4), ["0", "4"]),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), 2), nn.Linear(4, 2)
        ),
        (3, 5, 4),
        [f"0.layers.{block}.{name}" for block in range(2) for name in ("self_attn", "linear1")],
    ),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, shape, _ = MODELS[name]
    model, x = build().double(), torch.randn(shape, dtype=torch.float64)
    return model, x, torch.arange(len(x)) % 2


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(1), target)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_merit_is_the_gradient_in_the_network_that_is_really_wider(name: str, training: bool) -> None:
    model, x, y = made(name)
    model.train(training)
    sites = find_sites(model, x, what="units")
    assert [site.path for site in sites] == MODELS[name][2]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    merits = measure(model, sites, [(x, y)], mean_loss, norm="frobenius")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    output = model(x)
    for merit in merits:
        wider, edit = widened(model, merit.site)
        assert torch.allclose(wider(x), output, rtol=1e-12, atol=1e-12)
        mean_loss(wider(x), y).backward()
        assert merit.value == pytest.approx(column_gradients(edit), rel=1e-10) and merit.value > 0


@pytest.mark.parametrize("name", MODELS)
def test_what_a_site_costs_is_what_it_adds(name: str) -> None:
    model, x, _ = made(name)
    model.eval()
    for site in find_sites(model, x, what="units", units=2):
        wider, _ = widened(model, site)
        added = sum(p.numel() for p in wider.parameters()) - sum(p.numel() for p in model.parameters())
        assert site.parameters == added
        if name != "encoder":  # whose fast path is counted otherwise
            assert site.flops == sensli.count_flops(wider, x) - sensli.count_flops(model, x)


@pytest.mark.parametrize("name", MODELS)
def test_new_rows_do_not_matter_to_the_bit(name: str) -> None:
    model, x, _ = made(name)
    model.eval()
    for site in find_sites(model, x, what="units", units=3):
        outputs = []
        for seed in range(3):
            wider, edit = widened(model, site)
            redrawn(edit, seed)
            outputs.append(wider(x))
        assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_probe_measures_the_same_and_leaves_the_step_alone() -> None:
    model, x, y = made("convolutions")
    sites = find_sites(model, x, what="both")
    assert {site.kind for site in sites} >= {"units", "conv"}
    measured = measure(model, sites, [(x, y)], mean_loss, norm="frobenius")
    plain = copy.deepcopy(model)
    mean_loss(plain(x), y).backward()
    with sensli.Probe(model, measured, norm="frobenius") as probe:  # of the rows that were measured
        mean_loss(model(x), y).backward()
    assert [m.value for m in probe.merits()] == pytest.approx([m.value for m in measured], rel=1e-10)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("ratio", [True, False])
@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU, nn.SiLU])
def test_what_is_overwritten_after_a_reader_is_measured_all_the_same(act: Any, ratio: bool) -> None:
    """As in most networks for images; of a layer that is not measured the value from before is needed too."""
    convolutions = [nn.Conv2d(2, 4, 3), act(inplace=True), nn.Conv2d(4, 3, 3), act(inplace=True), nn.Conv2d(3, 5, 3)]
    model = nn.Sequential(*convolutions, act(inplace=True), nn.Flatten(), nn.Linear(20, 3)).double()
    x, y = torch.randn(3, 2, 8, 8, dtype=torch.float64), torch.arange(3)
    sites = find_sites(model, x, what="units", units=2)
    assert [site.path for site in sites] == ["0", "2", "4"]
    for chosen in (sites, sites[1:2]):
        for merit in measure(model, chosen, [(x, y)], F.cross_entropy, norm="frobenius", ratio=ratio):
            wider, edit = widened(model, merit.site)
            F.cross_entropy(wider(x), y).backward()
            assert merit.value == pytest.approx(column_gradients(edit), rel=1e-10)


def really(model: nn.Module, site: Site, x: Tensor, y: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The squared norm of the gradient of what is new in the network that has really grown."""
    if site.kind == "units":
        wider, edit = widened(model, site)
        loss_fn(wider(x), y).backward()
        return column_gradients(edit)
    (gradient,), _ = gradients(model, [site], [(x, y)], loss_fn)
    return gradient.square().sum().item()


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU])
def test_an_activation_in_place_on_tokens_hides_nothing(act: Any) -> None:
    """A linear layer gives a view for more than two dimensions, and what is done in place to a view rewrites its graph."""
    layers = [nn.Linear(3, 5), act(inplace=True), nn.Dropout(0.0), nn.Linear(5, 4), act(inplace=True), nn.Linear(4, 2)]
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(4, 6, 3, dtype=torch.float64), torch.randn(4, 6, 2, dtype=torch.float64)
    sites = find_sites(model, x, what="both", units=2)
    apart = nn.Sequential(*(act() if isinstance(layer, act) else layer for layer in layers))
    assert [str(site) for site in sites] == [str(site) for site in find_sites(apart, x, what="both", units=2)]
    assert [site.kind for site in sites].count("units") == 2 and len(sites) == 4
    for merit in measure(model, sites, [(x, y)], F.mse_loss, norm="frobenius"):
        assert merit.value == pytest.approx(really(model, merit.site, x, y, F.mse_loss), rel=1e-10)


class _Loop(nn.Module):
    """Blocks whose results the loop adds; ``skipped`` says which are left out in a pass."""

    def __init__(self, skipped: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.embed, self.head, self.skipped = nn.Linear(3, 6), nn.Linear(6, 2), skipped
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if not (self.training and self.skipped()):
                x = x + block(x)
        return self.head(x)


def test_units_and_blocks_of_a_loop_that_adds_are_measured_in_one_pass() -> None:
    """Such a block is put into the list while the pass runs, which moves the paths of all that come after it."""
    model, x, y = _Loop().double(), torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 2
    sites = find_sites(model, x, what="both", units=2)
    assert [site.kind for site in sites].count("units") == 4 and [site.kind for site in sites].count("block") == 3
    merits = measure(model, sites, [(x, y)], F.cross_entropy, norm="frobenius")
    for merit in merits:
        assert merit.value == pytest.approx(really(model, merit.site, x, y, F.cross_entropy), rel=1e-10)
    with Probe(model, merits, norm="frobenius") as probe:
        F.cross_entropy(model(x), y).backward()
    assert {str(m.site): m.value for m in probe.merits()} == pytest.approx(
        {str(m.site): m.value for m in merits}, rel=1e-10
    )


def test_blocks_that_are_left_out_at_random_are_left_out_with_the_candidates_too() -> None:
    model, x, y = (
        _Loop(lambda: bool(torch.rand(()) < 0.5)).double(),
        torch.randn(5, 3, dtype=torch.float64),
        torch.arange(5) % 2,
    )
    sites = find_sites(model, x, what="units", units=2)
    for seed in range(4):
        torch.manual_seed(seed)
        for merit in measure(model, sites, [(x, y)], F.cross_entropy, norm="frobenius"):
            torch.manual_seed(seed)
            assert merit.value == pytest.approx(really(model, merit.site, x, y, F.cross_entropy), rel=1e-10)


def test_a_step_with_a_probe_of_units_draws_what_it_would_draw_without() -> None:
    """Dropout draws more of them for the candidates than for the units."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(5, 3)
    sites = find_sites(model, x, what="units", units=2)
    drawn = []
    for probe in (nullcontext(), Probe(model, sites)):
        torch.manual_seed(0)
        with probe:
            model(x).sum().backward()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_a_model_that_takes_another_way_with_the_candidates_is_refused() -> None:
    ways = itertools.repeat(False)
    model, x = _Loop(lambda: next(ways)).double(), torch.randn(5, 3, dtype=torch.float64)
    sites = [site for site in find_sites(model, x, what="units", units=2) if site.path == "blocks.0.0"]
    ways = itertools.cycle([False] * 3 + [True] * 3)  # all blocks in one run, none in the next
    expected = r"'blocks.0.\d' was called \d times in the pass, and \d times when the model's code ran once more .* Measure in eval mode"
    with pytest.raises(MeasurementError, match=expected):
        measure(model, sites, [(x, torch.arange(5) % 2)], F.cross_entropy)


def test_a_part_that_the_model_runs_without_gradients_hinders_no_measurement() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.body(x).relu()
            return self.last(self.first(x).relu())

    model, x, y = Frozen().double(), torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 2
    (merit,) = measure(model, find_sites(model, x, what="units", units=2), [(x, y)], F.cross_entropy, norm="frobenius")
    assert merit.value == pytest.approx(really(model, merit.site, x, y, F.cross_entropy), rel=1e-10)


def test_a_reader_that_no_gradient_reaches_counts_for_nothing() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cut, self.out = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).tanh()
            return self.out(x) + self.cut(x).detach()

    model, x, y = Cut().double(), torch.randn(5, 3, dtype=torch.float64), torch.arange(5) % 2
    (merit,) = measure(model, find_sites(model, x, what="units"), [(x, y)], F.cross_entropy, norm="frobenius")
    wider, _ = widened(model, merit.site)
    F.cross_entropy(wider(x), y).backward()
    assert wider.cut.weight.grad is None
    assert merit.value == pytest.approx(wider.out.weight.grad[:, 4:].square().sum().item(), rel=1e-10)


def test_over_several_batches_sums_are_taken_before_any_norm() -> None:
    model, x, y = made("mlp")
    sites = find_sites(model, x, what="units")
    whole = measure(model, sites, [(x, y)], mean_loss, norm="frobenius")
    sites = [merit.site for merit in whole]  # of the rows that were measured
    parts = measure(model, sites, [(x[:4], y[:4]), (x[4:], y[4:])], mean_loss, norm="frobenius")
    assert [m.value for m in parts] == pytest.approx([m.value for m in whole], rel=1e-10)


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "the output": (mlp, (6, 4), "5", "its output is what the model returns"),
    "a layer norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (3, 3), "0", "by 1 (LayerNorm)"),
    "a stream that begins elsewhere": (Gated, (4, 5, 6), "down", "fails with more of them"),
    "recurrent": (lambda: Sequence(nn.LSTM(4, 5, batch_first=True)), (3, 5, 4), "inner", "recurrent"),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)), (3, 2, 4, 4), "0", "by 1 (GroupNorm)",
    ),
    "a literal size": (lambda: Literal(), (3, 4), "first", "fails with more of them"),
    "a shared layer": (lambda: Shared(), (3, 4), "first", "is called 2 times"),
    "frozen": (lambda: Frozen(), (3, 4), "0", "does not train"),
    "read under weight norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), weight_norm(nn.Linear(6, 2))), (3, 4), "0", "into 2 (ParametrizedLinear)",
    ),
    "made under spectral norm": (
        lambda: nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2)), (3, 4), "0", "parametrization",
    ),
    "read in groups": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 2, 1)),
        (3, 2, 4, 4), "0", "mixed with each other by 1",
    ),
    "read twice, once turned round": (lambda: Turned(), (3, 4), "first", "mixed with each other"),
}  # fmt: skip


class Sequence(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x)[0][:, -1])


class Literal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).view(-1, 2, 3).relu().view(-1, 6))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(self.first(x).relu()).relu())


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 6), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        units = self.first(x).relu()
        return self.out(torch.cat([units, units.flip(1)], 1))


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
        self[2].requires_grad_(False)


@pytest.mark.parametrize("name", REFUSED)
def test_a_width_that_cannot_grow_is_named_with_the_reason(name: str) -> None:
    build, shape, path, reason = REFUSED[name]
    torch.manual_seed(0)
    sites = find_sites(build().eval(), torch.randn(shape), what="units")
    assert path not in {site.path for site in sites}
    assert reason in dict(sites.skipped)[path] and reason in sites.explain()


class Between(nn.Module):
    """A function of the units between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], units: int = 6, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, units, bias=bias), nn.Linear(units, 5), nn.Linear(5, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.function(self.first(x))).tanh())


def largest(x: Tensor) -> Tensor:
    values, places = x.relu().topk(2, -1)
    return torch.zeros_like(x).scatter(-1, places, values)


def numbered(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], dtype=x.dtype)


COMPETING: dict[str, Callable[[Tensor], Tensor]] = {
    "the largest": largest,
    "the winner": lambda x: x * F.one_hot(x.argmax(-1), x.shape[-1]),
    "a running sum": lambda x: x.tanh().cumsum(-1),
    "a position": lambda x: x.relu() + 0.1 * numbered(x),
    "alternating": lambda x: torch.where(numbered(x) % 2 == 0, x.tanh(), x.relu()),
    "every third": lambda x: torch.where(numbered(x) % 3 == 0, x.tanh(), x.relu()),
    "the first apart": lambda x: torch.cat([x[..., :1].exp(), x[..., 1:].relu()], -1),
    "the first decides": lambda x: x + (x[..., :1].detach() > 0),
    "by halves": lambda x: torch.cat([x[..., : x.shape[-1] // 2].relu(), x[..., x.shape[-1] // 2 :].tanh()], -1),
    "the number above zero": lambda x: x * ((x > 0).sum(-1, keepdim=True) > 3),
    "the share above zero": lambda x: x.relu() * (x > 0).to(x).mean(-1, keepdim=True),
}


@pytest.mark.parametrize("name", COMPETING)
def test_units_that_depend_on_their_number_or_on_others_are_refused_after_one_sample(name: str) -> None:
    for units, more, bias in ((6, 1, True), (6, 2, False), (7, 2, True), (12, 1, False), (12, 0.5, True)):
        torch.manual_seed(0)
        model = Between(COMPETING[name], units, bias)
        sites = find_sites(model, torch.randn(1, 4), what="units", units=more)
        assert [site.path for site in sites] == ["second"] and "no more units" in dict(sites.skipped)["first"]


def test_the_reason_says_what_to_do() -> None:
    sites = find_sites(Between(COMPETING["alternating"]), torch.randn(2, 4), what="units")
    assert "depends on its number or on the other units" in dict(sites.skipped)["first"]
    assert "Compute each unit alone and all of them alike" in dict(sites.skipped)["first"]


ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp of exp": lambda x: x.exp().exp().clamp(max=9),
    "a fast sine": lambda x: (30 * x).sin(),
    "a cube": lambda x: x**3,
    "a step": lambda x: x + (x.round() - x).detach(),
    "a gate": lambda x: x * (x > 0),
    "a dead zone": lambda x: F.relu(x - 50),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_what_treats_units_alike_is_offered_however_large_they_may_become(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Between(ALONE[name]).to(dtype), torch.randn(3, 4, dtype=dtype)
    for example in (x, x[:1], torch.zeros_like(x)):
        sites = find_sites(model, example, what="units", units=2)
        assert [site.path for site in sites] == ["first", "second"], sites.explain()


def test_an_example_on_which_all_samples_are_equal_hides_no_width() -> None:
    """A norm over the batch then divides rounding errors by next to nothing."""
    for dtype in (torch.float32, torch.float64):
        model, _, _ = made("convolutions")
        sites = find_sites(model.to(dtype), torch.ones(4, 3, 8, 8, dtype=dtype), what="units")
        assert [site.path for site in sites] == MODELS["convolutions"][2], sites.explain()


def test_an_output_that_is_nearly_zero_where_its_terms_cancel_hides_no_width() -> None:
    """A regression that is solved, on an example whose target is zero: what is left is rounding, and changes with the order of the sum."""
    for seed in range(20):
        torch.manual_seed(seed)
        model, x = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 10)), torch.zeros(1, 10)
        with torch.no_grad():
            model[2].bias -= model(x)[0]
        assert len(find_sites(model, x, what="units", units=6)) == 1, seed


def test_a_shift_by_padding_costs_no_other_width() -> None:
    sites = find_sites(Between(lambda x: F.pad(x, (1, 0))[..., :-1]), torch.randn(2, 4), what="units")
    assert [site.path for site in sites] == ["second"]
    assert "as after a shift by padding" in dict(sites.skipped)["first"]


def test_a_hook_on_a_gradient_that_has_its_shape_keeps_the_layer_as_it_is() -> None:
    model, x, y = made("mlp")
    free = find_sites(model, x, what="units")[0]
    mask = torch.ones_like(model[2].weight)
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # takes any shape
    handle = model[2].weight.register_hook(lambda gradient: gradient * mask)
    sites = find_sites(model, x, what="units")
    assert not sites and "2.weight has a hook on its gradient" in dict(sites.skipped)["0"]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UnsupportedSite, match=r"2.weight has a hook .* a gradient of \(6, 10\) .* Remove the hook first"
    ):
        sensli.grow(model, free)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    handle.remove()
    growth = sensli.grow(model, free)
    mean_loss(model(x), y).backward()
    wide = torch.ones_like(model[2].weight)
    handle = model[2].weight.register_hook(lambda gradient: gradient * wide)
    with pytest.raises(UnsupportedSite, match=r"a gradient of \(6, 8\)"):
        sensli.undo(model, growth)
    handle.remove()
    sensli.undo(model, growth)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def lora(kind: type[nn.Module]) -> nn.Module:
    """A network with an adapter, as peft lays it out: the rank is known to its class, and in a configuration."""

    class Linear(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(6, 5).requires_grad_(False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 4, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 5, bias=False)})

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), Linear(), nn.LayerNorm(5))


def test_the_rank_of_an_adapter_of_peft_stays() -> None:
    ours = type("BaseTunerLayer", (nn.Module,), {"__module__": "adapters.layers"})
    assert "2.lora_A.default" in {site.path for site in find_sites(lora(ours), torch.randn(2, 3), what="units")}
    theirs = type("BaseTunerLayer", (nn.Module,), {"__module__": "peft.tuners.tuners_utils"})
    sites = find_sites(lora(theirs), torch.randn(2, 3), what="units")
    assert not sites and "is part of an adapter of peft (Linear)" in dict(sites.skipped)["2.lora_A.default"]


@pytest.mark.library
def test_a_model_of_peft_itself() -> None:
    peft = pytest.importorskip("peft", reason="adapters need peft")
    base = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["2"]))
    sites = find_sites(model, torch.randn(2, 4), what="units", units=2)
    assert "peft" in dict(sites.skipped)["base_model.model.2.lora_A.default"] and not sites


def test_a_site_prints_as_one_line_and_in_full_with_every_shape() -> None:
    model, x, _ = made("convolutions")
    site = find_sites(model, x, what="units", units=2)[0]
    assert str(site) == "+2 units in first (Conv2d 4 -> 6), read by second"
    told = site.describe(model)
    assert "first.weight: (4, 3, 3, 3) -> (6, 3, 3, 3)" in told and "norm.running_var: (4,) -> (6,)" in told
    assert (
        "depthwise.weight: (4, 1, 3, 3) -> (6, 1, 3, 3)" in told
        and "second.weight: (6, 4, 3, 3) -> (6, 6, 3, 3)" in told
    )


def test_a_site_goes_to_json_and_back_and_knows_when_it_is_stale() -> None:
    model, x, _ = made("concatenated")
    sites = find_sites(model, x, what="units")
    back = Site.from_dict(json.loads(json.dumps(sites[0].to_dict())))
    assert replace(back, point=back.point.by_path()) == sites[0].by_path()
    edit = Widening(model, sites[0])
    edit.build()
    edit.apply()
    with pytest.raises(UnknownSite, match="Call find_sites again"):  # its columns have moved
        Widening(model, sites[1])


@pytest.mark.parametrize(
    ("units", "more"), [(1, [1, 1]), (3, [3, 3]), (0.5, [4, 3]), (0.01, [1, 1])], ids=["1", "3", "half", "few"]
)
def test_units_is_a_number_or_a_share(units: Any, more: list[int]) -> None:
    model, x, _ = made("mlp")
    assert [site.move.more for site in find_sites(model, x, what="units", units=units)] == more


# --- random networks ---


class Random(nn.Module):
    """Pieces drawn by hypothesis, one after the other."""

    def __init__(self, pieces: list[tuple[str, int]], channels: int) -> None:
        super().__init__()
        self.pieces = pieces
        for number, (piece, width) in enumerate(pieces):
            for name, layer in self._layers(piece, channels, width).items():
                self.add_module(f"{name}{number}", layer)
            channels = channels + width if piece == "dense" else channels if piece in ("residual", "gate") else width
        self.out = nn.Linear(channels * 4, 3)

    @staticmethod
    def _layers(piece: str, channels: int, width: int) -> dict[str, nn.Module]:
        layers: dict[str, nn.Module] = {"norm": nn.BatchNorm2d(width), "act": nn.ReLU()}
        if piece == "residual":
            return {
                "down": nn.Conv2d(channels, width, 1),
                **layers,
                "up": nn.Conv2d(width, channels, 3, padding=1, bias=False),
            }
        if piece == "gate":
            return {"both": nn.Conv2d(channels, 2 * width, 1), "up": nn.Conv2d(width, channels, 1)}
        if piece == "depthwise":
            return {
                "map": nn.Conv2d(channels, width, 1),
                "deep": nn.Conv2d(width, width, 3, padding=1, groups=width),
                **layers,
            }
        if piece == "group":
            return {"map": nn.Conv2d(channels, width, 1), "norm": nn.GroupNorm(1, width), "act": nn.GELU()}
        return {"map": nn.Conv2d(channels, width, 3, padding=1), **layers}

    def forward(self, x: Tensor) -> Tensor:
        for number, (piece, _) in enumerate(self.pieces):
            part = {
                name: getattr(self, f"{name}{number}", None)
                for name in ("map", "deep", "norm", "act", "down", "up", "both")
            }
            if piece == "residual":
                x = x + part["up"](part["act"](part["norm"](part["down"](x))))
            elif piece == "gate":
                a, b = part["both"](x).chunk(2, 1)
                x = x + part["up"](a * torch.sigmoid(b))
            else:
                y = part["map"](x)
                y = part["deep"](y) if part["deep"] is not None else y
                y = part["act"](part["norm"](y))
                x = torch.cat([x, y], 1) if piece == "dense" else y
        return self.out(F.adaptive_avg_pool2d(x, 2).flatten(1))  # fmt: skip


PIECES = st.lists(
    st.tuples(
        st.sampled_from(["plain", "residual", "gate", "depthwise", "group", "dense"]), st.integers(min_value=2, max_value=5)
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


@pytest.mark.parametrize("examples", [10, pytest.param(40, marks=pytest.mark.thorough)])
def test_random_networks_keep_their_function_at_every_width(examples: int) -> None:
    seeds = st.integers(min_value=0, max_value=99)

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(pieces=PIECES, seed=seeds, training=st.booleans())
    def check(pieces: list[tuple[str, int]], seed: int, training: bool) -> None:
        check_random(pieces, seed, training)

    check()


def check_random(pieces: list[tuple[str, int]], seed: int, training: bool) -> None:
    torch.manual_seed(seed)
    model, x = Random(pieces, 3).double().train(training), torch.randn(3, 3, 4, 4, dtype=torch.float64)
    sites = find_sites(model, x, what="units", units=2)
    inner = sum(piece != "group" for piece, _ in pieces)
    assert len(sites) >= (1 if inner else 0)
    try:
        merits = measure(model, sites, [(x, torch.arange(3))], F.cross_entropy, norm="frobenius") if sites else []
    except ZeroMerits:
        reject()  # a network that is dead as it was drawn
    for merit in merits:
        wider, edit = widened(model, merit.site)
        assert torch.allclose(wider(x), model(x), rtol=1e-11, atol=1e-11)
        F.cross_entropy(wider(x), torch.arange(3)).backward()
        assert merit.value == pytest.approx(column_gradients(edit), rel=1e-9, abs=1e-25)
        redrawn(edit, 1)
        with torch.no_grad():
            first = copy.deepcopy(wider)(x)  # a norm in training remembers its batches
            redrawn(edit, 2)
            assert torch.equal(copy.deepcopy(wider)(x), first)


def test_a_pass_that_fails_leaves_the_next_one_measured() -> None:
    """A Probe in the user's own loop, which goes on after a batch that does not fit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(0, 2, (8,))
    sites = find_sites(model, x[:1], what="units", units=2)
    expected = measure(model, sites, [(x, y)], nn.functional.cross_entropy)
    with Probe(model, expected) as probe:
        with pytest.raises(RuntimeError):
            model(torch.randn(8, 5, dtype=torch.float64))
        nn.functional.cross_entropy(model(x), y).backward()
    assert probe.merits()[0].value == pytest.approx(expected[0].value, rel=1e-12)


def test_sites_that_another_growth_has_moved_are_refused() -> None:
    """A layer of the old width beside a layer that was widened, and a width whose units a new layer reads."""
    model, x, _ = made("mlp")
    before = model(x)
    for first, second in (("units", "linear"), ("linear", "units")):
        grown = copy.deepcopy(model)
        sites = find_sites(grown, x, what="both")
        of = {kind: next(site for site in sites if site.kind == kind) for kind in ("units", "linear")}
        sensli.grow(grown, of[first])
        with pytest.raises(UnknownSite, match=r"Call find_sites again\."):
            sensli.grow(grown, of[second])
        assert torch.allclose(grown(x), before, rtol=1e-12, atol=1e-12)


def test_a_width_that_cannot_be_planned_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Siting.of

    def fails_at_two(self: Siting, group: Any) -> Site:
        if "2" in group.makers:
            raise KeyError("something unforeseen")
        return plan(self, group)

    monkeypatch.setattr(Siting, "of", fails_at_two)
    sites = find_sites(mlp(), torch.randn(2, 4), what="units")
    assert [site.path for site in sites] == ["0"]
    assert "this width cannot be planned (KeyError: 'something unforeseen')" in dict(sites.skipped)["2"]
