"""The natural merit: equal to explicit loops over samples and positions, the same in any units, and zero on average for pure noise."""

import copy
import math
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from models import loss_fn
from oracle import extended
from sensli import Grower, Probe, find_sites, grow, measure, triggers
from sensli.errors import MeasurementError, ZeroMerits
from sensli.merits import norms
from sensli.merits.sums import MomentSum
from sensli.moves import factors


def damped(moment: torch.Tensor) -> torch.Tensor:
    return moment + 0.01 * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)


def merit_of(pairs: list[tuple[torch.Tensor, torch.Tensor]], samples: int) -> float:
    """By the formula, from the rows of all samples: inputs [rows, in] and cotangents of the loss of the sample [rows, out]."""
    rows = sum(len(x) for x, _ in pairs)
    gradient = sum(torch.outer(g, x) for xs, gs in pairs for x, g in zip(xs, gs, strict=True)) / samples
    a = sum(torch.outer(x, x) for xs, _ in pairs for x in xs) / samples
    s = sum(torch.outer(g, g) for _, gs in pairs for g in gs) / rows
    inverse_a, inverse_s = damped(a).inverse(), damped(s).inverse()
    noise = (a @ inverse_a).trace() * (s @ inverse_s).trace() / samples
    return float((gradient.T @ inverse_s @ gradient @ inverse_a).trace() - noise)


