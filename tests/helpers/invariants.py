"""What holds for every model: find, insert, grow again, measure, train, undo, replay."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

from models import untouched
from random_models import Recipe
from sensli import History, Site, find_sites, insert, measure, replay, undo
from sensli.errors import MeasurementError, ZeroMerits
from sensli.modules.running import tensors

# The same examples every time, without a database and without a clock: machines are shared.
REPEATABLE = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


class Broken(AssertionError):
    """A promise that was not kept: which one, at which site, of which model."""

    def __init__(self, promise: str, site: Site | None, recipe: Recipe, detail: str) -> None:
        super().__init__(f"{promise}: {site or 'find_sites'}\n  {detail}\n  {recipe}")
        self.promise, self.detail = promise, detail


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """A loss that everything the model returns takes part in."""
    logits, *others = (part.float() if part.dtype == torch.bfloat16 else part for part in tensors(output))
    return F.cross_entropy(logits, target) + sum(0.1 * other.square().mean() for other in others)


def first(output: Any) -> Tensor:
    return next(iter(tensors(output)))


def loss_of(recipe: Recipe, model: nn.Module, x: Tensor) -> Callable[[Any, Tensor], Tensor]:
    """The loss that a recipe names: it may run the model again, or take gradients itself."""

    def loss(output: Any, target: Tensor) -> Tensor:
        value, less = loss_fn(output, target), 0.7 * x[:3]
        if recipe.loss == "target":  # a pass that no gradient comes back through
            return value + 0.3 * (first(output)[:3] - first(model(less)).detach()).square().mean().to(value)
        if recipe.loss == "twice":  # a second pass, of another size
            return value + 0.5 * loss_fn(model(less), target[:3])
        if recipe.loss == "logged":  # a gradient that takes no part
            torch.autograd.grad(
                value, [p for p in model.parameters() if p.requires_grad], retain_graph=True, allow_unused=True
            )
        elif recipe.loss == "aside":  # a second derivative of something else
            other = torch.ones(3, requires_grad=True)
            (slope,) = torch.autograd.grad(other.square().sum(), other, create_graph=True)
            return value + 0.1 * slope.sum()
        elif recipe.loss == "penalty":  # a second derivative through the model
            less.requires_grad_()
            (slope,) = torch.autograd.grad(first(model(less)).sum(), less, create_graph=True)
            return value + 0.1 * slope.square().mean().to(value)
        return value

    try:
        with in_mode(model, False):
            loss(model(x), torch.zeros(len(x), dtype=torch.int64)).backward()
    except RuntimeError:  # the model itself cannot be trained by it: an operation has no second derivative, say
        return loss_fn
    finally:
        model.zero_grad()
    return loss


@contextmanager
def in_mode(model: nn.Module, train: bool) -> Iterator[None]:
    """In eval or training mode from a fixed random state; modes, buffers and the global random state are put back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            1
        )  # torch.manual_seed notes the whole call stack for devices that are not there
        model.train(train)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def outputs(model: nn.Module, x: Tensor, train: bool) -> list[Tensor]:
    with in_mode(model, train), torch.no_grad():
        return [part.detach().clone() for part in tensors(model(x))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def moved(one: list[Tensor], other: list[Tensor]) -> str:
    if len(one) != len(other) or any(a.shape != b.shape for a, b in zip(one, other, strict=True)):
        return "other outputs"
    by = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
    return f"moved by {by:.1e}"


def names(model: nn.Module) -> list[Any]:
    return [(path, type(module), module.training) for path, module in model.named_modules()]


@contextmanager
def counted(layers: list[nn.Module]) -> Iterator[list[int]]:
    """How often each layer is called; the random numbers that they draw do not count as the model's."""
    calls = [0] * len(layers)
    states: list[Tensor] = []

    def before(index: int) -> None:
        calls[index] += 1
        states.append(torch.get_rng_state())

    handles = [
        handle
        for index, layer in enumerate(layers)
        for handle in (
            layer.register_forward_pre_hook(lambda *_, index=index: before(index)),
            layer.register_forward_hook(lambda *_: torch.set_rng_state(states.pop())),
        )
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class Checked:
    """One model and what it computed before anything was inserted."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model, self.x, self.y = recipe.build()
        self.loss = loss_of(recipe, self.model, self.x)
        self.before = {train: outputs(self.model, self.x, train) for train in (False, True)}
        # Where two runs from one random state differ nothing can be asked of a grown model.
        self.modes = [train for train in self.before if same(self.before[train], outputs(self.model, self.x, train))]

    def fail(self, promise: str, site: Site | None, detail: str) -> Broken:
        return Broken(promise, site, self.recipe, detail)

    def attempt(self, promise: str, site: Site | None, work: Callable[[], Any]) -> Any:
        """What must not raise."""
        try:
            return work()
        except Broken:
            raise
        except Exception as error:
            raise self.fail(promise, site, f"raised {type(error).__name__}: {error}") from error

    def reads_only(self, promise: str, work: Callable[[], Any]) -> Any:
        """What must neither raise nor leave a trace on the model."""

        def watched() -> Any:
            with untouched(self.model):
                return work()

        return self.attempt(promise, None, watched)

    def keeps_the_function(self, promise: str, site: Site, layers: list[nn.Module]) -> None:
        """Everything the model returns stays to the bit in both modes, and every inserted layer runs exactly once."""
        for train in self.modes:
            mode = "training" if train else "eval"
            with counted(layers) as calls:
                now = self.attempt(promise, site, lambda train=train: outputs(self.model, self.x, train))
            if set(calls) != {1}:
                raise self.fail(promise, site, f"the new layer was called {calls} times ({mode} mode)")
            if not same(self.before[train], now):
                raise self.fail(promise, site, f"the output {moved(self.before[train], now)} ({mode} mode)")

    def sites(self) -> list[Site]:
        state = random.getstate(), repr(np.random.get_state())  # noqa: NPY002 (the global one is what must stay)
        found = self.reads_only("find", lambda: find_sites(self.model, self.x))
        if (random.getstate(), repr(np.random.get_state())) != state:  # noqa: NPY002
            raise self.fail("find", None, "the random state of Python or numpy moved")
        if len({str(site) for site in found}) != len(found):
            raise self.fail("find", None, "two sites print alike")
        return list(found)

    def merits(self, sites: list[Site]) -> list[float | None]:
        """In float64 and eval mode, where autograd in the grown network gives the same to 1e-9."""

        def measured() -> list[float | None]:
            try:
                with in_mode(self.model, False):
                    table = measure(self.model, sites, [(self.x, self.y)], self.loss, norm="frobenius", ratio=False)
                return [merit.value for merit in table]
            except ZeroMerits:
                return [0.0] * len(sites)
            except MeasurementError:
                if self.recipe.loss != "penalty":  # the only one that may have no merit
                    raise
                return [None] * len(sites)

        return self.reads_only("merit", measured)

    def grow(self, site: Site, merit: float | None, other: Site) -> None:
        """One site, from the first insertion to the last undo."""
        model = self.model
        state, said = copy.deepcopy(model.state_dict()), names(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        growth = self.attempt("insert", site, lambda: insert(model, site, optimizer=optimizer))
        layer = model.get_submodule(growth.name)
        self.keeps_the_function("insert", site, [layer])
        grown = copy.deepcopy(model.state_dict())
        self.replayed(site, growth, grown)

        for again in self.beside(site, other):
            second = self.attempt("second growth", again, lambda again=again: insert(model, again, optimizer=optimizer))
            new = [layer, model.get_submodule(second.name)]
            self.keeps_the_function("second growth", again, new)
            self.attempt("undo", again, lambda second=second: undo(model, second, optimizer=optimizer))
        self.unchanged("undo of the second growth", site, grown, None)

        self.learns(site, growth, optimizer, merit)
        model.load_state_dict(grown)
        self.attempt("undo", site, lambda: undo(model, growth, optimizer=optimizer))
        self.unchanged("undo", site, state, said)

    def beside(self, site: Site, other: Site) -> list[Site]:
        """A site found anew at or beside the place, and one that was found before the insertion."""
        found = self.attempt("second growth", site, lambda: list(find_sites(self.model, self.x)))
        parent = site.path.rpartition(".")[0]
        near = [again for again in found if again.path.startswith(site.path)]
        near += [again for again in found if again.path.startswith(parent)]
        return [*near[:1], other]

    def replayed(self, site: Site, growth: Any, grown: dict[str, Tensor]) -> None:
        fresh = self.recipe.build()[0]

        def again() -> None:
            replay(fresh, History.from_json(History([growth]).to_json()))
            fresh.load_state_dict(grown)

        self.attempt("replay", site, again)
        for train in self.modes:
            with counted([fresh.get_submodule(growth.name)]):
                now = outputs(fresh, self.x, train)
            if not same(self.before[train], now):
                raise self.fail("replay", site, f"the output {moved(self.before[train], now)}")

    def learns(self, site: Site, growth: Any, optimizer: torch.optim.Optimizer, merit: float | None) -> None:
        model, names_of = self.model, [f"{growth.name}.{name}" for name in site.move.measured]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}

        def step() -> list[Tensor | None]:
            with in_mode(model, False):
                optimizer.zero_grad()
                self.loss(model(self.x), self.y).backward()
            parameters = dict(model.named_parameters())
            gradients = [parameters[name].grad for name in names_of]
            optimizer.step()
            return gradients

        gradients = self.attempt("training", site, step)
        if any(gradient is None for gradient in gradients):
            raise self.fail("training", site, "the new parameters get no gradient")
        value = sum(gradient.double().square().sum().item() for gradient in gradients)
        if merit is not None and abs(value - merit) > 1e-9 * max(value, merit) + 1e-24:
            raise self.fail("merit", site, f"{merit:.6e} instead of {value:.6e}")
        now = dict(model.named_parameters())
        if value > 1e-20 and all(torch.equal(before[name], now[name]) for name in names_of):
            raise self.fail("training", site, "a step of AdamW left the new parameters as they were")

    def unchanged(self, promise: str, site: Site, state: dict[str, Tensor], said: list[Any] | None) -> None:
        now = self.model.state_dict()
        if list(now) != list(state) or not all(torch.equal(now[key], state[key]) for key in state):
            raise self.fail(promise, site, "the state dict is not what it was")
        if said is not None and names(self.model) != said:
            raise self.fail(promise, site, "the modules are not what they were")


def check(recipe: Recipe, most: int | None = None) -> int:
    """Raise `Broken` unless every promise is kept at every site, or at the first so many; how many sites there were."""
    checked = Checked(recipe)
    sites = checked.sites()
    merits: list[Any] = [None] * len(sites)
    if sites and recipe.dtype == "float64":
        merits = checked.merits(sites)
    # from somewhere in the middle, so that the first places are not the only ones that a quick run sees
    order = [(recipe.seed + index) % len(sites) for index in range(len(sites))]
    for index in order[:most]:
        checked.grow(sites[index], merits[index], sites[(index + 1) % len(sites)])
    return len(sites)
