"""A loss or a model that takes a gradient itself, or runs the model several times: a merit is that of the extended network, or refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import gradients
from sensli import Probe, Site, find_sites, measure
from sensli.errors import MeasurementError
from widening import column_gradients, widened

Loss = Callable[[nn.Module, Any, Tensor], Tensor]  # of the model, its output for x, and x

OTHER = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def data(n: int = 8) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def slope(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x, **options)
    return found


def penalty(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    return out.mean() + 10 * (slope(model, x, create_graph=True).norm(dim=1) - 1).square().mean()


def curvature(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    """Second derivatives, as a PINN has them."""
    x = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return out.square().mean() + (second[:, 0] - x[:, 0]).square().mean()


def backward_inside(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    model(x).sum().backward(create_graph=True)
    assert x.grad is not None
    return out.mean() + x.grad.square().mean()


def by_func(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    return out.mean() + torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))(x).square().mean()


def by_func_alone(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    return out.mean() + torch.func.grad(lambda each: model(each).sum())(x).square().mean()


def by_jvp(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    _, moved = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return out.mean() + moved.square().mean()


def by_duals(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        moved = torch.autograd.forward_ad.unpack_dual(dual).tangent
    return out.mean() + moved.square().mean()


def of_weights(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(out.square().mean(), model[0].weight, create_graph=True)
    return out.mean() + found.square().sum()


DEPENDS: dict[str, Loss] = {
    "gradient penalty": penalty,
    "second derivatives": curvature,
    "backward inside": backward_inside,
    "gradients of weights": of_weights,
    "torch.func": by_func,
    "torch.func without vmap": by_func_alone,
    "torch.func.jvp": by_jvp,
    "forward mode": by_duals,
}


def logged(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    slope(model, x)
    return out.square().mean()


def logged_with_graph(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    slope(model, x, create_graph=True).norm()
    return out.square().mean()


def detached(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    return (out - slope(model, x, create_graph=True).detach().sum(1, keepdim=True)).square().mean()


def adversarial(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    return out.square().mean() + model(x + 0.1 * slope(model, x).sign()).square().mean()


def virtual_adversarial(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    step = torch.full_like(x, 0.1).requires_grad_()
    F.mse_loss(model(x + step), out.detach()).backward()
    model.zero_grad()
    assert step.grad is not None
    return F.mse_loss(model(x + F.normalize(step.grad)), out.detach() + 0.1)


def of_another(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    return (out - slope(OTHER, x, create_graph=True).square().sum(1, keepdim=True)).square().mean()


def same_pass(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    """Of the output alone: nothing passes the sites."""
    (found,) = torch.autograd.grad(out.pow(3).sum(), out, create_graph=True)
    return found.square().mean()


def func_of_values(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    values = {name: p.detach() for name, p in model.named_parameters()}
    each = torch.func.grad(lambda values: torch.func.functional_call(model, values, (x,)).sum())(values)
    return out.square().mean() + sum(one.square().sum() for one in each.values()).detach()


STANDS: dict[str, Loss] = {
    "logged": logged,
    "logged with a graph": logged_with_graph,
    "detached": detached,
    "adversarial example": adversarial,
    "virtual adversarial training": virtual_adversarial,
    "of another model": of_another,
    "of the output": same_pass,
    "torch.func of values": func_of_values,
}


def target(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    """A pass of another size that no gradient comes back through, last."""
    return (out - 1 - 0.9 * model(data(5)).detach().mean()).square().mean()


def target_first(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), 1 + 0.9 * out.detach())


def several(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    passes = [model(data(n)) for n in (3, 8, 5)]
    return out.mean() + passes[0].square().mean() + passes[2].exp().mean()


def unwatched(model: nn.Module, out: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        goal = model(data(8) + 1)
    return F.mse_loss(out, goal)


PASSES: dict[str, Loss] = {"target": target, "target first": target_first, "several": several, "no_grad": unwatched}


def expected(model: nn.Module, site: Site, loss: Loss, x: Tensor) -> float:
    """From a network that is really larger."""
    if site.kind == "units":
        other, edit = widened(model, site)
        other.zero_grad()
        loss(other, other(x), x).backward()
        return column_gradients(edit)
    # the loss must see the extended network: it is made here once more, by the oracle
    holder: list[nn.Module] = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: holder.append(module) if not holder else None
    )
    try:
        (gradient,), _ = gradients(model, [site], [(x, x)], lambda out, x: loss(holder[0], out, x))
    finally:
        handle.remove()
    return float(gradient.square().sum())


UNITS = {start: {"what": "units", "units": 2, "init": start} for start in ("sensitive", "random", "net2net", "gradmax")}
OPTIONS: dict[str, dict[str, Any]] = {"layers": {}, "units": UNITS["sensitive"]}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # which torch.func calls itself
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", [*STANDS, *PASSES])
def test_other_passes_and_gradients_do_not_count(name: str, kind: str) -> None:
    model, x, loss = network(), data(), {**STANDS, **PASSES}[name]
    sites = find_sites(model, x[:2], **OPTIONS[kind])
    for ratio in (True, False):
        found = measure(model, sites, [(x, x)], partial(loss, model), norm="frobenius", ratio=ratio)
        assert len(found) == 2
        for merit in found:
            assert merit.value == pytest.approx(expected(model, merit.site, loss, x), rel=1e-10) and merit.value > 0
    with Probe(model, [merit.site for merit in found], norm="frobenius") as probe:
        loss(model, model(x), x).backward()
    if name != "virtual adversarial training":  # there, in the user's own step, backward() adds to .grad twice
        assert [m.value for m in probe.merits()] == pytest.approx([m.value for m in found], rel=1e-10)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # which torch.func calls itself
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", DEPENDS)
def test_a_loss_that_depends_on_a_gradient_through_the_sites_is_refused(name: str, kind: str) -> None:
    model, x, loss = network(), data(), DEPENDS[name]
    sites = find_sites(model, x[:2], **OPTIONS[kind])
    for options in ({}, {"ratio": False}):
        with pytest.raises(MeasurementError, match=r"the loss (may )?depends? on a (gradient|derivative)"):
            measure(model, sites, [(x, x)], partial(loss, model), norm="frobenius", **options)
    with pytest.raises(MeasurementError, match=r"the loss (may )?depends? on a (gradient|derivative)"):
        with Probe(model, sites, norm="frobenius") as probe:
            loss(model, model(x), x).backward()
        probe.merits()


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_backward_pass_in_the_loss_leaves_the_gradients_alone(kind: str) -> None:
    model, x = network(), data()
    model(x).sum().backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters()]
    measure(model, find_sites(model, x[:2], **OPTIONS[kind]), [(x, x)], partial(virtual_adversarial, model))
    assert all(
        p.grad is old and torch.equal(old, value) for p, (old, value) in zip(model.parameters(), before, strict=True)
    )


# --- the user's own step ---


def plain(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def in_the_same_order(model: nn.Module, x: Tensor) -> None:
    losses = [model(part).square().sum() / len(x) for part in (x[:3], x[3:])]
    for loss in losses:
        loss.backward()


def in_reverse(model: nn.Module, x: Tensor) -> None:
    losses = [model(part).square().sum() / len(x) for part in (x[:3], x[3:])]
    for loss in reversed(losses):
        loss.backward()


def twice(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean() / 2
    loss.backward(retain_graph=True)
    loss.backward()


def with_accuracy(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    (model(data(5)) > 0).sum()
    with torch.no_grad():
        model(data(3))
    loss.backward()


def with_norms(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss.backward()


def with_norms_after(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()))


def by_grad(model: nn.Module, x: Tensor) -> None:
    slope(model, x)
    found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    assert len(found) == 6


def for_inputs(model: nn.Module, x: Tensor) -> None:
    parameters = list(model.parameters())
    model(x).square().mean().backward(inputs=parameters)
    step = x.clone().requires_grad_()
    model(step).square().mean().backward(inputs=[step])


def with_curvature(model: nn.Module, x: Tensor) -> None:
    """As AdaHessian does: what a gradient of gradients gives goes elsewhere than into .grad."""
    model(x).square().mean().backward(create_graph=True)
    parameters = list(model.parameters())
    found = [p.grad for p in parameters]
    torch.autograd.grad(found, parameters, [torch.ones_like(g) for g in found], allow_unused=True)
    for parameter in parameters:
        parameter.grad = None  # a cycle otherwise


STEPS = {step.__name__: step for step in (
    in_the_same_order, in_reverse, twice, with_accuracy, with_norms, with_norms_after, by_grad, for_inputs, with_curvature
)}  # fmt: skip


@pytest.mark.parametrize("start", UNITS)
def test_units_know_their_pass_however_they_start(start: str) -> None:
    model, x = network(), data()
    sites = find_sites(model, x[:2], **UNITS[start])
    merits = measure(model, sites, [(x, x)], lambda out, x: out.square().mean(), norm="frobenius")
    beside = measure(model, merits, [(x, x)], lambda out, x: (model(data(5)), slope(model, x), out.square().mean())[2])
    with Probe(model, merits, norm="frobenius") as probe:
        with_accuracy(model, x)
    for found in (beside, probe.merits()):
        assert [m.value for m in found] == pytest.approx([m.value for m in merits], rel=1e-10)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", STEPS)
def test_a_probe_counts_what_is_added_to_the_gradients(name: str, kind: str) -> None:
    model, x = network(), data()
    sites = find_sites(model, x[:2], **OPTIONS[kind])
    merits = measure(model, sites, [(x, x)], lambda out, x: out.square().mean(), norm="frobenius")
    with Probe(model, merits, norm="frobenius") as probe:
        STEPS[name](model, x)
    found = probe.merits()
    assert [m.value for m in found] == pytest.approx([m.value for m in merits], rel=1e-10)
    assert [m.ratio for m in found] == pytest.approx([m.ratio for m in merits], rel=1e-10)


def test_a_gradient_of_a_gradient_in_the_users_own_step_is_refused_and_the_step_is_the_same() -> None:
    model, x = network(), data()
    plainly = copy.deepcopy(model)
    with Probe(model, find_sites(model, x[:2], what="units")) as probe:
        penalty(model, model(x), x).backward()
    penalty(plainly, plainly(x), x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plainly.parameters(), strict=True))
    with pytest.raises(MeasurementError, match="gradient that your code takes itself"):
        probe.merits()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.head, self.reentrant = network()[:2], network()[2:4], network()[4:], reentrant

    def forward(self, x: Tensor) -> Tensor:
        body = nn.Sequential(*self.body)
        return self.head(torch.utils.checkpoint.checkpoint(body, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # of torch: candidates run without gradients
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_run_once_more_and_belong_to_their_pass(reentrant: bool, kind: str) -> None:
    model, x = Checkpointed(False), data()
    sites = find_sites(model, x[:2], **OPTIONS[kind])
    merits = measure(model, sites, [(x, x)], lambda out, x: out.square().mean())
    model.reentrant = reentrant
    with Probe(model, merits) as probe:
        model(data(5))
        losses = [model(part).square().sum() / len(x) for part in (x[:3], x[3:])]
        for loss in losses:
            loss.backward()
    assert [m.value for m in probe.merits()] == pytest.approx([m.value for m in merits], rel=1e-10)
    with Probe(model, merits) as probe:  # the whole model
        torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().mean().backward()
    assert [m.value for m in probe.merits()] == pytest.approx([m.value for m in merits], rel=1e-10)


def test_gradmax_is_refused_inside_of_a_checkpoint() -> None:
    sites = find_sites(Checkpointed(False), data(2), what="units", init="gradmax")
    assert not sites and "a checkpoint" in sites.explain()


class Block(nn.Module):
    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.a, self.b, self.adds = nn.Linear(4, 6), nn.Linear(6, 4), adds

    def forward(self, x: Tensor) -> Tensor:
        made = self.b(torch.tanh(self.a(x)))
        return x + made if self.adds else made


class Stack(nn.Module):
    """Blocks that add what they make themselves, or whose loop does."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head, self.adds = nn.ModuleList(Block(adds=adds) for _ in range(3)), nn.Linear(4, 1), adds
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.adds else x + block(x)
        return self.head(x)


