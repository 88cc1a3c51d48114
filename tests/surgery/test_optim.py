"""The optimizer follows an insertion: every optimizer of torch, every way to step, and nothing else moves."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad, AdamW, Muon, Optimizer

from sensli.errors import OptimizerError
from sensli.moves.sites import New
from sensli.surgery.optimizers import as_optimizers, leave_groups, plan_joining

REFUSED = {torch.optim.LBFGS: "flat vector", torch.optim.SparseAdam: "sparse gradients"}
OPTIMIZERS = [
    cls
    for _, cls in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(cls, Optimizer) and cls is not Optimizer and cls not in REFUSED
]
# Options under which an optimizer keeps more state, or keeps it otherwise, than with its defaults.
EXTRA: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [{"amsgrad": True}],
    "AdamW": [{"amsgrad": True}, {"capturable": False, "weight_decay": 0.1}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Adagrad": [{"initial_accumulator_value": 0.5, "lr_decay": 0.1}],
    "ASGD": [{"t0": 2, "lambd": 0.1}],
}
MODES: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}


def ways_to_step() -> list[Any]:
    found = []
    for cls in OPTIMIZERS:
        known = inspect.signature(cls).parameters
        modes = {name: mode for name, mode in MODES.items() if mode.keys() <= known.keys()} or {"plain": {}}
        for name, mode in modes.items():
            for i, extra in enumerate([{}, *EXTRA.get(cls.__name__, [])]):
                found.append(pytest.param(cls, {"lr": 0.01, **extra, **mode}, id=f"{cls.__name__}-{name}-{i}"))
    return found


def test_every_optimizer_of_torch_is_stepped_in_all_its_modes() -> None:
    names = {way.id for way in ways_to_step()}
    assert {"SGD-fused-1", "AdamW-fused-0", "Adagrad-fused-1", "Adafactor-foreach-0", "Muon-plain-0"} <= names
    assert len(OPTIMIZERS) >= 13


class Net(nn.Module):
    """Two matrices with biases, and room for a residual branch `x + out(tanh(inner(x)))` between them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.branch: nn.Sequential | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x if self.branch is None else x + self.branch(x))


def grow(net: Net) -> list[New]:
    """Zero weights in the last map keep the function; the newcomers name their neighbours, weight with weight."""
    generator = torch.Generator().manual_seed(1)
    net.branch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    for parameter in net.branch.parameters():
        nn.init.normal_(parameter, generator=generator)
    nn.init.zeros_(net.branch[2].weight)
    nn.init.zeros_(net.branch[2].bias)
    pairs = {"weight": (net.first.weight,), "bias": (net.first.bias, net.first.weight)}
    return [
        New(f"branch.{name}", parameter, pairs[name.split(".")[1]], "first")
        for name, parameter in net.branch.named_parameters()
    ]


def make(cls: type[Optimizer], options: dict[str, Any], net: Net) -> list[Optimizer]:
    """One optimizer; beside Muon, which takes matrices only, an AdamW for the rest."""
    if cls is not Muon:
        return [cls(net.parameters(), **options)]
    matrices = [p for p in net.parameters() if p.ndim == 2]
    return [cls(matrices, **options), AdamW([p for p in net.parameters() if p.ndim != 2], lr=0.01)]


def train(net: Net, optimizers: list[Optimizer], steps: range) -> list[torch.Tensor]:
    """One point of the trajectory of the first and last layer per step."""
    trajectory = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        old = [*net.first.parameters(), *net.last.parameters()]
        trajectory.append(torch.cat([p.detach().flatten() for p in old]))
    return trajectory


