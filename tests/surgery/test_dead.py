"""Dead units: recycled or removed on every width that can be found, with the function kept, everything following, and a way back."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, AdamW, Optimizer, Rprop
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import ranks
import sensli
from sensli import Growth, History, find_sites, recycle, remove_dead, replay, undo
from sensli.errors import MeasurementError, OptimizerError
from sensli.modules.running import untouched
from sensli.moves.stretching import Exchange
from sensli.moves.width.width import Axis, Width
from sensli.surgery.averaging import follow
from widths import normal

CHANGE = {"recycle": recycle, "remove": remove_dead}


class Convolutions(nn.Module):
    """A norm, a depthwise map, slopes by channel, a transposed map and channels that are flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.second = nn.ConvTranspose2d(4, 5, 2, stride=2, bias=False)
        self.slopes = nn.PReLU(5)
        self.hidden, self.out = nn.Linear(5 * 2 * 2, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.adaptive_avg_pool2d(self.slopes(self.second(F.relu6(self.depthwise(x)))), 2)
        return self.out(torch.tanh(self.hidden(x.flatten(1))))


class Gated(nn.Module):
    """Two ways to write a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
        self.norm, self.both, self.back, self.out = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.down(F.silu(self.gate(x)) * self.up(x)))
        a, b = self.both(x).chunk(2, -1)
        return self.out((x + self.back(a * b.sigmoid())).mean(1))


class Residual(nn.Module):
    """A stream that its layers both make and read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.inner, self.wide = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.mixed, self.out = nn.Conv2d(4, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.wide(F.relu(self.inner(x))))
        return self.out(F.relu(x + self.mixed(x)).mean((2, 3)))


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 3, 3, padding=1), nn.Conv1d(5, 4, 3, padding=1)
        self.c, self.out = nn.Conv1d(9, 3, 1), nn.Linear(3 * 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, F.gelu(self.a(x))], 1)
        x = torch.cat([x, F.gelu(self.b(x))], 1)
        return self.out(self.c(x).transpose(1, 2).flatten(1))  # channels lie inside of the positions


def mlp() -> nn.Sequential:
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (mlp, (6, 4), 2),
    "convolutions": (Convolutions, (4, 3, 8, 8), 3),
    "gated": (Gated, (4, 5, 6), 2),
    "residual": (Residual, (4, 3, 4, 4), 2),
    "concatenated": (Concatenated, (4, 2, 5), 3),
}
X, Y = normal(16, 4, seed=1), torch.arange(16) % 3


def widths(model: nn.Module, x: Tensor) -> list[tuple[str, Width]]:
    return [(site.path, site.move) for site in find_sites(model, x, what="units", units=1)]


def entries(model: nn.Module, axis: Axis, units: int, which: tuple[int, ...]) -> Tensor:
    """What a tensor of a model holds of these units."""
    exchange = Exchange(axis.dim, units, which, False, axis.start, axis.outer, axis.inner)
    return exchange.taken(getattr(model.get_submodule(axis.module.path), axis.name).detach())


def kill(model: nn.Module, move: Width, which: tuple[int, ...]) -> None:
    """Zeros in all that makes these units: every activation here has none of its own at zero."""
    for axis in move.axes:
        if axis.fill == "row" or (axis.fill in ("one", "zero") and not axis.name.startswith("running")):
            tensor = getattr(model.get_submodule(axis.module.path), axis.name)
            exchange = Exchange(axis.dim, move.units, which, False, axis.start, axis.outer, axis.inner)
            tensor.data = exchange.applied(tensor.detach())


def with_dead(name: str) -> tuple[nn.Module, Tensor, list[tuple[str, Width]], dict[str, tuple[int, ...]]]:
    """A model with dead units in every width."""
    torch.manual_seed(0)
    build, shape, count = MODELS[name]
    model, x = build().double(), normal(*shape, seed=1)
    found = widths(model, x)
    assert len(found) == count
    dead = {path: (0, move.units - 1) for path, move in found}
    for path, move in found:
        kill(model, move, dead[path])
    return model, x, found, dead


def step(model: nn.Module, *optimizers: Optimizer, x: Tensor = X) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.cross_entropy(model(x), torch.arange(len(x)) % 3).backward()
    for optimizer in optimizers:
        optimizer.step()