@pytest.mark.parametrize("adds", [True, False])
def test_twins_count_the_measured_pass_alone(adds: bool) -> None:
    model, x = Stack(adds=adds), data()
    sites = [site for site in find_sites(model, x[:2]) if site.kind == "block"]
    plainly = measure(model, sites, [(x, x)], lambda out, x: out.square().mean(), norm="natural")
    for loss in (logged_with_graph, virtual_adversarial):
        for merit in measure(model, sites, [(x, x)], partial(loss, model), norm="frobenius"):
            assert merit.value == pytest.approx(expected(model, merit.site, loss, x), rel=1e-10)
    natural = measure(model, sites, [(x, x)], partial(logged_with_graph, model), norm="natural")
    assert [m.value for m in natural] == pytest.approx([m.value for m in plainly], rel=1e-10)
    with pytest.raises(MeasurementError, match="depends on a gradient"):
        measure(model, sites, [(x, x)], partial(penalty, model), norm="natural", ratio=False)
    if adds:
        with pytest.raises(MeasurementError, match="depends on a gradient"):
            measure(model, sites, [(x, x)], partial(penalty, model), norm="frobenius")
    else:  # such twins are in the model while it is measured, so that autograd knows all of it
        for merit in measure(model, sites, [(x, x)], partial(penalty, model), norm="frobenius"):
            assert merit.value == pytest.approx(expected(model, merit.site, penalty, x), rel=1e-10)