def snapshot(optimizers: Optimizer | list[Optimizer]) -> list[Any]:
    """All that an optimizer holds, by identity of the parameters and by value of the rest."""
    return [
        (
            [{**copy.deepcopy({k: v for k, v in g.items() if k != "params"}), "params": [id(p) for p in g["params"]]}
             for g in each.param_groups],
            {id(p): copy.deepcopy(dict(state)) for p, state in each.state.items()},
        )
        for each in ([optimizers] if isinstance(optimizers, Optimizer) else optimizers)
    ]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("freeze", ["requires_grad", pytest.param("grad_none", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("cls", "options"), ways_to_step())
def test_a_frozen_growth_leaves_the_trajectory_as_it_was(
    cls: type[Optimizer], options: dict[str, Any], freeze: str
) -> None:
    plain = Net()
    expected = train(plain, make(cls, options, plain), range(8))

    net = Net()
    optimizers = make(cls, options, net)
    before = train(net, optimizers, range(4))
    newcomers = grow(net)
    plan_joining(optimizers, newcomers).apply()
    values = [newcomer.parameter.detach().clone() for newcomer in newcomers]
    for newcomer in newcomers:
        if freeze == "requires_grad":
            newcomer.parameter.requires_grad_(False)
        else:
            newcomer.parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    after = train(net, optimizers, range(4, 8))

    assert all(torch.equal(a, b) for a, b in zip(expected, before + after, strict=True))
    assert all(torch.equal(a, n.parameter) for a, n in zip(values, newcomers, strict=True))


@pytest.mark.parametrize(
    "grown_at", [pytest.param(0, id="before the first step", marks=pytest.mark.slow), pytest.param(4, id="mid-run")]
)
@pytest.mark.parametrize(("cls", "options"), ways_to_step())
def test_a_growth_trains_and_all_modes_agree(cls: type[Optimizer], options: dict[str, Any], grown_at: int) -> None:
    """Old and new parameters are at different steps in one group: a kernel that shared a step count would differ."""

    def run(options: dict[str, Any]) -> tuple[torch.Tensor, list[New], list[Optimizer]]:
        net = Net()
        optimizers = make(cls, options, net)
        train(net, optimizers, range(grown_at))
        newcomers = grow(net)
        plan_joining(optimizers, newcomers).apply()
        train(net, optimizers, range(grown_at, grown_at + 4))
        return torch.cat([p.detach().flatten() for p in net.parameters()]), newcomers, optimizers

    values, newcomers, optimizers = run(options)
    start = {newcomer.name: newcomer.parameter.detach() for newcomer in grow(Net())}
    for newcomer in newcomers:
        assert not torch.equal(start[newcomer.name], newcomer.parameter), newcomer.name
        if cls.__name__ != "SGD" or options.get("momentum"):
            assert any(each.state.get(newcomer.parameter) for each in optimizers), newcomer.name
    reference = {key: value for key, value in options.items() if key not in ("foreach", "fused")}
    if "foreach" in inspect.signature(cls).parameters:
        reference["foreach"] = False
    # ASGD keeps its rate as a float32 number, rounded otherwise in each mode.
    close = {"rtol": 1e-6, "atol": 1e-7} if cls.__name__ == "ASGD" else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(values, run(reference)[0], **close)


@pytest.mark.parametrize(("cls", "options"), ways_to_step())
@pytest.mark.parametrize("steps_since", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_leaving_is_the_inverse_of_joining(cls: type[Optimizer], options: dict[str, Any], steps_since: int) -> None:
    net = Net()
    optimizers = make(cls, options, net)
    train(net, optimizers, range(3))
    before = snapshot(optimizers)
    newcomers = grow(net)
    plan_joining(optimizers, newcomers).apply()
    assert sum(len(g["params"]) for each in optimizers for g in each.param_groups) == 8
    train(net, optimizers, range(3, 3 + steps_since))
    leave_groups(optimizers, [newcomer.parameter for newcomer in newcomers])
    if steps_since == 0:
        assert same(before, snapshot(optimizers))
    else:  # the state of the old ones has moved on, that of the removed ones is gone
        for (groups, state), (new_groups, new_state) in zip(before, snapshot(optimizers), strict=True):
            assert same(groups, new_groups)
            assert list(state) == list(new_state)


@pytest.mark.parametrize("fused", [False, True])
def test_the_newcomer_of_an_adagrad_starts_as_its_constructor_would_start_it(fused: bool) -> None:
    net = Net()
    optimizer = Adagrad(net.parameters(), initial_accumulator_value=0.5, fused=fused)
    train(net, [optimizer], range(2))
    newcomers = grow(net)
    plan_joining(optimizer, newcomers).apply()
    fresh = Adagrad([n.parameter for n in newcomers], initial_accumulator_value=0.5, fused=fused)
    assert all(same(dict(optimizer.state[n.parameter]), dict(fresh.state[n.parameter])) for n in newcomers)


@pytest.mark.parametrize("cls", REFUSED)
def test_an_optimizer_that_cannot_follow_is_refused(cls: type[Optimizer]) -> None:
    net = Net()
    optimizer = cls(list(net.parameters()), lr=0.01)
    before = snapshot(optimizer)
    with pytest.raises(OptimizerError, match=REFUSED[cls]) as error:
        plan_joining(optimizer, grow(net))
    assert cls.__name__ in str(error.value)
    assert same(before, snapshot(optimizer))


def test_a_plan_changes_nothing() -> None:
    net = Net()
    optimizer = Adagrad(net.named_parameters())
    train(net, [optimizer], range(2))
    before = snapshot(optimizer)
    joining = plan_joining(optimizer, grow(net), renames={"last.weight": "later.weight"})
    assert same(before, snapshot(optimizer))
    joining.apply()
    assert not same(before, snapshot(optimizer))


def test_without_an_optimizer_there_is_nothing_to_do() -> None:
    plan_joining(None, grow(Net())).apply()
    plan_joining([], grow(Net()), group=0).apply()
    leave_groups(None, [])


def decay_split(net: Net) -> AdamW:
    named = dict(net.named_parameters())
    return AdamW([
        {"params": [(n, p) for n, p in named.items() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named.items() if p.ndim == 1], "weight_decay": 0.0},
    ])  # fmt: skip


def test_weight_joins_weight_bias_joins_bias_with_their_names() -> None:
    net = Net()
    optimizer = decay_split(net)
    plan_joining(optimizer, grow(net)).apply()
    decay, no_decay = optimizer.param_groups
    assert decay["param_names"] == ["first.weight", "last.weight", "branch.0.weight", "branch.2.weight"]
    assert no_decay["param_names"] == ["first.bias", "last.bias", "branch.0.bias", "branch.2.bias"]
    for group in optimizer.param_groups:
        names = [name for p in group["params"] for name, q in net.named_parameters() if p is q]
        assert names == group["param_names"]


def test_renames_reach_the_names_in_the_groups_and_leave_takes_them_back() -> None:
    net = Net()
    optimizer = decay_split(net)
    before = snapshot(optimizer)
    # A swap shows that all renames happen at once.
    renames = {"first.weight": "last.weight", "last.weight": "first.weight"}
    newcomers = grow(net)
    plan_joining(optimizer, newcomers, renames=renames).apply()
    assert optimizer.param_groups[0]["param_names"][:2] == ["last.weight", "first.weight"]
    assert optimizer.param_groups[0]["param_names"][2:] == ["branch.0.weight", "branch.2.weight"]
    leave_groups(
        optimizer, [newcomer.parameter for newcomer in newcomers], renames={new: old for old, new in renames.items()}
    )
    assert same(before, snapshot(optimizer))


def test_leaving_from_the_middle_keeps_names_and_parameters_together() -> None:
    net = Net()
    optimizer = AdamW(net.named_parameters())
    leave_groups(optimizer, [net.first.bias, nn.Parameter(torch.zeros(2))])
    group = optimizer.param_groups[0]
    assert group["param_names"] == ["first.weight", "last.weight", "last.bias"]
    assert all(p is q for p, q in zip(group["params"], [net.first.weight, *net.last.parameters()], strict=True))


def test_membership_is_identity_and_not_equality_of_values() -> None:
    twins = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    optimizer = AdamW([{"params": [twin]} for twin in twins])
    new = nn.Parameter(torch.ones(2, 2))
    plan_joining(optimizer, [New("new", new, (twins[1],))]).apply()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2, 1]
    assert optimizer.param_groups[1]["params"][1] is new
    leave_groups(optimizer, [new])
    assert [group["params"][0] is twin for group, twin in zip(optimizer.param_groups, twins, strict=True)] == [True] * 3
    with pytest.raises(OptimizerError, match="no group to join"):
        plan_joining(optimizer, [New("new", new, (nn.Parameter(torch.ones(2, 2)),))])


def test_the_first_neighbour_that_is_in_any_optimizer_counts() -> None:
    a, b, new = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    first, second = AdamW([a]), AdamW([b])
    absent = nn.Parameter(torch.zeros(2))
    plan_joining([first, second], [New("new", new, (absent, b, a))]).apply()
    assert second.param_groups[0]["params"][-1] is new
    assert len(first.param_groups[0]["params"]) == 1


@pytest.mark.parametrize("by", ["index", "dict"])
def test_group_is_for_newcomers_whose_neighbours_are_in_none(by: str) -> None:
    net = Net()
    optimizer = AdamW([{"params": [net.last.weight]}, {"params": [net.last.bias]}])
    newcomers = grow(net)
    newcomers[0] = New("branch.0.weight", newcomers[0].parameter, (net.last.weight,))
    plan_joining(optimizer, newcomers, group=1 if by == "index" else optimizer.param_groups[1]).apply()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]


def test_a_group_of_several_optimizers_is_given_as_itself() -> None:
    net = Net()
    others = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [AdamW([others[0]]), AdamW([others[1]])]
    with pytest.raises(OptimizerError, match="which of the 2 optimizers"):
        plan_joining(optimizers, grow(net), group=0)
    plan_joining(optimizers, grow(net), group=optimizers[1].param_groups[0]).apply()
    assert len(optimizers[1].param_groups[0]["params"]) == 5


def muon_and(*others: Optimizer, net: Net) -> list[Optimizer]:
    return [Muon([net.first.weight, net.last.weight]), *others]


def test_what_muon_cannot_take_goes_to_the_next_neighbour_then_to_group_then_to_the_only_other_group() -> None:
    net = Net()
    bias = nn.Parameter(torch.zeros(4))
    near_both = New("bias", bias, (net.first.weight, net.last.bias))
    near_muon = New("bias", bias, (net.first.weight,))

    def place(newcomer: New, optimizers: list[Optimizer], **options: Any) -> tuple[int, int]:
        ((_, optimizer, group),) = plan_joining(optimizers, [newcomer], **options).places
        at = next(i for i, each in enumerate(optimizers) if each is optimizer)
        return at, next(i for i, each in enumerate(optimizer.param_groups) if each is group)

    split = AdamW([{"params": [net.first.bias]}, {"params": [net.last.bias]}])
    assert place(near_both, muon_and(split, net=net)) == (1, 1)
    assert place(near_muon, muon_and(split, net=net), group=split.param_groups[0]) == (1, 0)
    assert place(near_muon, muon_and(AdamW([net.first.bias, net.last.bias]), net=net)) == (1, 0)
    with pytest.raises(OptimizerError, match=r"bias of shape \(4,\) cannot join Muon.*2 other groups.*group="):
        plan_joining(muon_and(split, net=net), [near_muon])
    with pytest.raises(OptimizerError, match=r"cannot join Muon.*0 other groups"):
        plan_joining(Muon([net.first.weight]), [near_muon])
    kernel = New("kernel", nn.Parameter(torch.zeros(4, 4, 3, 3)), (net.first.weight,))
    assert place(kernel, muon_and(AdamW([net.first.bias]), net=net)) == (1, 0)


def broken_plans() -> dict[str, tuple[Callable[[Net, AdamW], Any], str]]:
    return {
        "neighbour in none": (
            lambda net, opt: plan_joining(opt, [New("a.new", nn.Parameter(torch.zeros(2)), (), "a.old")]),
            "a.new has no group to join: no parameter of its neighbour a.old is in AdamW.*group=",
        ),
        "one of many in none": (
            lambda net, opt: plan_joining(
                opt, [*grow(net), New("late", nn.Parameter(torch.zeros(2)), (nn.Parameter(torch.zeros(2)),))]
            ),
            "late has no group",
        ),
        "index too large": (
            lambda net, opt: plan_joining(opt, grow(net), group=2),
            r"group=2 is out of range: AdamW has 2 parameter groups \(0 to 1\)",
        ),
        "negative index": (lambda net, opt: plan_joining(opt, grow(net), group=-1), "or its index .*, got -1"),
        "a copy of a group": (
            lambda net, opt: plan_joining(opt, grow(net), group=dict(opt.param_groups[0])),
            "A copy of a group is a different group",
        ),
        "there already": (
            lambda net, opt: plan_joining(opt, [New("first.weight", net.first.weight, (net.last.weight,))]),
            "first.weight is in the optimizer already",
        ),
        "not an optimizer": (
            lambda net, opt: plan_joining([opt, "adam"], grow(net)),
            "optimizer must be .*, got 'adam'",
        ),
        "a model for an optimizer": (
            lambda net, opt: leave_groups([opt, net], [net.first.weight]),
            "optimizer must be .*, got a Net",
        ),
    }


@pytest.mark.parametrize("case", broken_plans())
def test_a_refused_plan_says_why_and_leaves_everything_as_it_was(case: str) -> None:
    net = Net()
    optimizer = decay_split(net)
    train(net, [optimizer], range(2))
    before = snapshot(optimizer)
    call, text = broken_plans()[case]
    with pytest.raises(OptimizerError, match=text):
        call(net, optimizer)
    assert same(before, snapshot(optimizer))


class Accelerated(Optimizer):
    """As accelerate wraps: a subclass of Optimizer that was never initialised as one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups


class Lightning:
    """As Lightning wraps: no Optimizer by its class, but made to pass for one, with all attributes forwarded."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("LightningAdamW", (Lightning, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_wrapped_optimizers_are_unwrapped() -> None:
    net = Net()
    optimizer = AdamW(net.parameters())
    for wrapped in (Accelerated(optimizer), Lightning(optimizer), Lightning(Accelerated(optimizer))):
        assert [each is optimizer for each in as_optimizers(wrapped)] == [True]  # type: ignore[arg-type]
    newcomers = grow(net)
    plan_joining(Accelerated(optimizer), newcomers).apply()
    assert len(optimizer.param_groups[0]["params"]) == 8


def test_two_growths_and_their_undoing_in_turn() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    train(net, [optimizer], range(2))
    start = snapshot(optimizer)
    first = grow(net)
    plan_joining(optimizer, first).apply()
    middle = snapshot(optimizer)
    second = [New(f"again.{n.name}", nn.Parameter(n.parameter.detach().clone()), (n.parameter,)) for n in first]
    plan_joining(optimizer, second).apply()
    leave_groups(optimizer, [newcomer.parameter for newcomer in second])
    assert same(middle, snapshot(optimizer))
    leave_groups(optimizer, [newcomer.parameter for newcomer in first])
    assert same(start, snapshot(optimizer))