def everything(model: nn.Module, *optimizers: Optimizer) -> Any:
    """All that a refused call must leave alone, and that an undo gives back."""
    tensors = [(name, id(t), t.detach().clone()) for name, t in (*model.named_parameters(), *model.named_buffers())]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    groups = [[{**g, "params": [id(p) for p in g["params"]]} for g in each.param_groups] for each in optimizers]
    states = [{id(p): copy.deepcopy(dict(state)) for p, state in each.state.items()} for each in optimizers]
    numbers = [{k: v for k, v in vars(m).items() if isinstance(v, (int, tuple))} for m in model.modules()]
    return tensors, gradients, str(model), numbers, groups, states


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b) and a.stride() == b.stride()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def output(model: nn.Module, x: Tensor) -> Tensor:
    with untouched(model), torch.no_grad():
        torch.manual_seed(0)
        out: Tensor = model(x)
    return out


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def plain_dead() -> nn.Sequential:
    """Unit 2 of 8 and unit 5 of 8 never fire."""
    torch.manual_seed(0)
    model = mlp()
    model[2].p = 0.0
    with torch.no_grad():
        model[0].bias[[2, 5]] = -100.0
    return model


# --- the function, and the way back ---


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_recycled_units_are_new_and_the_output_stays_to_the_bit(name: str, training: bool) -> None:
    model, x, found, dead = with_dead(name)
    model.train(training)
    before, expected = everything(model), output(model, x)
    growths = recycle(model, x)
    assert sorted(growth.site.path for growth in growths) == sorted(dead) and model.training is training
    assert torch.equal(output(model, x), expected)
    touched = Counter(each.name for growth in growths for each in growth.resized)
    for growth in growths:
        which, (move,) = growth.site.move.which, [move for path, move in found if path == growth.site.path]
        assert set(dead[growth.site.path]) <= set(which) and not growth.parameters
        assert growth.site.parameters == growth.site.flops == 0
        for axis in move.axes:
            new = entries(model, axis, move.units, which)
            if touched[f"{axis.module.path}.{axis.name}"] > 1:
                continue  # the rows of a unit in the next layer, which is dead too, or its columns
            if axis.fill == "column":
                assert not new.any()
            elif axis.fill == "row" and new.dim() > 1:
                units = new.unflatten(axis.dim, (axis.outer, len(which), axis.inner)).movedim(axis.dim + 1, 0)
                assert units.flatten(1).any(1).all()  # each of them is something
            elif axis.fill == "one":
                assert bool((new == 1).all())
    for growth in reversed(growths):
        undo(model, growth)
    assert same(before, everything(model))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_removed_units_are_gone_and_the_output_stays(name: str, training: bool) -> None:
    model, x, found, dead = with_dead(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # its masks have another shape afterwards
    model.train(training)
    before, expected, size = everything(model), output(model, x), sum(p.numel() for p in model.parameters())
    growths = remove_dead(model, x)
    assert sorted(growth.site.path for growth in growths) == sorted(dead)
    torch.testing.assert_close(output(model, x), expected, rtol=1e-12, atol=1e-14)
    left = {growth.site.path: growth.site.move.units for growth in growths}
    assert [(path, move.units) for path, move in widths(model, x)] == [(p, left[p]) for p, _ in found if left[p] > 1]
    assert sum(p.numel() for p in model.parameters()) - size == sum(g.site.parameters for g in growths) < 0
    for growth in reversed(growths):
        undo(model, growth)
    assert same(before, everything(model))


def test_what_is_left_is_what_was_there() -> None:
    model = plain_dead()
    plain = copy.deepcopy(model)
    growths = remove_dead(model, X, [(X[:8], Y[:8]), (X[8:], Y[8:])])
    assert [str(growth.site) for growth in growths] == ["-2 dead units in 0 (Linear 8 -> 6), read by 3"]
    kept = [0, 1, 3, 4, 6, 7]
    assert torch.equal(model[0].weight, plain[0].weight[kept]) and torch.equal(model[0].bias, plain[0].bias[kept])
    assert torch.equal(model[3].weight, plain[3].weight[:, kept]) and torch.equal(model[3].bias, plain[3].bias)
    assert (model[0].out_features, model[3].in_features) == (6, 6)


def test_recycled_units_learn() -> None:
    model = plain_dead()
    optimizer = SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    assert not model[0].weight.grad[[2, 5]].any()
    (growth,) = recycle(model, X, [(X, Y)], optimizer=optimizer)
    assert str(growth.site) == "new rows for 2 dead units in 0 (Linear 8), read by 3"
    living = model[0].weight[[0, 1, 3, 4, 6, 7]]
    assert 0.2 < model[0].weight[[2, 5]].std() / living.std() < 5
    assert all(bias in model[0].bias[[0, 1, 3, 4, 6, 7]] for bias in model[0].bias[[2, 5]])
    step(model, optimizer)
    assert model[3].weight[:, [2, 5]].abs().min() > 0
    step(model, optimizer)
    assert model[0].weight.grad[[2, 5]].abs().max() > 0


@pytest.mark.parametrize("seed", range(3))
def test_random_rows_that_give_a_dead_unit_again_are_turned_round(seed: int) -> None:
    """Behind a ReLU all inputs are positive, so that a random unit is often zero on all of them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 3)).double()
    x = X.abs() + 3
    with torch.no_grad():
        model[0].bias[3:] = -100.0
    expected, before = model(x), everything(model)
    growths = recycle(model, x, [(x[:8], None), (x[8:], None)])
    assert growths[0].site.move.which[-37:] == tuple(range(3, 40))
    assert recycle(model, x) == [] and torch.equal(model(x), expected)
    undo(model, growths[0])
    assert same(before, everything(model))


def test_one_unit_stays_and_all_are_recycled() -> None:
    torch.manual_seed(0)
    model = mlp().eval()
    for parameter in model[0].parameters():
        parameter.data.zero_()
    expected = model(X)
    other = copy.deepcopy(model)
    remove_dead(model, X)
    assert model[0].out_features == 1 and model[0].weight.shape == (1, 4)
    torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=0)
    assert recycle(other, X)[0].site.move.which == tuple(range(8))
    assert (
        torch.equal(other(X), expected) and other[0].weight.abs().min() > 0
    )  # a spread of zero would never come alive


# --- which units are dead ---


def test_a_unit_that_is_alive_once_is_not_dead() -> None:
    model = plain_dead()
    with torch.no_grad():  # alive for the one sample where it is largest
        model[0].bias[2] = -(X @ model[0].weight[2]).sort().values[-2:].mean()
    batches = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    assert [growth.site.move.which for growth in recycle(model, X[:1], batches)] == [(5,)]


def test_dropout_does_not_make_a_unit_dead() -> None:
    torch.manual_seed(0)
    model = mlp().train()
    model[2].p = 0.999
    with torch.no_grad():
        model[0].bias.fill_(10.0)
    state = torch.get_rng_state()
    assert recycle(model, X[:1]) == [] and remove_dead(model, X[:1]) == []
    assert torch.equal(torch.get_rng_state(), state)


class Late(nn.Module):
    """Its second reader is called for large batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h) + (self.c(h) if len(x) > 2 else 0)


