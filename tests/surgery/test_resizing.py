"""Everything that an optimizer keeps follows a parameter that gets new entries: every optimizer of torch, every way to step."""

from __future__ import annotations

import collections
import copy
import gc
import inspect
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer

from optimizers import KEEPING_COPIES, ranger
from sensli import find_sites, grow, insert, undo
from sensli.errors import FunctionChanged, OptimizerError, UnsupportedSite
from sensli.moves.sites import Site
from sensli.moves.stretching import Resize, Stretch, is_own
from sensli.surgery.growth import check_joining
from sensli.surgery.optimizers import plan_resizing, plan_shrinking
from widths import normal, width_site

REFUSED = {torch.optim.LBFGS: "flat vector", torch.optim.SparseAdam: "sparse gradients"}
OPTIMIZERS = [
    cls
    for _, cls in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(cls, Optimizer) and cls is not Optimizer and cls not in REFUSED
]
EXTRA: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "ASGD": {"t0": 1, "lambd": 0.1},
}
WAYS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}
MORE = 3


def ways_to_step() -> list[Any]:
    found = []
    for cls in OPTIMIZERS:
        known = inspect.signature(cls).parameters
        ways = {name: way for name, way in WAYS.items() if way.keys() <= known.keys()} or {"plain": {}}
        options = {"lr": 0.01, **EXTRA.get(cls.__name__, {})}
        found += [pytest.param(cls, {**options, **way}, id=f"{cls.__name__}-{name}") for name, way in ways.items()]
    return found


def network(units: int = 4) -> nn.Sequential:
    """Wider before than after, so that Muon's factor for tall matrices is 1 at either size."""
    model = nn.Sequential(nn.Linear(9, units), nn.Tanh(), nn.Linear(units, 3)).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.data = normal(*parameter.shape, seed=number)
    return model


def rows(value: float | None = None) -> tuple[Tensor, Tensor]:
    drawn = normal(MORE, 9, seed=10), normal(MORE, seed=11)
    return drawn if value is None else (torch.full_like(drawn[0], value), torch.full_like(drawn[1], value))


def wider(model: nn.Module, given: tuple[Tensor, ...] | None = None) -> Site:
    return width_site(model, "0", "2", MORE, rows=rows() if given is None else given)


def make(cls: type[Optimizer], options: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    """One optimizer; beside Muon, which takes matrices only, an AdamW for the rest."""
    if cls is not Muon:
        return [cls(model.parameters(), **options)]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [cls(matrices, **options), AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)]


def step(model: nn.Module, optimizers: list[Optimizer], number: int, frozen: bool = False) -> None:
    x, y = normal(8, 9, seed=100 + number), normal(8, 3, seed=200 + number)
    for optimizer in optimizers:
        optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    if frozen:  # the new entries get no gradient
        model[0].weight.grad[4:], model[0].bias.grad[4:], model[2].weight.grad[:, 4:] = 0, 0, 0
    for optimizer in optimizers:
        optimizer.step()


def old_part(model: nn.Module) -> list[Tensor]:
    """What was there before, by hand."""
    return [model[0].weight[:4], model[0].bias[:4], model[2].weight[:, :4], model[2].bias]