class Forces(nn.Module):
    """Takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            energy = self.net(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


def test_forces_are_refused_only_where_the_loss_depends_on_them() -> None:
    model, x = Forces(), data()
    sites = find_sites(model, x[:2])
    plainly = measure(model.net, find_sites(model.net, x[:2]), [(x, x)], lambda out, x: out.square().mean())
    found = measure(model, sites, [(x, x)], lambda out, x: out[0].square().mean())
    assert [m.value for m in found] == pytest.approx([m.value for m in plainly], rel=1e-12)
    with pytest.raises(MeasurementError, match="depends on a gradient that your code takes itself"):
        measure(model, sites, [(x, x)], lambda out, x: out[1].square().mean())
    units = find_sites(model, x[:2], what="units")
    assert len(units) == 0 and "new units cannot be measured" in units.explain()


def test_units_that_the_loss_reads_by_a_part_of_the_model_are_refused() -> None:
    model, x = network(), data()
    sites = find_sites(model, x[:2], what="units")
    with pytest.raises(MeasurementError, match="'4' was called outside of a pass of the model"):
        measure(model, sites, [(x, x)], lambda out, x: out.mean() + model[3:](x @ x.T[:, :6]).mean())


def test_a_loss_that_fails_on_few_samples_leaves_nothing_in_memory() -> None:
    """The look at a few samples ends early; its graph must not wait for a backward pass that never comes."""
    layers = nn.Linear(4, 17), nn.ReLU(), nn.Linear(17, 17), nn.ReLU(), nn.Linear(17, 1)
    model, x = nn.Sequential(*layers).double(), data(64)
    sites = find_sites(model, x[:2], what="units")

    def loss(out: Tensor, target: Tensor) -> Tensor:
        if len(out) < len(x):
            raise ValueError("not so few")
        return out.square().mean()

    measure(model, sites, [(x, x)], loss)
    gc.collect()
    kept = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.grad_fn is not None]
    assert [each for each in kept if each.shape[-1:] == (17,)] == []


def rectified() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)).double()


def test_a_pass_that_ends_at_the_place_counts() -> None:
    """The ReLU before it is asked for what arrives there, and does not hand it on."""
    model, x = rectified(), data()
    kept: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda module, args, output: kept.append(output))
    sites = find_sites(model, x)
    with Probe(model, sites, norm="frobenius", ratio=False) as probe:
        loss = model(x).square().mean()
        torch.autograd.grad(loss, [kept[-1], *model[2:].parameters()])
    handle.remove()
    wanted = measure(model, sites, [(x, x)], lambda out, x: out.square().mean(), norm="frobenius", ratio=False)
    assert [merit.value for merit in probe.merits()] == [merit.value for merit in wanted]
    assert min(merit.value for merit in wanted) > 0


class Counting(TorchDispatchMode):
    """How often a gradient is taken through a ReLU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.threshold_backward.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("ratio", [True, False])
def test_what_a_relu_computes_in_its_backward_pass_is_not_computed_again(ratio: bool) -> None:
    model, x = rectified(), data()
    sites = find_sites(model, x, what="layers")
    with Counting() as counting:
        measure(model, sites, [(x, x)], lambda out, x: out.square().mean(), ratio=ratio)
    assert counting.count == len(sites) == 2