def test_a_unit_that_only_dropout_brings_to_life_is_not_dead() -> None:
    """Its value is the difference of two inputs that are always equal, unless one of them is dropped."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]]))
        model[1].bias.zero_()
    x = torch.ones(20, 2, dtype=torch.float64)
    for batches in (None, DataLoader(TensorDataset(x, x[:, :1]), 20, shuffle=True)):
        other = copy.deepcopy(model)
        (growth,) = recycle(other, x, batches)
        assert growth.site.move.which == (1,)
        assert recycle(other.eval(), x)[0].site.move.which == (0,), "without dropout it is dead"


def test_a_reader_that_is_not_seen_may_read_a_living_unit() -> None:
    model = Late().double()
    with torch.no_grad():
        model.a.bias[1] = -100.0
    assert recycle(model, X, [(X[:2], None)]) == []
    assert len(recycle(model, X, [(X[:2], None), (X, None)])) == 1


def test_batches_may_be_dicts_and_must_not_be_empty() -> None:
    model = plain_dead()
    before = everything(model)
    for change in CHANGE.values():
        with pytest.raises(MeasurementError, match="the batches are empty"):
            change(model, X, [])
        with pytest.raises(MeasurementError, match="batch 0 is"):
            change(model, X, [X])
    assert same(before, everything(model))
    assert len(recycle(model, {"input": X[:1]}, [{"input": X}])) == 1


# --- the optimizer ---

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "AdamW": lambda p: AdamW(p, amsgrad=True),
    "fused": lambda p: AdamW(p, fused=True),
    "Adafactor": Adafactor,
    "Rprop": Rprop,
    "ASGD": lambda p: torch.optim.ASGD(p, t0=1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
}


@pytest.mark.parametrize("change", CHANGE)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_optimizer_follows_and_goes_back_to_the_bit(kind: str, change: str) -> None:
    model = plain_dead()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(3):
        step(model, optimizer)
    before = everything(model, optimizer)
    growths = CHANGE[change](model, X, optimizer=optimizer)
    assert len(growths) == 1
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape
    for growth in reversed(growths):
        undo(model, growth, optimizer=optimizer)
    assert same(before, everything(model, optimizer))
    CHANGE[change](model, X, optimizer=optimizer)
    for _ in range(3):
        step(model, optimizer)
    assert all(p.isfinite().all() for p in model.parameters())
    if change == "recycle":
        assert model[3].weight[:, [2, 5]].abs().max() > 0


def test_moments_of_recycled_units_are_cleared_and_the_others_stay() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer)
    with torch.no_grad():
        model[0].bias[[2, 5]] = -100.0
    kept, old = [0, 1, 3, 4, 6, 7], {p: copy.deepcopy(s) for p, s in optimizer.state.items()}
    assert old[model[0].weight]["exp_avg"][[2, 5]].any()
    recycle(model, X, optimizer=optimizer)
    for parameter, dim in ((model[0].weight, 0), (model[0].bias, 0), (model[3].weight, 1)):
        for key in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][key].movedim(dim, 0)
            assert not moment[[2, 5]].any()
            assert torch.equal(moment[kept], old[parameter][key].movedim(dim, 0)[kept])
        assert optimizer.state[parameter]["step"] == 3
    assert same(optimizer.state[model[5].weight], old[model[5].weight])


def test_a_narrower_network_trains_as_if_it_had_always_been() -> None:
    model = plain_dead()
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(3):
        step(model, optimizer)
    wide = copy.deepcopy(model)
    other = AdamW(wide.parameters(), lr=0.01, weight_decay=0.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    remove_dead(model, X, optimizer=optimizer)
    for _ in range(3):
        step(model, optimizer)
        step(wide, other)
    torch.testing.assert_close(model(X), wide(X), rtol=1e-9, atol=1e-12)


class Odd(SGD):
    """Of another library: keeps something that nobody here knows."""


@pytest.mark.parametrize("change", CHANGE)
def test_a_refused_call_leaves_everything_as_it_was(change: str) -> None:
    model, x, _, _ = with_dead("mlp")
    optimizer = Odd(model.parameters(), lr=0.0, momentum=0.9)
    step(model, optimizer, x=x)
    optimizer.state[model[5].weight]["kept"] = torch.eye(3)  # of the second width: the first was changed by then
    before = everything(model, optimizer)
    with pytest.raises(OptimizerError, match=r"Odd cannot follow 5\.weight"):
        CHANGE[change](model, x, optimizer=optimizer)
    assert same(before, everything(model, optimizer))
    with pytest.raises(OptimizerError, match="contains no parameter of this"):
        CHANGE[change](model, x, optimizer=SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    assert same(before, everything(model, optimizer))


# --- several processes ---


def recycle_in_two_processes() -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    network = plain_dead()
    with torch.no_grad():  # alive on the data of one rank alone
        sizes = [(x @ network[0].weight[1]).max() for x in X.chunk(world)]
        network[0].bias[1] = -(sizes[0] + sizes[1]) / 2
    model = DistributedDataParallel(network)
    optimizer = AdamW(network.parameters(), lr=0.01)
    x = X.chunk(world)[rank]
    step(model, optimizer, x=x)
    with torch.no_grad():
        network[0].bias[1] = -(sizes[0] + sizes[1]) / 2
        network[0].weight[1] = plain_dead()[0].weight[1]
    found = []
    for change in (recycle, remove_dead):
        with torch.no_grad():
            network[0].bias[5] = -100.0
        found += [growth.site.move.which for growth in change(model, x, [(x, None)], optimizer=optimizer)]
        step(model, optimizer, x=x)
    values = torch.cat([p.detach().flatten() for p in network.parameters()])
    copies = [torch.empty_like(values) for _ in range(world)]
    dist.all_gather(copies, values)
    assert all(torch.equal(each, values) for each in copies)
    return found


@pytest.mark.process
def test_two_processes_recycle_what_is_dead_on_both(tmp_path: Path) -> None:
    assert ranks.run(recycle_in_two_processes, 2, tmp_path) == [(2, 5), (5,)]


# --- where the entries lie ---


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_exchange_and_its_way_back(data: st.DataObject) -> None:
    units, outer, inner, start, rest = (data.draw(st.integers(low, 4)) for low in (1, 1, 1, 0, 0))
    which = tuple(sorted(data.draw(st.sets(st.integers(0, units - 1), min_size=1))))
    dim, removed = data.draw(st.integers(0, 2)), data.draw(st.booleans())
    exchange = Exchange(dim, units, which, removed, start, outer, inner)
    shape = [2, 3, 2]
    shape[dim] = start + outer * units * inner + rest
    tensor = normal(*shape)
    taken = exchange.taken(tensor)
    assert taken.shape[dim] == exchange.fresh == outer * len(which) * inner
    gone = [start + (g * units + u) * inner + i for g in range(outer) for u in which for i in range(inner)]
    left = [place for place in range(shape[dim]) if place not in gone]
    assert torch.equal(taken, tensor.index_select(dim, torch.tensor(gone)))
    assert torch.equal(exchange.left(tensor), tensor.index_select(dim, torch.tensor(left, dtype=torch.long)))
    new = exchange.applied(tensor, torch.full_like(taken, 7.0))
    assert new.shape[dim] == shape[dim] + exchange.change
    if not removed:
        assert bool((new.index_select(dim, torch.tensor(gone)) == 7).all()) and torch.equal(
            exchange.left(new), exchange.left(tensor)
        )
    assert torch.equal(exchange.reverted(new, taken), tensor)


# --- the record ---


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", CHANGE)
def test_a_record_is_json_and_replays(change: str, name: str) -> None:
    model, x, _, _ = with_dead(name)
    model.eval()
    history = History(CHANGE[change](model, x))
    read = History.from_json(history.to_json())
    assert read == history and str(read) == str(history)
    torch.manual_seed(1)
    again = replay(MODELS[name][0]().double(), read).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    expected = again(x)
    for growth in reversed(read):  # what was there is not known: units that nothing reads come
        undo(again, growth)
    torch.testing.assert_close(again(x), expected, rtol=1e-12, atol=1e-14)
    assert shapes(again) == shapes(MODELS[name][0]()) and str(again) == str(MODELS[name][0]().eval())


@pytest.mark.parametrize("change", CHANGE)
def test_after_a_step_an_undo_gives_units_that_nothing_reads(change: str) -> None:
    model = plain_dead()
    optimizer = Rprop(model.parameters())
    step(model, optimizer)
    (growth,) = CHANGE[change](model, X, optimizer=optimizer)
    step(model, optimizer)
    kept = model(X)
    undo(model, growth, optimizer=optimizer)
    assert model[3].weight.shape == (6, 8) and not model[3].weight[:, [2, 5]].any()
    assert model[0].weight[[2, 5]].abs().min() > 0 and model[0].out_features == 8
    if change == "remove":
        torch.testing.assert_close(model(X), kept, rtol=1e-12, atol=1e-14)
    before = model[3].weight.detach().clone()
    step(model, optimizer)
    assert (model[3].weight != before)[:, [2, 5]].any()  # Rprop's own steps began again too


@pytest.mark.parametrize("which", [[], [5, 2], [2, 2], [-1], [8], list(range(8)), "ab", [1.5]], ids=str)
def test_a_damaged_record_is_refused(which: Any) -> None:
    model = plain_dead()
    data = remove_dead(model, X)[0].to_dict()
    data["site"]["move"]["which"] = which
    with pytest.raises(sensli.errors.HistoryError, match="damaged"):
        Growth.from_dict(data)


def test_a_checkpoint_resumes_to_the_bit(tmp_path: Path) -> None:
    def adam(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01, amsgrad=True)

    def plain() -> nn.Module:
        return mlp().eval()

    model = plain()
    optimizer, history = adam(model), History()
    for round_ in range(2):
        for change in (recycle, remove_dead):
            step(model, optimizer)
            with torch.no_grad():
                model[0].bias[1 + round_] = -100.0
            history = History([*history, *change(model, X, optimizer=optimizer)])
        site = find_sites(model, X[:2])[-1]
        history.append(sensli.grow(model, site, optimizer=optimizer))
    assert len(history) == 6
    sensli.save_checkpoint(tmp_path / "a", model, optimizer=optimizer, history=history)
    again = sensli.load_checkpoint(tmp_path / "a", plain, adam)
    again.model.eval()
    for _ in range(3):
        step(model, optimizer)
        step(again.model, again.optimizer)
    theirs = again.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("change", CHANGE)
def test_an_average_follows_and_goes_back_to_the_bit(change: str) -> None:
    model = plain_dead()
    average = AveragedModel(model)
    for _ in range(3):
        step(model, SGD(model.parameters(), lr=0.1))
        average.update_parameters(model)
    (growth,) = CHANGE[change](model, X)
    follow(average, growth, model)
    if change == "recycle":
        assert torch.equal(average.module[0].weight[[2, 5]], model[0].weight[[2, 5]])
    average.update_parameters(model)
    average = AveragedModel(plain_dead())
    model = plain_dead()
    before = everything(average.module)
    (growth,) = CHANGE[change](model, X)
    follow(average, growth, model)
    undo(average.module, growth)
    assert same(before, everything(average.module))