def everything(model: nn.Module, optimizers: list[Optimizer]) -> Any:
    """All that a refused call must leave alone: values, gradients, attributes, groups and states, by the identity of the parameters."""
    tensors = [
        (name, id(p), p.detach().clone(), None if p.grad is None else p.grad.clone())
        for name, p in model.named_parameters()
    ]
    groups = [[{**g, "params": [id(p) for p in g["params"]]} for g in each.param_groups] for each in optimizers]
    states = [
        {str(p) if isinstance(p, str) else id(p): copy.deepcopy(dict(state)) for p, state in each.state.items()}
        for each in optimizers
    ]
    return tensors, str(model), [sorted(m.__dict__.keys()) for m in model.modules()], groups, states


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, types.SimpleNamespace):
        return same(vars(a), vars(b))
    if isinstance(a, (list, tuple, collections.deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


# --- what the states become ---


@pytest.mark.parametrize(("cls", "options"), [way for way in ways_to_step() if "Adafactor" not in way.id])
def test_old_entries_go_on_as_if_nothing_had_happened(cls: type[Optimizer], options: dict[str, Any]) -> None:
    """New units that nothing reads, and that get no gradient: the old ones are trained as in the small network."""
    plain, model = network(), network()
    small, optimizers = make(cls, options, plain), make(cls, options, model)
    for number in range(3):
        step(plain, small, number)
        step(model, optimizers, number)
    grow(model, wider(model, rows(0.0)), optimizer=optimizers, check=normal(5, 9))
    for number in range(3, 6):
        step(plain, small, number)
        step(model, optimizers, number, frozen=True)
        for ours, theirs in zip(old_part(model), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)  # sums have another order


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_keeps_the_pace_of_the_old_entries(foreach: bool) -> None:
    """It limits the step of a whole tensor by its mean square: new entries with no variance at all would slow the others down tenfold."""
    plain, model = network(), network()
    small, optimizers = (make(Adafactor, {"lr": 0.01, "foreach": foreach}, net) for net in (plain, model))
    for number in range(200):
        step(plain, small, number)
        step(model, optimizers, number)
    grow(model, wider(model), optimizer=optimizers)
    for number in range(200, 205):
        before = [[p.detach().clone() for p in parts] for parts in (old_part(model), plain.parameters())]
        step(plain, small, number)
        step(model, optimizers, number)
        ours, theirs = (
            [(p - q).norm() for p, q in zip(parts, old, strict=True)]
            for parts, old in zip((old_part(model), plain.parameters()), before, strict=True)
        )
        assert all(0.5 < a / b < 2 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize(("cls", "options"), ways_to_step())
def test_states_are_padded_where_the_old_entries_lie(cls: type[Optimizer], options: dict[str, Any]) -> None:
    model = network()
    optimizers = make(cls, options, model)
    for number in range(3):
        step(model, optimizers, number)
    before = [{id(p): copy.deepcopy(dict(state)) for p, state in each.state.items()} for each in optimizers]
    grow(model, wider(model), optimizer=optimizers)
    seen = set()
    for optimizer, states in zip(optimizers, before, strict=True):
        for parameter, state in optimizer.state.items():
            old = states[id(parameter)]
            assert list(state) == list(old)
            for key, value in state.items():
                seen.add(key)
                expected = by_hand(model, optimizer, parameter, key, old[key])
                assert same(value, expected), (key, value, expected)
    assert "step" in seen or cls in (SGD, Muon)
    for number in range(3, 6):
        step(model, optimizers, number)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model[2].weight[:, 4:].abs().min() > 0  # the new units have learned
    assert not torch.equal(model[0].weight[4:], rows()[0])


def by_hand(model: nn.Module, optimizer: Optimizer, parameter: nn.Parameter, key: str, old: Any) -> Any:
    """The padded state, with slices."""
    if parameter is model[2].bias or not isinstance(old, Tensor) or old.ndim == 0:
        return old
    dim = 1 if parameter is model[2].weight else 0
    if old.shape[dim] == 1:  # a factor without that axis
        return old
    shape = list(old.shape)
    shape[dim] = 4 + MORE
    if isinstance(optimizer, Adafactor):
        new = old.mean(dim, keepdim=True).expand(shape).clone()
    elif key == "ax":
        new = parameter.detach().clone()
    else:
        start = {"sum": 0.5 if isinstance(optimizer, Adagrad) else 0.0, "step_size": 0.01}
        new = torch.full(shape, start.get(key, 0.0), dtype=old.dtype)
    new.narrow(dim, 0, 4).copy_(old)
    return new


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("cls", "options"), ways_to_step())
def test_undo_is_to_the_bit_if_no_step_was_taken(cls: type[Optimizer], options: dict[str, Any], steps: int) -> None:
    model = network()
    optimizers = make(cls, options, model)
    for number in range(steps):
        step(model, optimizers, number)
    before = everything(model, optimizers)
    growth = grow(model, wider(model), optimizer=optimizers)
    assert not same(before, everything(model, optimizers))
    undo(model, growth, optimizer=optimizers)
    assert same(before, everything(model, optimizers))
    growth = grow(model, wider(model), optimizer=optimizers)
    for number in range(2):
        step(model, optimizers, number)
    kept = [part.detach().clone() for part in old_part(model)]
    undo(model, growth, optimizer=optimizers)
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    step(model, optimizers, 9)


def test_a_state_that_did_not_follow_stays() -> None:
    model = network()
    optimizers = make(AdamW, {}, model)
    step(model, optimizers, 0)
    before = everything(model, optimizers)
    growth = grow(model, wider(model))
    undo(model, growth, optimizer=optimizers)
    assert same(before, everything(model, optimizers))


def test_two_widenings_and_a_layer_are_taken_back_in_turn() -> None:
    model = network()
    optimizers = make(AdamW, {"amsgrad": True}, model)
    step(model, optimizers, 0)
    states, growths = [], []
    for site in (wider, lambda m: width_site(m, "0", "2", 1), lambda m: find_sites(m, normal(2, 9))[0]):
        states.append(everything(model, optimizers))
        growths.append(grow(model, site(model), optimizer=optimizers))
    for growth, state in zip(reversed(growths), reversed(states), strict=True):
        undo(model, growth, optimizer=optimizers)
        assert same(state, everything(model, optimizers))


def test_the_layout_of_a_convolution_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    model = model.to(memory_format=torch.channels_last)
    optimizer = AdamW(model.parameters())
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    model(x).square().mean().backward()
    optimizer.step()
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    growth = grow(model, width_site(model, "0", "3", 2, norm="1"), optimizer=optimizer, check=x)
    assert {each.name for each in growth.resized} == {
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.weight",
    }  # fmt: skip
    padded = optimizer.state[model[3].weight]["exp_avg"]
    assert padded.shape == model[3].weight.shape == (2, 6, 3, 3)
    assert padded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(padded[:, :4], moments["3.weight"]) and not padded[:, 4:].any()
    assert torch.equal(optimizer.state[model[1].weight]["exp_avg"][:4], moments["1.weight"])
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_a_single_unit_gets_others() -> None:
    """An axis of length 1 looks like one that was averaged away."""
    for cls, options in ((AdamW, {}), (Adafactor, {}), (Adagrad, {"initial_accumulator_value": 0.1})):
        model = network(1)
        optimizer = cls(model.parameters(), **options)
        step(model, [optimizer], 0)
        grow(model, width_site(model, "0", "2", MORE), optimizer=optimizer, check=normal(5, 9))
        for parameter in model.parameters():
            sizes = {tuple(v.shape) for v in optimizer.state[parameter].values() if isinstance(v, Tensor) and v.ndim}
            full, few = tuple(parameter.shape), (*parameter.shape[:-1], 1)
            assert sizes == ({full} if cls is not Adafactor or parameter.ndim < 2 else {few, (1, full[-1])})
        step(model, [optimizer], 1)


def test_several_stretches_of_one_axis_and_back() -> None:
    """The gates of a fused map: two groups of units one after the other, and a third part that stays."""
    parameter = nn.Parameter(normal(8, 2))
    resize = Resize("gates", parameter, (Stretch(0, 3, 1, start=3), Stretch(0, 3, 2, start=0)), (8, 2))
    moment = torch.arange(16.0).reshape(8, 2)
    wide = resize.stretched(moment, -1.0)
    assert wide.shape == resize.new_shape == (11, 2)
    assert wide[:, 0].tolist() == [0, 2, 4, -1, -1, 6, 8, 10, -1, 12, 14]
    assert torch.equal(resize.shrunk(wide), moment)
    assert is_own(resize)[:, 0].tolist() == [True] * 3 + [False] * 2 + [True] * 3 + [False] + [True] * 2


@pytest.mark.library
def test_the_adafactor_of_transformers_keeps_factors_without_their_axis() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    model = network(9)  # a square matrix: rows and columns are told apart by name
    optimizer = optimization.Adafactor(
        model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9
    )
    step(model, [optimizer], 0)
    before = copy.deepcopy(dict(optimizer.state[model[0].weight]))
    grow(model, width_site(model, "0", "2", MORE), optimizer=optimizer)
    state = optimizer.state[model[0].weight]
    assert torch.equal(state["exp_avg_sq_row"][:9], before["exp_avg_sq_row"]) and state["exp_avg_sq_row"].shape == (12,)
    assert torch.equal(state["exp_avg_sq_col"], before["exp_avg_sq_col"])
    assert state["exp_avg"].shape == (12, 9) and not state["exp_avg"][9:].any()
    step(model, [optimizer], 1)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("name", [name for name in KEEPING_COPIES if name != "ASGD"])  # its mean is not read by a step
def test_copies_of_the_parameter_do_not_pull_new_entries_to_zero(name: str, steps: int) -> None:
    """At a rate of zero the new rows stay where they are, whatever is synchronised; the old ones go on as in the small network."""
    plain, model = network(), network()
    small, optimizer = (KEEPING_COPIES[name](net.parameters()) for net in (plain, model))
    for number in range(steps):
        step(plain, [small], number)
        step(model, [optimizer], number)
    grow(model, wider(model), optimizer=optimizer, check=normal(5, 9))
    for each in (small, optimizer):
        each.param_groups[0].update(lr=0.0, momentum=0.0, dampening=1.0)
    for number in range(6):
        step(plain, [small], number)
        step(model, [optimizer], number)
        torch.testing.assert_close(model[0].weight[4:], rows()[0], rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(model[0].bias[4:], rows()[1], rtol=1e-14, atol=1e-15)
        assert not model[2].weight[:, 4:].any()
        for ours, theirs in zip(old_part(model), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_new_parameters_join_a_wrapper_that_keeps_copies_of_all() -> None:
    model = network()
    optimizer = KEEPING_COPIES["Lookahead"](model.parameters())
    step(model, [optimizer], 0)
    before = everything(model, [optimizer, optimizer.base])
    growth = insert(model, find_sites(model, normal(2, 9))[0], optimizer=optimizer)
    for name in growth.parameters:
        new = model.get_parameter(name)
        assert torch.equal(optimizer.state[new]["slow_params"], new)
    undo(model, growth, optimizer=optimizer)
    assert same(before, everything(model, [optimizer, optimizer.base]))
    insert(model, find_sites(model, normal(2, 9))[0], optimizer=optimizer)
    for number in range(4):
        step(model, [optimizer], number)


class Heavy(SGD):
    """Momentum under any name."""

    key = "momentum_buffer"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault(self.key, torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(buffer, alpha=group["lr"])


@pytest.mark.parametrize("key", ["momentum_buffer", "exp_avg", "m", "velocity"])
def test_momentum_is_not_taken_for_a_copy(key: str) -> None:
    """Not even where it is near: the gradient of |w|^2 / 2 is w. A name that tells nothing must not be near."""
    model = network()
    optimizer = type("Other", (Heavy,), {"key": key})(model.parameters(), lr=0.01)
    if key == "velocity":
        step(model, [optimizer], 0)
    else:
        sum(p.square().sum() for p in model.parameters()).div(2).backward()
        optimizer.step()
        torch.testing.assert_close(optimizer.state[model[0].weight][key], model[0].weight.detach(), rtol=0.02, atol=0)
    grow(model, wider(model), optimizer=optimizer)
    assert not optimizer.state[model[0].weight][key][4:].any()
    assert not optimizer.state[model[0].bias][key][4:].any()


@pytest.mark.parametrize("state", [0.0, 1.0])
def test_a_constant_state_of_a_constant_parameter_is_no_copy(state: float) -> None:
    parameter = nn.Parameter(torch.full((4,), state))
    optimizer = Odd([parameter], lr=0.1)
    optimizer.state[parameter]["gain"] = torch.full((4,), state)
    resize = Resize("it", parameter, (Stretch(0, 4, 1),), (4,))
    plan = plan_resizing(optimizer, [resize])
    plan.build()
    parameter.data = torch.tensor([*[state] * 4, 7.0])
    plan.apply()
    assert optimizer.state[parameter]["gain"].tolist() == [*[state] * 4, 0.0]


def test_a_copy_follows_what_a_method_moves() -> None:
    """Old entries that a growth multiplies or shifts: their slow weights would pull them back."""
    parameter = nn.Parameter(normal(4, 3))
    optimizer = ranger([parameter])
    slow = parameter.detach() + 0.1 * normal(4, 3, seed=1)
    optimizer.state[parameter].update(slow_buffer=slow, momentum_buffer=normal(4, 3, seed=2))
    old, momentum = parameter.detach().clone(), optimizer.state[parameter]["momentum_buffer"]
    resize = Resize("it", parameter, (Stretch(0, 4, 2),), (4, 3))
    plan = plan_resizing(optimizer, [resize])
    plan.build()
    parameter.data = torch.cat([0.5 * old, normal(2, 3, seed=3)])
    plan.apply()
    state = optimizer.state[parameter]
    assert torch.equal(state["slow_buffer"][4:], parameter[4:])
    torch.testing.assert_close(state["slow_buffer"][:4] - parameter[:4], slow - old, rtol=1e-12, atol=1e-14)
    assert torch.equal(state["momentum_buffer"][:4], momentum) and not state["momentum_buffer"][4:].any()
    back = plan_shrinking(optimizer, [resize])
    back.build()
    parameter.data = old
    back.apply()
    assert torch.equal(state["slow_buffer"], slow) and torch.equal(state["momentum_buffer"], momentum)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cls", [Adagrad, torch.optim.Rprop, torch.optim.Adam])
def test_other_types_of_numbers(cls: type[Optimizer], dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    optimizer = cls([parameter], lr=0.1)
    parameter.abs().float().sum().backward()
    optimizer.step()
    alive = parameter.abs()
    fresh = cls([other := nn.Parameter(torch.ones(1, 2, dtype=dtype))], lr=0.1)
    other.grad = torch.zeros_like(other)
    fresh.step()
    widened(optimizer, Resize("it", parameter, (Stretch(0, 2, 1),), (2, 2)))
    for key, value in optimizer.state[parameter].items():
        if value.ndim:  # what a parameter has that was there from the start and never had a gradient
            assert value.dtype == fresh.state[other][key].dtype and torch.equal(value[2:], fresh.state[other][key]), key
    parameter.grad = None
    parameter.abs().float().sum().backward()
    optimizer.step()
    assert parameter.grad is not None and parameter.grad.shape == (3, 2) and alive.shape == (2, 2)


def widened(optimizer: Optimizer, resize: Resize) -> None:
    """An edit of one parameter, by hand."""
    plan = plan_resizing(optimizer, [resize])
    plan.build()
    resize.tensor.grad, resize.tensor.data = None, resize.stretched(resize.tensor.detach(), 1.0)
    plan.apply()
    plan.settle()


def test_a_sparse_gradient_is_kept_as_a_dense_one() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    widened(optimizer, Resize("weight", embedding.weight, (Stretch(1, 3, 1),), (5, 3)))
    assert embedding.weight.grad.tolist() == [[0.0] * 4, [1.0] * 3 + [0.0], [1.0] * 3 + [0.0], [0.0] * 4, [0.0] * 4]
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


# --- training goes on ---


@pytest.mark.parametrize("alive", [False, True], ids=["", "an old graph is alive"])
def test_gradients_reach_the_new_entries_and_hooks_stay(alive: bool) -> None:
    model = network()
    weight, seen = model[0].weight, []
    weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    x = normal(8, 9)
    loss = model(x).square().mean()
    if not alive:
        loss.backward()
        seen.clear()
    growth = grow(model, wider(model))  # which asks the hook whether it takes the new shape
    seen.clear()
    model[2].weight.data[:, 4:] = 0.5
    weight.grad = None
    model(x).square().mean().backward()
    assert seen == [(7, 9), (7, 9)] and weight.grad[4:].abs().min() > 0
    if alive:
        with pytest.raises(RuntimeError, match=r"another shape since the forward pass|shape|size"):
            loss.backward()
        assert weight.grad.shape == (7, 9)
    other = model(x).square().mean()
    undo(model, growth)
    weight.grad = None
    model(x).square().mean().backward()
    assert weight.grad.shape == (4, 9)
    del other


def test_backward_through_an_old_graph_says_what_is_wrong() -> None:
    model = network()
    loss = model[0](normal(8, 9)).sum()  # whose backward pass does not need the weight itself
    grow(model, wider(model))
    with pytest.raises(RuntimeError, match="another shape since the forward pass, because the model has grown"):
        loss.backward()
    assert model[0].weight.grad is None


def test_a_graph_outlives_a_growth_that_was_refused_or_taken_back() -> None:
    plain, model = network(), network()
    losses = [net(normal(8, 9)).square().mean() for net in (plain, model)]
    handle = model[1].register_forward_hook(lambda module, args, output: 1 / 0 if output.shape[-1] == 7 else None)
    with pytest.raises(FunctionChanged):
        grow(model, wider(model), check=normal(4, 9))
    handle.remove()
    undo(model, grow(model, wider(model)))
    for loss in losses:
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_frozen_parameter_trains_again_although_an_old_graph_is_alive() -> None:
    model = network()
    loss = model(normal(8, 9)).square().mean()
    model[0].weight.requires_grad_(False)
    grow(model, wider(model))
    model[0].weight.requires_grad_(True)
    model(normal(8, 9)).square().mean().backward()
    assert model[0].weight.grad.shape == (7, 9) and loss.requires_grad


def test_what_was_accumulated_is_kept() -> None:
    """Half of a step's batches before the growth, half after it: the old entries' gradients are those of all."""
    plain, model = network(), network()
    batches = [(normal(8, 9, seed=i), normal(8, 3, seed=i + 50)) for i in range(4)]

    def gather(net: nn.Module, some: Any) -> None:
        for x, y in some:
            nn.functional.mse_loss(net(x), y).backward()

    gather(plain, batches)
    gather(model, batches[:2])
    before = [p.grad.clone() for p in model.parameters()]
    growth = grow(model, wider(model))
    assert not model[2].weight.grad[:, 4:].any() and torch.equal(model[2].weight.grad[:, :4], before[2])
    undo(model, growth)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    grow(model, wider(model))
    gather(model, batches[2:])
    gradients = [model[0].weight.grad[:4], model[0].bias.grad[:4], model[2].weight.grad[:, :4], model[2].bias.grad]
    for ours, theirs in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-12, atol=1e-14)
    assert model[2].weight.grad[:, 4:].abs().min() > 0


def test_nothing_of_the_old_shape_stays_alive() -> None:
    model = network()
    optimizers = make(AdamW, {}, model)
    step(model, optimizers, 0)

    def of_the_old_shape() -> int:
        gc.collect()
        return sum(1 for each in gc.get_objects() if issubclass(type(each), Tensor) and tuple(each.shape) == (4, 9))

    assert of_the_old_shape() >= 3
    growth = grow(model, width_site(model, "0", "2", MORE), optimizer=optimizers)
    assert growth.resized and of_the_old_shape() == 0


# --- what is refused, and leaves everything as it was ---


class Odd(SGD):
    """Of another library: keeps something that nobody here knows."""


def refused(model: nn.Module, optimizer: Optimizer, case: str) -> None:
    state = optimizer.state[model[2].weight]  # not the first one: what was planned before must not have happened
    if case == "shape":
        state["preconditioner"] = torch.eye(3)
    elif case == "list":
        state["preconditioners"] = [torch.eye(3), torch.eye(4)]
    elif case == "queue":
        state["gradients"] = collections.deque([torch.ones(3, 4)])
    elif case == "object":
        state["projector"] = types.SimpleNamespace(basis=torch.eye(3))
    elif case == "numbers":
        state["state1"] = torch.zeros(3, 4, dtype=torch.uint8)


REASONS = {
    "shape": r"Odd cannot follow 2.weight from \(3, 4\) to \(3, 7\): in its state 'preconditioner' has the shape \(3, 3\)",
    "list": "'preconditioners' is a list of tensors",
    "queue": "'gradients' is a deque of tensors",
    "object": "'projector' is a SimpleNamespace of tensors",
    "numbers": r"'state1' has the shape \(3, 4\) and the type torch.uint8",
}


@pytest.mark.parametrize("case", REASONS)
def test_a_state_that_is_not_understood_is_refused_by_its_name(case: str) -> None:
    model = network()
    optimizer = Odd(model.parameters(), lr=0.1, momentum=0.9)
    step(model, [optimizer], 0)
    refused(model, optimizer, case)
    before = everything(model, [optimizer])
    with pytest.raises(OptimizerError, match=REASONS[case]):
        grow(model, wider(model), optimizer=optimizer)
    assert same(before, everything(model, [optimizer]))
    growth = grow(model, wider(model))
    optimizer.state[model[2].weight]["preconditioner"] = torch.eye(5)
    before = everything(model, [optimizer])
    with pytest.raises(OptimizerError, match="Odd cannot follow"):
        undo(model, growth, optimizer=optimizer)
    assert same(before, everything(model, [optimizer]))


def test_tensors_that_belong_to_no_parameter_are_refused() -> None:
    """What TRAC keeps: where its entries belong is not known, and it would fail at the next step."""
    model = network()
    optimizer = Odd(model.parameters(), lr=0.1)
    optimizer.state["trac"] = {"reference": [torch.zeros(4, 9)], "steps": torch.tensor(3)}
    before = everything(model, [optimizer])
    for site in (wider(model), find_sites(model, normal(2, 9))[0]):
        with pytest.raises(OptimizerError, match="Odd cannot follow a growth: it keeps tensors under 'trac'"):
            grow(model, site, optimizer=optimizer)
    assert same(before, everything(model, [optimizer]))
    del optimizer.state["trac"]["reference"]
    grow(model, wider(model), optimizer=optimizer)


@pytest.mark.parametrize("cls", REFUSED)
def test_an_optimizer_that_cannot_follow_is_refused(cls: type[Optimizer]) -> None:
    model = network()
    optimizer = cls(list(model.parameters()), lr=0.01)
    before = everything(model, [optimizer])
    for call in (lambda: grow(model, wider(model), optimizer=optimizer), lambda: plan_resizing(optimizer, ())):
        with pytest.raises(OptimizerError, match=f"{cls.__name__} cannot follow a growth: .*{REFUSED[cls]}"):
            call()
    assert same(before, everything(model, [optimizer]))


def test_options_that_would_divide_a_parameter_are_refused() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    step(model, [optimizer], 0)
    before = everything(model, [optimizer])
    with pytest.raises(
        UnsupportedSite, match=r"freeze_rest must be False here, got True: .*a part of a parameter cannot train alone"
    ):
        grow(model, wider(model), optimizer=optimizer, freeze_rest=True)
    with pytest.raises(
        OptimizerError,
        match=r"new_lr_factor must be None here, got 0.1: .*a part of a parameter cannot have a separate",
    ):
        grow(model, wider(model), optimizer=optimizer, new_lr_factor=0.1)
    with pytest.raises(OptimizerError, match="group=7 is out of range"):
        grow(model, wider(model), optimizer=optimizer, group=7)
    others = AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(OptimizerError, match="contains no parameter of this Sequential"):
        grow(model, wider(model), optimizer=others)
    with pytest.raises(
        OptimizerError, match=r"none of the parameters that would get new entries \(0.weight, 0.bias, ...\)"
    ):
        check_joining(model, wider(model), others)
    assert same(before, everything(model, [optimizer]))
    check_joining(model, wider(model), optimizer)
    grow(model, wider(model), optimizer=optimizer, group=0)  # nothing new joins it
    assert len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) == 4


def test_a_growth_that_changes_the_output_is_put_back_with_its_gradients() -> None:
    class Sum(nn.Module):
        """Reads all of the units a second time, past the reader."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = network()[0], network()[2]

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            return self.b(hidden) + hidden.sum()

    model = Sum()
    optimizer = AdamW(model.parameters())
    model(normal(8, 9)).square().sum().backward()
    optimizer.step()
    before = everything(model, [optimizer])
    with pytest.raises(FunctionChanged):
        grow(model, width_site(model, "a", "b", MORE, rows=rows()), optimizer=optimizer, check=normal(4, 9))
    assert same(before, everything(model, [optimizer]))
    model(normal(8, 9)).square().sum().backward()
    optimizer.step()


def test_a_plan_changes_nothing() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    step(model, [optimizer], 0)
    before = everything(model, [optimizer])
    resized = wider(model).move.plan(model, wider(model)).resized
    plan_resizing(optimizer, resized)
    plan_shrinking(optimizer, resized)
    plan_resizing(None, resized)
    assert same(before, everything(model, [optimizer]))


# --- the verb ---


def test_insert_is_grow() -> None:
    assert inspect.signature(insert) == inspect.signature(grow)
    ours, theirs = network(), network()
    assert str(insert(ours, wider(ours))) == str(grow(theirs, wider(theirs)))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_growth_tells_what_was_resized() -> None:
    model = network()
    growth = grow(model, wider(model))
    assert [str(each) for each in growth.resized] == [
        "0.weight: (4, 9) -> (7, 9)",
        "0.bias: (4,) -> (7,)",
        "2.weight: (3, 4) -> (3, 7)",
    ]
    assert growth.parameters == () and (model[0].out_features, model[2].in_features) == (7, 7)


def test_the_schedule_and_its_factor_hold_for_a_widening() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    step(model, [optimizer], 0)
    scheduler.step()
    rate = scheduler.get_last_lr()[0]
    growth = grow(model, wider(model), optimizer=optimizer, scheduler=scheduler, lr_factor=0.5)
    assert optimizer.param_groups[0]["lr"] == rate / 2
    undo(model, growth, optimizer=optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == rate