def rows_of(module: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of one sample by a loop over positions, for each group of a convolution."""
    if isinstance(module, nn.Linear):
        return [(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]))]
    assert module.stride == (1,) * len(module.kernel_size)
    x = pad(x, [side for p in reversed(module.padding) for side in (p, p)])
    xs, gs = [], []
    for place in product(*(range(length) for length in g.shape[2:])):
        window = tuple(slice(p, p + k) for p, k in zip(place, module.kernel_size, strict=True))
        xs.append(x[0][(slice(None), *window)])
        gs.append(g[0][(slice(None), *place)])
    x, g = torch.stack(xs), torch.stack(gs)
    return [(a.flatten(1), b) for a, b in zip(x.chunk(module.groups, 1), g.chunk(module.groups, 1), strict=True)]


def natural_of(model, names, data, part=lambda x: x):
    """The natural merit of the weights of some modules, summed: one sample after the other through the whole network."""
    total = 0.0
    for name in names:
        module, caught = model.get_submodule(name), {}
        handle = module.register_forward_hook(
            lambda m, args, out, caught=caught: caught.update(x=args[0].detach(), y=out)
        )
        groups: list[list] = []
        for x, y in data:
            loss = loss_fn(model(x[None]), y[None])
            (g,) = torch.autograd.grad(loss, caught["y"])
            groups.append(rows_of(module, part(caught["x"]), g))
        handle.remove()
        total += sum(merit_of(list(pairs), len(data)) for pairs in zip(*groups, strict=True))
    return total


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tokens(nn.Module):
    """Blocks on sequences, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(5) for _ in range(2)])
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Update(Block):
    """A block without its skip connection."""

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Added(Tokens):
    """The same with a loop that adds what the blocks give."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Update(5) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)


def conv(groups: int = 1):
    first = nn.Conv2d(2, 4, 3, padding=1)
    second = nn.Conv2d(4, 4, 3, padding=1, groups=groups)
    rest = [nn.ReLU(), nn.Flatten(), nn.Linear(4 * 5 * 4, 3)]
    return nn.Sequential(first, nn.ReLU(), second, *rest), (2, 5, 4)


CASES = {
    "plain": plain,
    "conv": conv,
    "grouped conv": lambda: conv(groups=2),
    "conv on lines": lambda: (
        nn.Sequential(nn.Conv1d(2, 4, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
        (2, 6),
    ),
    "twins": lambda: (Tokens(), (4, 5)),
    "twins in a loop that adds": lambda: (Added(), (4, 5)),
}


def case(name: str, samples: int = 16):
    torch.manual_seed(3)
    model, shape = CASES[name]()
    model = model.double()
    x = torch.randn(samples, *shape, dtype=torch.float64)
    return model, x, x.flatten(1)[:, :3].argmax(1)


def batches(x, y, *sizes: int):
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_equals_loops_over_samples_and_positions_in_the_extended_network(name):
    model, x, y = case(name)
    sites = find_sites(model, x[:1])
    assert {site.move.tag for site in sites} == {"twin" if name.startswith("twins") else "layer"}
    assert all(site.move.null == (name == "twins in a loop that adds") for site in sites if site.move.tag == "twin")
    found = measure(model, sites, batches(x, y, 9, 4, 3), loss_fn, norm="natural", ratio=False)
    assert found.norm == "natural" and "natural merit, over 3 batches (16 samples)" in str(found)
    expected = []
    for site in sites:
        big, ((*names,),) = extended(model, [site])
        expected.append(natural_of(big, [each.rpartition(".")[0] for each in names], list(zip(x, y, strict=True))))
    assert max(expected) > 0
    for merit, value in zip(found, expected, strict=True):
        assert merit.value == pytest.approx(max(value, 0.0), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("name", ["plain", "conv"])
def test_new_units_equal_loops_in_the_widened_network(name):
    model, x, y = case(name, samples=64)
    sites = find_sites(model, x[:1], what="units", units=2)
    found = measure(model, sites, batches(x, y, 40, 24), loss_fn, norm="natural", ratio=False)
    for merit in found:
        (axis,) = [axis for axis in merit.site.move.axes if axis.fill == "column"]
        wide, old, inner = copy.deepcopy(model), merit.site.move.units, axis.inner
        again = next(s for s in find_sites(wide, x[:1], what="units", units=2) if str(s) == str(merit.site))
        entries = merit.site.move._entries
        grow(wide, type(again)(again.point, type(again.move)(**{**again.move.__dict__, "_entries": entries})))
        reader = wide.get_submodule(axis.module.path)
        dim = 1 if isinstance(reader, nn.Conv2d) else -1
        part = lambda value, dim=dim, old=old, inner=inner: value.narrow(dim, old * inner, 2 * inner)  # noqa: E731
        value = natural_of(wide, [axis.module.path], list(zip(x, y, strict=True)), part)
        assert merit.value == pytest.approx(max(value, 0.0), rel=1e-10, abs=1e-10)
    assert found.best.value > 0


def test_a_gradient_that_is_not_of_a_map_is_refused_before_anything_runs():
    model, x, y = case("plain")
    sites = find_sites(model, x[:1], what="units", init="gradmax")
    with pytest.raises(MeasurementError, match=r"norm='natural' is not known for .*units? in 0 .*Use another norm"):
        measure(model, sites, [(x, y)], lambda *_: pytest.fail("ran"), norm="natural")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["plain", "conv", "twins"])
def test_the_ratio_is_to_the_natural_merits_of_the_existing_maps(name):
    model, x, y = case(name)
    sites = find_sites(model, x[:1])
    names = [path for path, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    data = list(zip(x, y, strict=True))
    mean = sum(max(natural_of(model, [each], data), 0.0) for each in names) / len(names)
    for merit in measure(model, sites, batches(x, y, 16), loss_fn, norm="natural"):
        assert merit.ratio == pytest.approx(merit.value / mean, rel=1e-9)


def test_a_weight_that_something_else_uses_too_is_not_compared_with():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 7, bias=False))
    model[0].weight = model[4].weight
    x, y = torch.randint(0, 7, (9, 2)), torch.randint(0, 7, (9,))
    tied = measure(model, find_sites(model, x), [(x, y)], loss_fn, norm="natural")[0]
    model[4].weight = nn.Parameter(model[4].weight.detach().clone(), requires_grad=False)
    free = measure(model, find_sites(model, x), [(x, y)], loss_fn, norm="natural")[0]
    assert tied.ratio == pytest.approx(free.ratio, rel=1e-5)


# --- any units ---


def factored_of(x, g, samples=None) -> factors.Factored:
    sums = factors.sums_of(0, (g.T @ x)[None], factors.of_features(x), factors.of_features(g), samples or len(x))
    return factors.factored_maps(sums)[0]


def merit(x, g, samples=None) -> float:
    return norms.natural_merit([factored_of(x, g, samples)], 1.0, [])


def test_scales_and_rotations_change_nothing_and_any_mixing_only_by_the_damping(monkeypatch):
    torch.manual_seed(0)
    x, g = torch.randn(60, 5).double(), torch.randn(60, 4).double()
    g = g + x[:, :4]
    value = merit(x, g)
    turned, mirrored = (torch.linalg.qr(torch.randn(n, n).double())[0] for n in (5, 4))
    assert merit(1e3 * x @ turned, 1e-4 * g @ mirrored) == pytest.approx(value, rel=1e-10)
    mixed, blended = (torch.eye(n).double() + 0.2 * torch.randn(n, n).double() for n in (5, 4))
    assert merit(x @ mixed, g @ blended) == pytest.approx(value, rel=0.05)
    monkeypatch.setattr(norms, "DAMPING", 1e-12)
    assert merit(x @ mixed, g @ blended) == pytest.approx(merit(x, g), rel=1e-7)


def test_a_network_in_other_units_has_the_same_merits():
    """The first map times c, the second divided by c, and the loss times k: the function of the network stays."""
    model, x, y = case("plain")
    sites = find_sites(model, x[:1])[:1]
    before = measure(model, sites, [(x, y)], loss_fn, norm="natural", ratio=False)[0].value
    with torch.no_grad():
        model[0].weight *= 50
        model[0].bias *= 50
        model[2].weight /= 50
    after = measure(model, sites, [(x, y)], lambda a, b: 7 * loss_fn(a, b), norm="natural", ratio=False)[0].value
    assert after == pytest.approx(before, rel=1e-9)
    assert measure(model, sites, [(x, y)], loss_fn, norm="frobenius", ratio=False)[0].value > 0


# --- noise ---


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("length, out, samples, positions", [(6, 4, 40, 1), (12, 9, 30, 4), (3, 20, 60, 2)])
@pytest.mark.slow
def test_pure_noise_is_worth_nothing_on_average(length, out, samples, positions, sampled, monkeypatch):
    if sampled:  # moments of about a third of the rows
        monkeypatch.setattr(factors, "_WORK", 0)
        monkeypatch.setattr(factors, "_LEAST", samples * positions // 3)
    torch.manual_seed(length)
    mixing = torch.randn(length, length).double()
    values, raw = [], length * out / samples
    for _ in range(400):
        rows = samples * positions
        values.append(merit(torch.randn(rows, length).double() @ mixing, torch.randn(rows, out).double(), samples))
    values = torch.tensor(values)
    error = values.std().item() / math.sqrt(len(values))
    # What is taken off for rows that are not in the moments is known to first order alone.
    assert abs(values.mean().item()) < 3.5 * error + (0.15 * raw if sampled else 0)
    assert raw > 20 * error


def test_the_jackknife_frees_from_noise_that_positions_have_in_common():
    """All positions of a sample see the same: the noise is as many times larger, which only batches tell."""
    model, x, _ = case("twins", samples=8)
    sites = find_sites(model, x[:1])
    data = [(torch.randn(4, 1, 5).double().expand(4, 6, 5), torch.randint(0, 3, (4,))) for _ in range(24)]
    plain = measure(model, sites, data, loss_fn, norm="natural", ratio=False)
    freed = measure(model, sites, iter(data), loss_fn, norm="natural", ratio=False, confidence=0.999, max_batches=24)
    assert freed.best.value < plain.best.value


# --- batches, processes, steps ---


@pytest.mark.parametrize("name", CASES)
def test_adds_up_over_batches_and_a_probe_sees_the_same(name):
    model, x, y = case(name)
    sites = find_sites(model, x[:1])
    whole = measure(model, sites, [(x, y)], loss_fn, norm="natural")
    split = measure(model, sites, batches(x, y, 1, 8, 7), loss_fn, norm="natural")
    with Probe(model, sites, norm="natural") as probe:
        loss_fn(model(x), y).backward()
    seen = probe.merits()
    assert seen.norm == "natural"
    for a, b, c in zip(whole, split, seen, strict=True):
        assert (b.value, b.ratio) == pytest.approx((a.value, a.ratio), rel=1e-9, abs=1e-12)
        assert (c.value, c.ratio) == pytest.approx((a.value, a.ratio), rel=1e-9, abs=1e-12)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["plain", "twins in a loop that adds"])
def test_a_scaled_loss_counts_as_the_loss_itself(name):
    model, x, y = case(name)
    sites = find_sites(model, x[:1])
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.zeros(()))
    plain = measure(model, sites, [(x, y)], loss_fn, norm="natural")
    with Probe(model, sites, norm="natural", scaler=scaler) as probe:
        scaler.scale(loss_fn(model(x[:8]), y[:8])).backward()
        scaler.update(16.0)
        scaler.scale(loss_fn(model(x[8:]), y[8:])).backward()
    for a, b in zip(plain, probe.merits(), strict=True):
        assert b.value == pytest.approx(a.value, rel=1e-9)


@pytest.mark.parametrize("stride, dilation", [(1, 1), (2, 1), (1, 2)])
def test_of_many_windows_an_even_sample_is_taken_whose_moment_comes_close(stride, dilation, monkeypatch):
    torch.manual_seed(0)
    x = (torch.randn(40, 1, 18, 14) + 0.1 * torch.randn(40, 3, 18, 14)).double()
    every = nn.functional.unfold(x, 3, dilation, 1, stride).transpose(1, 2).flatten(0, 1)
    size = [(length + 2 - 2 * dilation - 1) // stride + 1 for length in x.shape[2:]]
    windows = factors.Windows((3, 3), (stride, stride), (1, 1), (dilation, dilation))
    whole = factors.of_windows(x, windows, size)
    torch.testing.assert_close(whole.values[0], every, rtol=0, atol=0)
    assert whole.seen == whole.used == len(every)
    monkeypatch.setattr(factors, "_WORK", 0)
    some = factors.of_windows(x, windows, size)
    assert some.seen == len(every) and some.used < len(every) / 4
    known = {tuple(row) for row in every.tolist()}
    assert all(tuple(row) in known for row in some.values[0].tolist())
    distance = (some.moment() - whole.moment()).norm() / whole.moment().norm()
    assert distance < 0.3


@pytest.mark.parametrize("length", [1, 7, 255, 256, 301, 512, 700])
@pytest.mark.parametrize("groups", [1, 2])
def test_moments_are_summed_in_place_in_blocks_as_if_they_were_written_out(length, groups):
    torch.manual_seed(0)
    rows = [torch.randn(groups, count, length, dtype=torch.float64) for count in (3, 5, 2, 4)]
    first, second, third, fourth = (factors.Rows(each, 2 * each.shape[1]) for each in rows)
    moment = MomentSum()
    moment.add(factors.Outer(first))
    moment.add(
        factors.Outer(second, 0.25) + factors.Outer(third) + factors.Outer(fourth, 3.0)
    )  # a map used three times
    expected = sum(factor * each.mT @ each for factor, each in zip((2.0, 0.5, 2.0, 6.0), rows, strict=True))
    torch.testing.assert_close(moment.total(), expected)
    again = moment.total()
    assert again is moment.total() is moment.groups[0]  # of sums that have not changed a metric is made once
    moment.add(factors.Outer(first))
    torch.testing.assert_close(moment.total(), expected + 2 * rows[0].mT @ rows[0])


def test_a_dead_place_is_worth_nothing_and_does_not_fail():
    model, x, y = case("plain", samples=64)
    with torch.no_grad():
        model[0].bias -= 100
        model[2].bias += 1
    sites = find_sites(model, x[:1])
    found = measure(model, sites, [(x, y % 2)], loss_fn, norm="natural", ratio=False)
    assert found[0].value == 0 < found[1].value


def test_merits_that_are_all_noise_say_so():
    model, x, _ = case("grouped conv", samples=12)
    y = torch.randint(0, 3, (12,))
    with pytest.raises(ZeroMerits, match="none is larger than noise alone would make it"):
        measure(model, find_sites(model, x[:1]), [(x, y)], loss_fn, norm="natural")


def test_a_grower_takes_it_and_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(200, 4)
    y = x[:, :3].argmax(1)
    grower = Grower(model, preset="paper", example=x[:1], trigger=triggers.At(1), norm="natural", tau=0.0)
    growth = grower.step([(x[:100], y[:100]), (x[100:], y[100:])], loss_fn)
    assert growth is not None
    assert grower.history.record.decisions[0].norm == "natural"


def test_confidence_stops_early_with_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias[:7] -= 100  # one unit is alive: little can be gained there
    x = torch.randn(6400, 4)
    y = x[:, :3].argmax(1)
    sites = find_sites(model, x[:1])
    found = measure(model, sites, batches(x, y, *[100] * 64), loss_fn, norm="natural", confidence=0.95)
    assert found.clear and found.batches < 64
    assert found.best.site is found.ranked[0].site


def test_what_is_estimated_for_large_moments_agrees_with_small_ones(monkeypatch):
    torch.manual_seed(0)
    x, g = torch.randn(400, 60), torch.randn(400, 30)
    g = g + x[:, :30]
    exact = merit(x.double(), g.double())
    monkeypatch.setattr(norms, "_SMALL", 8)
    assert merit(x, g) == pytest.approx(exact, rel=1e-4)
    assert merit(x, g) == merit(x, g)


@pytest.mark.parametrize("name", ["plain", "twins"])
def test_half_precision_agrees_within_its_means(name):
    model, x, y = case(name, samples=64)
    exact = measure(model, find_sites(model, x[:1]), [(x, y)], loss_fn, norm="natural")
    model, x = model.bfloat16(), x.bfloat16()
    found = measure(model, find_sites(model, x[:1]), [(x, y)], loss_fn, norm="natural")
    for a, b in zip(exact, found, strict=True):
        assert b.value == pytest.approx(a.value, rel=0.1, abs=0.02)
        assert b.ratio == pytest.approx(a.ratio, rel=0.1, abs=0.02)
