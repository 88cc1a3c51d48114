"""A step of a `Grower` happens as a whole or not at all, and it grows only where that makes sense."""

from __future__ import annotations

import copy
import json
import math
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import ranks
from models import Functional, Named, alive, batches, deep, fnn, loss_fn, points, residual, snapshot, untouched
from sensli import Grower, Rates, Trial, count_flops, find_sites, insert, replay, undo
from sensli.errors import OptimizerError, SensliError
from sensli.growing import looking as searching_module
from sensli.growing.looking import Blind, Sizes, Threshold
from sensli.growing.looking import trainable_sites as trained_only
from sensli.growing.triggers import At, Every, Limit, Pays, Plateau, Trigger, TriggerContext
from sensli.integrations.callback import LookFacts
from sensli.surgery.record import Decision

DATA = batches((8, 8, 4))


def grower(model: nn.Module, optimizer: Any = None, **options: Any) -> Grower:
    return Grower(
        model, optimizer, preset="paper", **{"example": points(2), "trigger": Every(1), "tau": 0.0, **options}
    )


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in DATA:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return optimizer


# --- nothing half done ---


@contextmanager
def nothing_changes(growing: Grower, *averages: nn.Module) -> Iterator[None]:
    """Model, optimizers, schedulers, averages and all that the grower holds are as before, whatever was raised."""
    scheduler: Any = growing._followers.scheduler

    def whole() -> Any:
        return copy.deepcopy(
            (growing.state_dict(), growing.calls, vars(scheduler).get("base_lrs") if scheduler else None)
        )

    before, merits, history, record = whole(), growing.last_merits, growing.history, growing.history.record
    seen = [snapshot(each) for each in averages]
    with untouched(growing.model, *growing.optimizers):
        yield
    assert whole() == before
    assert growing.last_merits is merits and growing.history is history and growing.history.record is record
    assert [snapshot(each) for each in averages] == seen


def whole_grower(**options: Any) -> Grower:
    model = deep()
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    given = {"max_growths": 2, "rates": Rates(lr_factor=0.5), "scheduler": scheduler, "select": "random", **options}
    growing = grower(model, optimizer, **given)
    growing.step(DATA, loss_fn, metric=1.0)
    assert len(growing.history) == min(2, given["max_growths"])
    return growing


@pytest.mark.parametrize(
    "metric",
    ["0.5", "low", b"1", [0.5], (1.0,), [], {}, torch.tensor([1.0, 2.0]), torch.zeros(0), 1j, object()],
    ids=lambda given: type(given).__name__,
)
def test_a_metric_that_is_none_is_refused_before_anything(metric: Any) -> None:
    growing = whole_grower()
    with (
        nothing_changes(growing),
        pytest.raises(TypeError, match="metric must be a number, got"),
    ):
        growing.step(DATA, loss_fn, metric=metric)


@pytest.mark.parametrize("metric", [1, 0.5, torch.tensor(0.5), torch.ones(1, 1), float("nan"), None])
def test_a_metric_that_holds_one_number_is_taken(metric: Any) -> None:
    growing = whole_grower()
    assert growing.step(DATA, loss_fn, metric=metric) is not None


class Fails(Trigger):
    """Raises where it is told to, and counts what it was asked."""

    def __init__(self, where: str) -> None:
        self.where, self.asked = where, 0

    def at(self, where: str) -> None:
        self.asked += 1
        if self.where == where:
            raise ZeroDivisionError(where)

    def fires(self, context: TriggerContext) -> bool:
        self.at("fires")
        return True

    def looked(self) -> None:
        self.at("looked")

    def allows(self, site: Any, context: TriggerContext) -> bool:
        self.at("allows")
        if self.where == "second" and context.growths > 2:
            raise ZeroDivisionError("second")
        return True

    def grown(self) -> None:
        self.at("grown")

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


@pytest.mark.parametrize("where", ["fires", "looked", "allows", "second", "grown"])
@pytest.mark.parametrize("average", [False, True], ids=["", "with an average"])
def test_a_trigger_that_raises_leaves_nothing_behind(where: str, average: bool) -> None:
    model = deep()
    averages = [AveragedModel(model)] if average else []
    trigger = Fails("")
    growing = grower(
        model,
        trained(model),
        trigger=trigger,
        max_growths=2,
        rates=Rates(lr_factor=0.5, new_lr_factor=0.1),
        averaged=averages,
    )
    growing.step(DATA, loss_fn, metric=1.0)
    trigger.where = where
    with nothing_changes(growing, *averages), pytest.raises(ZeroDivisionError, match=where):
        growing.step(DATA, loss_fn, metric=1.0)
    trigger.where = ""
    assert growing.step(DATA, loss_fn, metric=1.0) is not None and len(growing.history) == 4


def broken_average(model: nn.Module, damage: str) -> AveragedModel:
    average = AveragedModel(model)
    network: Any = average.module
    if damage == "a parameter less":
        network[0].bias = None
    elif damage == "other names":
        network.add_module("8", nn.Identity())
        network[0] = nn.Sequential(network[0])
    elif damage == "another container":  # parameters of the same names and shapes, and no place for the layer
        average.module = Same(network)
    return average


class Same(nn.Module):
    def __init__(self, other: Any) -> None:
        super().__init__()
        for name, module in other.named_children():
            if any(True for _ in module.parameters()):
                self.add_module(name, module)


@pytest.mark.parametrize("damage", ["a parameter less", "other names", "another container"])
@pytest.mark.parametrize("first", [False, True], ids=["alone", "after a good one"])
def test_an_average_that_differs_leaves_nothing_behind(damage: str, first: bool) -> None:
    model = deep()
    good = AveragedModel(model)
    growing = grower(model, trained(model), rates=Rates(lr_factor=0.5), averaged=[good])
    bad = broken_average(model, damage)
    growing._followers.averaged = [good, bad] if first else [bad, good]
    with nothing_changes(growing, good, bad), pytest.raises(SensliError):
        growing.step(DATA, loss_fn)
    growing._followers.averaged = [good]
    assert growing.step(DATA, loss_fn) is not None
    assert [name for name, _ in good.module.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_a_second_layer_that_fails_takes_the_first_with_it() -> None:
    """The second place is gone when its turn comes: the function on sites takes the module out."""
    model = deep()
    optimizer = trained(model)

    class Steals(Trigger):
        def fires(self, context: TriggerContext) -> bool:
            return True

        def allows(self, site: Any, context: TriggerContext) -> bool:
            if context.growths == 1:  # the second choice
                site.point.anchor.__dict__["_module"] = lambda: None  # as if the module had been replaced
            return True

    growing = grower(model, optimizer, trigger=Steals(), max_growths=4, rates=Rates(lr_factor=0.5))
    with nothing_changes(growing), pytest.raises(SensliError, match="not a site of this"):
        growing.step(DATA, loss_fn)


def test_a_log_that_raises_is_a_warning_and_an_error_where_warnings_are() -> None:
    told: list[Decision] = []

    def log(look: Decision) -> None:
        told.append(look)
        raise ZeroDivisionError

    growing = whole_grower(log=None)
    growing.options = replace(growing.options, log=log)
    with pytest.warns(UserWarning, match="the log of the Grower failed: ZeroDivisionError") as caught:
        assert growing.step(DATA, loss_fn, metric=1.0) is not None
    assert caught[0].filename == __file__
    with warnings.catch_warnings(), nothing_changes(growing), pytest.raises(UserWarning, match="log of the Grower"):
        warnings.simplefilter("error")
        growing.step(DATA, loss_fn, metric=1.0)


def test_an_interrupt_leaves_nothing_behind() -> None:
    growing = whole_grower()

    def log(look: Decision) -> None:
        raise KeyboardInterrupt

    growing.options = replace(growing.options, log=log)
    with nothing_changes(growing), pytest.raises(KeyboardInterrupt):
        growing.step(DATA, loss_fn, metric=1.0)


@pytest.mark.parametrize("make", [deep, Named, lambda: Named(nn.Tanh), Functional, residual])
def test_every_form_goes_out_again(make: Any) -> None:
    model = make()
    average = AveragedModel(model)
    trigger = Fails("")
    growing = grower(model, trained(model), trigger=trigger, max_growths=3, averaged=average, max_factor=None)
    growing.step(DATA, loss_fn)
    trigger.where = "grown"
    with nothing_changes(growing, average), pytest.raises(ZeroDivisionError):
        growing.step(DATA, loss_fn)


# --- damaged states ---


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in items:
        yield from leaves(part, (*path, key))


def damaged(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


@pytest.mark.slow
def test_a_damaged_state_changes_nothing_at_all() -> None:
    model = deep()
    growing = grower(
        model,
        trained(model),
        trigger=Every(1) | Plateau(3) & At(5),
        rates=Rates(lr_factor=0.5, new_lr_factor=0.5),
    )
    for metric in (3.0, 2.0):
        growing.step(DATA, loss_fn, metric=metric)
    state = json.loads(json.dumps(growing.state_dict()))
    other = grower(replay(deep(), growing.history), trigger=Every(1) | Plateau(3) & At(5))
    damages = [None, "x", -1, 1.5, True, [], {}, [None], {"a": 1}, 10**400, math.nan, KeyError, [300], "é" * 50]
    refused = 0
    for path in leaves(state):
        for value in random.Random(str(path)).sample(damages, 1):
            if value is KeyError and not path:
                continue
            given = damaged(state, path, value)
            before, history = other.state_dict(), other.history
            try:
                other.load_state_dict(given)
            except SensliError:
                refused += 1
                assert other.state_dict() == before and other.history is history, (path, value)
            else:  # what cannot be told from a sound one
                other.load_state_dict(state)
    assert refused > 40
    for key in ("calls", "generator", "trigger", "largest_loss"):
        for value in damages:
            if key == "largest_loss" and value in (1.5, KeyError):
                continue  # sound, or as older versions wrote it
            with pytest.raises(SensliError):
                other.load_state_dict(damaged(state, (key,), value))


@pytest.mark.parametrize(
    ("strategy", "key"),
    [("sensli", "generator"), ("random-units", "rival_generator"), ("convsenn", "convsenn_generator")],
)
def test_the_state_of_a_generator_is_short_and_that_of_older_versions_is_read(strategy: str, key: str) -> None:
    model = deep()
    growing, older, other = (
        Grower(model, trained(model), preset="paper", example=points(2), trigger=At(9), strategy=strategy, seed=seed)
        for seed in (3, 4, 5)
    )
    state = json.loads(json.dumps(growing.state_dict()))
    assert isinstance(state[key], str) and len(json.dumps(state)) < 7_500
    numbers = list(torch.Generator().manual_seed(3).get_state().tolist())
    older.load_state_dict({**state, key: numbers})  # as it was saved once
    other.load_state_dict(state)
    assert older.state_dict() == other.state_dict() == growing.state_dict()
    before = other.state_dict()
    for wrong in (numbers[:-1], [300, *numbers[1:]], state[key][:-4], state[key][4:], "?" * 8, "", [], None, 3):
        with pytest.raises(SensliError, match="the state of a random generator is damaged"):
            other.load_state_dict({**state, key: wrong})
    assert other.state_dict() == before


# --- what the optimizer trains ---


@pytest.mark.parametrize("trained", [True, False])
def test_without_an_optimizer_it_is_said_once_in_a_training(trained: bool) -> None:
    """At the first call of a loop that trains, or at the second one; one expansion before the optimizer is made is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = deep()
        growing = grower(model)
        if trained:
            loss_fn(model(DATA[0][0]), DATA[0][1]).backward()
        else:
            assert growing.step(DATA, loss_fn) is not None
    with pytest.warns(UserWarning, match=r"no optimizer, so nothing will train.*growth\.parameters") as caught:
        assert growing.step(DATA, loss_fn) is not None
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        growing.step(DATA, loss_fn)


def test_an_optimizer_of_another_model_is_refused_at_once() -> None:
    model = deep()
    for optimizer in (
        torch.optim.SGD(deep().parameters(), lr=0.1),
        [torch.optim.SGD(deep().parameters(), lr=0.1), torch.optim.Adam(fnn().parameters())],
    ):
        with pytest.raises(OptimizerError, match="contains no parameter of this Sequential"):
            grower(model, optimizer)
    with pytest.raises(OptimizerError, match="LBFGS cannot follow"):
        grower(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(OptimizerError, match="needs optimizer="):
        grower(model, rates=Rates(group=0))
    with pytest.raises(OptimizerError, match="group=7"):
        grower(model, torch.optim.SGD(model.parameters(), lr=0.1), rates=Rates(group=7))


def frozen_backbone() -> tuple[nn.Module, Any]:
    """The first two layers are frozen and in no optimizer; the last two train."""
    model: Any = deep(4)
    for parameter in (*model[0].parameters(), *model[2].parameters()):
        parameter.requires_grad_(False)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_places_that_nothing_would_train_are_skipped_with_the_reason() -> None:
    model, optimizer = frozen_backbone()
    every = [site.path for site in find_sites(model, points(2))]
    growing = grower(model, optimizer)
    sites = growing.sites()
    assert every == ["1", "3", "5", "7"] and [site.path for site in sites] == ["5", "7"]
    assert [path for path, _ in sites.skipped] == ["1", "3"]
    assert "1: nothing would train a layer there" in sites.explain() and "group=" in sites.explain()
    for _ in range(3):
        growth = growing.step(DATA, loss_fn)
        assert growth is not None and growth.site.path not in ("1", "3")
    assert all(
        any(p is each for each in optimizer.param_groups[0]["params"]) for p in model.parameters() if p.requires_grad
    )


def test_a_group_lets_layers_into_a_frozen_part() -> None:
    model, optimizer = frozen_backbone()
    optimizer.add_param_group({"params": [], "lr": 0.01})
    for group in (1, optimizer.param_groups[1]):
        growing = grower(model, optimizer, rates=Rates(group=group), select=lambda merits: merits[0])
        assert growing.sites()[0].path == "1"
        growth = growing.step(DATA, loss_fn)
        assert growth is not None and growth.site.path == "1"
    assert len(optimizer.param_groups[1]["params"]) == 4


def test_where_nothing_is_trained_there_is_no_place() -> None:
    model: Any = deep()
    optimizer = torch.optim.SGD(model[8].parameters(), lr=0.1)
    model[8] = nn.Sequential(model[8])  # the head, away from every place
    model = nn.Sequential(model[:7], nn.Flatten(), model[8])
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    growing = grower(model, optimizer)
    skipped = [
        path for path, _ in trained_only(model, growing._strategy.propose(model, points(2)), optimizer, None).skipped
    ]
    assert "0.1" in skipped


class Adapted(nn.Module):
    """A frozen block with a low-rank adapter, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(6), nn.Linear(6, 6)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        for part in (self.norm, self.base):
            part.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return x + torch.tanh(self.base(y)) + self.up(self.down(y))


def test_adapters_do_not_end_the_training() -> None:
    model = nn.Sequential(nn.Linear(3, 6), *(Adapted() for _ in range(3)), nn.Linear(6, 2)).double()
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=0.01)
    growing = grower(model, optimizer)
    try:
        sites = growing.sites()
    except SensliError as error:
        assert "nothing would train" in str(error)
    else:
        assert growing.step(DATA, loss_fn) is not None and sites
    again = grower(model, optimizer, rates=Rates(group=0))
    assert again.step(DATA, loss_fn) is not None


# --- how large, and when it is enough ---


def wide() -> nn.Module:
    """62 parameters; a layer at its one place has 156."""
    return alive(nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2)))


def test_a_layer_larger_than_the_rest_is_taken_only_where_it_is_asked_for() -> None:
    model = wide()
    told: list[str] = []
    growing = grower(model, trained(model), log=lambda look: told.append(str(look)))
    with pytest.warns(UserWarning, match=r"max_factor = 2 times its parameters.*Give Grower\(max_factor=4\)"):
        assert growing.step(DATA, loss_fn) is None
    assert growing.step(DATA, loss_fn) is None  # said once
    assert told[1] == (
        "epoch 2: nothing grown | every growth would bring the model to more than max_factor = 2 times its parameters; the smallest, "
        "Linear(12, 12) + ReLU after 1, 74 -> 230 parameters, x3.1"
    )
    for factor in (4, None):
        model = wide()
        allowed = grower(model, trained(model), max_factor=factor, log=lambda look: told.append(str(look)))
        assert allowed.step(DATA, loss_fn) is not None
        assert "| 74 -> 230 parameters, x3.1, +" in told[-1]


def test_the_smaller_layers_are_taken_and_the_larger_ones_named() -> None:
    model = alive(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2)))
    growing = grower(model, trained(model))
    growth = growing.step(DATA, loss_fn)
    assert growth is not None and growth.site.path == "1"
    assert growing.history.record.decisions[0].reason.endswith("left out as larger than max_factor = 2 allows: 1")


@pytest.mark.parametrize("factor", [1, 0, -2, math.nan])
def test_senseless_limits_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="max_factor must be a number above 1"):
        grower(deep(), max_factor=factor)
    with pytest.raises(ValueError, match="floor must be at least 0 and below 1"):
        grower(deep(), floor=factor - 2)


def solve(scale: float, loss: Any, **options: Any) -> tuple[Grower, list[float]]:
    """Looks at a network whose outputs come nearer and nearer to the targets, as at the end of a training."""
    model: Any = deep()
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1), max_factor=None, **options)
    x = points(12)
    values = []
    for look in range(7):
        with torch.no_grad():
            target = model(x) + scale * 10.0 ** (-2 * look) * torch.ones(12, 2, dtype=torch.float64)
        growing.step([(x, target)], loss)
        assert growing.last_merits is not None
        values.append(growing.last_merits.best.value)
    return growing, values


@pytest.mark.parametrize(
    ("loss", "scale"),
    [
        (nn.functional.mse_loss, 1.0),
        (nn.functional.mse_loss, 1e6),
        (nn.functional.smooth_l1_loss, 1e3),
        pytest.param(nn.functional.smooth_l1_loss, 1e6, marks=pytest.mark.slow),
    ],
)
def test_it_stops_growing_on_a_solved_problem(scale: float, loss: Any) -> None:
    free, values = solve(scale, loss, floor=0.0)
    assert values[-1] < 1e-11 * values[0] and len(free.history) == 7  # for ever
    held, _ = solve(scale, loss)
    assert 1 <= len(held.history) < 7
    reason = held.history.record.decisions[-1].reason
    assert reason.startswith("the problem is solved: a change of 1 in the weights of the best") and "floor of" in reason
    json.dumps(held.state_dict())


def test_a_hard_problem_is_not_taken_for_a_solved_one() -> None:
    """Targets of 1e9 and outputs of 1: gradients are tiny beside the loss, and all is still to be done."""
    model: Any = deep()
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = points(12)
    growing.step([(x, 1e9 * torch.ones(12, 2, dtype=torch.float64))], nn.functional.mse_loss)
    merits = growing.last_merits
    assert merits is not None and merits.loss is not None and math.sqrt(merits.best.value) < 1e-7 * merits.loss
    assert len(growing.history) == 1


def test_it_stops_where_the_loss_is_zero_from_the_first_look() -> None:
    """Cross-entropy in single precision: the loss is 0.0, and gradients of 1e-11 are left."""
    model: Any = deep().float()
    with torch.no_grad():
        model[8].bias[:] = torch.tensor([0.0, 28.0])
        model[8].weight *= 1e-3
    x = points(12).float()
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=0.0, example=x[:1])
    assert growing.step([(x, torch.ones(12, dtype=torch.long))], loss_fn) is None
    assert growing.last_merits is not None and growing.last_merits.loss == 0.0 < growing.last_merits.best.value
    assert "the problem is solved" in growing.history.record.decisions[0].reason


def late_look(error: float, scale: float, loss: Any = nn.functional.mse_loss, **options: Any) -> Grower:
    """One look, the first one, at a network whose outputs of size ``scale`` are this near to the targets, as a share of that size."""
    model: Any = deep()
    with torch.no_grad():
        model[8].weight *= scale
        model[8].bias *= scale
    x = points(12)
    with torch.no_grad():
        target = model(x) + scale * error * torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double()
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    with untouched(model, *growing.optimizers) if error < 1e-6 and "floor" not in options else nullcontext():
        growing.step([(x, target)], loss)
    return growing


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_it_stops_also_where_the_first_look_comes_late(scale: float) -> None:
    """Whatever the unit of the targets is; and a problem that is not solved is not taken for one because its unit is small."""
    solved = late_look(1e-11, scale)
    assert not solved.history and "the problem is solved" in solved.history.record.decisions[0].reason
    assert len(late_look(1e-11, scale, floor=0.0).history) == 1
    assert len(late_look(0.5, scale).history) == len(late_look(1e-2, scale).history) == 1


def test_a_classification_that_is_learnt_before_the_first_look_does_not_grow_for_ever() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4).double()
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    with torch.no_grad():  # right, and sure of it
        model[0].weight[:2] = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])
        model[0].bias[:2] = model[2].bias[:2] = model[4].bias[:] = 0.0
        model[2].weight[:2], model[4].weight[:] = torch.eye(16)[:2], 0.0
        model[4].weight[1, 0] = model[4].weight[0, 1] = 20.0 / x[:, 0].abs().min()
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1), example=x[:1])
    assert growing.step([(x, y)], loss_fn) is None
    merits = growing.last_merits
    assert merits is not None and merits.loss is not None and 0 < merits.loss < 1e-7 and merits.best.value > 0
    assert growing.state_dict()["largest_loss"] == pytest.approx(math.log(2))  # of equal outputs


def sure_look(target: Any, loss: Any, margin: float = 16.0, **options: Any) -> Grower:
    """One look at a network in single precision that tells x > 0 from x < 0, with that difference of its outputs, and large activations."""
    torch.manual_seed(0)
    x = torch.tensor([[-1.0], [1.0]]).repeat(8, 1)
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            layer.bias.zero_()
        model[0].weight[:] = torch.tensor([[-300.0], [300.0]])
        model[2].weight[:] = torch.eye(2)
        model[4].weight[:] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * margin / 600
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1), example=x[:1], tau=0.0, **options)
    growing.step([(x, target((x[:, 0] > 0).long()))], loss)
    return growing


def test_classes_are_learnt_at_the_rounding_level_of_their_loss_however_large_activations_are() -> None:
    for target, loss in (
        (lambda y: y, loss_fn),
        (lambda y: {"labels": y, "name": "x"}, lambda output, target: loss_fn(output, target["labels"])),
        (lambda y: nn.functional.one_hot(y).float(), nn.functional.binary_cross_entropy_with_logits),
    ):
        margin = 2 * 16.0 if loss is nn.functional.binary_cross_entropy_with_logits else 16.0
        held = sure_look(target, loss, margin)
        merits = held.last_merits
        assert merits is not None and merits.loss is not None and 0 < merits.loss < 5e-7
        assert math.sqrt(merits.best.value) > 1e-7 * held.state_dict()["largest_loss"]  # which alone does not tell
        assert not held.history and "the classes are learnt" in held.history.record.decisions[0].reason
        assert len(sure_look(target, loss, margin, floor=0.0).history) == 1
        assert len(sure_look(target, loss, margin * 0.7).history) == 1  # much above rounding
        assert len(sure_look(target, loss, margin * 0.2, floor=0.5).history) == 1  # most of the loss is not gone


def test_a_precise_regression_goes_on() -> None:
    """An error of 3e-4 of what targets vary by is a squared one of 1e-7. Targets of nothing but zeros, as of a residual, are no classes."""
    for scale in (1e-6, 1.0, 1e6):
        growing = late_look(6e-6, scale)
        merits = growing.last_merits
        assert merits is not None and merits.loss is not None
        assert merits.loss < 1.2e-7 * growing.state_dict()["largest_loss"] and len(growing.history) == 1
    zeros = sure_look(lambda y: torch.zeros(len(y)), lambda output, target: loss_fn(output, (torch.arange(16) % 2)))
    assert len(zeros.history) == 1


def test_a_loss_that_knows_no_constant_output_is_measured_as_before() -> None:
    """It fails on one, or is smaller there than the loss of the network: neither says anything, and nothing is changed by asking."""

    def fails(output: Any, target: Any) -> Any:
        if output.detach().std(0).max() < 1e-9:
            raise RuntimeError("all outputs are equal")
        return nn.functional.mse_loss(output, target)

    def spread(output: Any, target: Any) -> Any:
        return output.square().mean()

    for loss in (fails, spread):
        growing = late_look(0.5, 1.0, loss)
        merits = growing.last_merits
        assert merits is not None and growing.state_dict()["largest_loss"] == merits.loss


@dataclass
class Output:
    loss: Any


def test_a_model_that_returns_its_own_loss_stops_at_a_loss_of_zero() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = deep().float()
            self.shift = 28.0

        def forward(self, x: Any) -> Any:
            found = self.net(x) + torch.tensor([0.0, self.shift])
            return Output(loss_fn(found, torch.ones(len(x), dtype=torch.long)))

    model, x = Own(), points(12).float()
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1), example=x[:1])
    model.shift = 14.0
    assert growing.step([{"x": x}]) is not None  # nobody knows that such a loss is small
    model.shift = 28.0
    assert growing.step([{"x": x}]) is None
    assert growing.last_merits is not None and growing.last_merits.loss == 0.0 < growing.last_merits.best.value
    assert "the problem is solved" in growing.history.record.decisions[1].reason


def late_looks_on_ranks() -> None:
    rank = dist.get_rank()
    model: Any = DistributedDataParallel(deep())
    x = points(12) + rank  # other data on each
    with torch.no_grad():
        target = model(x) * (1 + 1e-12 * (rank + 1))
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert growing.step([(x, target)], nn.functional.mse_loss) is None
    assert "the problem is solved" in growing.history.record.decisions[0].reason
    told: list[Any] = [None, None]
    dist.all_gather_object(told, growing.state_dict())
    assert told[0] == told[1] and told[0]["largest_loss"] > 1e-6
    for classes in ({0, 1}, {0}):  # of targets, only where those of all ranks are
        threshold, blind = Threshold(0.0, 1e-7), Blind(lambda output, target: output.square().mean())
        blind(x, torch.ones(12, dtype=torch.long if rank in classes else torch.float64))
        assert growing.last_merits is not None
        threshold.learn_scale(model, blind, growing.last_merits)
        assert threshold.classes == (classes == {0, 1})


@pytest.mark.process
def test_all_ranks_have_one_scale_of_the_loss(tmp_path: Path) -> None:
    ranks.run(late_looks_on_ranks, 2, tmp_path)


def test_the_scale_of_the_loss_comes_back_with_the_state() -> None:
    growing, _ = solve(1.0, nn.functional.mse_loss)
    model = replay(deep(), growing.history)
    again = grower(model, torch.optim.SGD(model.parameters(), lr=0.1))
    again.load_state_dict(json.loads(json.dumps(growing.state_dict())))
    assert again.state_dict()["largest_loss"] == growing.state_dict()["largest_loss"] > 0.1
    older = growing.state_dict()
    del older["largest_loss"]
    again.load_state_dict(older)


# --- nothing is counted or searched for without need ---


@pytest.mark.parametrize(
    ("trigger", "options", "growths", "counts"),
    [
        (Every(1) & Limit(flops=10**6), {"tau": 1e9}, 0, 1),
        (Every(1) & Limit(flops=10**6), {}, 1, 2),  # once more after the growth, for the log
        (
            Every(1) & Limit(flops=10**6, parameters=10**6, depth=99),
            {"max_growths": 2},
            2,
            3,
        ),  # does the second one still fit?
        (Pays(1e9), {}, 0, 1),
        (Pays(1e-9) & Limit(flops=10**6), {}, 1, 2),
        (Every(1) & Limit(flops=10**6), {"trial": Trial(1), "tau": 1e9}, 0, 1),
        (Every(2), {}, 0, 0),
    ],
)
def test_flops_are_counted_once_per_look_and_again_after_a_growth(
    trigger: Trigger, options: dict[str, Any], growths: int, counts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counted = deep(), list[int]()

    def counting(*args: Any) -> Any:
        counted.append(1)
        return count_flops(*args)

    monkeypatch.setattr("sensli.growing.looking.count_flops", counting)
    growing = grower(model, trained(model), trigger=copy.deepcopy(trigger), max_factor=None, **options)
    assert len(growing.sites()) == 4
    growing.step(DATA, loss_fn)
    assert (len(growing.history), len(counted)) == (growths, counts)


def test_a_trigger_is_told_the_sizes_after_a_growth() -> None:
    """The second of two layers is refused by what the first has made of the model."""
    model = deep()
    now = {name: Sizes(model, points(2))[name] for name in ("parameters", "flops", "depth")}
    site = find_sites(model, points(2))[0]
    added = {"parameters": site.parameters, "flops": site.flops, "depth": 1}
    for name, size in now.items():
        for limit, growths in ((size + added[name], 1), (size + 2 * added[name], 2)):
            other = deep()
            growing = grower(
                other, trained(other), trigger=Every(1) & Limit(**{name: limit}), max_growths=2, max_factor=None
            )
            growing.step(DATA, loss_fn)
            assert len(growing.history) == growths and Sizes(other, points(2))[name] == size + growths * added[name]


def test_it_searches_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    real = searching_module.find_sites

    def counted(*args: Any, **options: Any) -> Any:
        searches.append(1)
        return real(*args, **options)

    monkeypatch.setattr(searching_module, "find_sites", counted)
    model: Any = deep()
    optimizer = trained(model)
    asked: list[str] = []
    growing = grower(model, optimizer, tau=1e9, where=lambda site: not asked.append(site.path))
    for _ in range(4):
        growing.step(DATA, loss_fn)
        for x, y in DATA:  # training moves weights and nothing else
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
    growing.sites()
    assert len(searches) == 1
    assert len(asked) == 5 * 4  # a function is asked at every look

    def changes() -> Iterator[None]:
        model.eval()
        yield
        model[0].requires_grad_(False)
        yield
        model[3] = nn.ReLU()
        yield
        model.register_forward_hook(lambda *_: None)
        yield
        model[1].inplace = True
        yield
        model[2] = nn.Linear(4, 4, bias=False).double()
        yield
        model.append(nn.Linear(2, 2).double())
        yield

    for number, _ in enumerate(changes(), 2):
        for _ in range(2):
            growing.sites()
            assert len(searches) == number
    growing._strategy.threshold.tau = 0.0  # type: ignore[attr-defined]
    before = len(searches)
    growing.step(DATA, loss_fn)
    growing.step(DATA, loss_fn)  # the model has grown
    assert len(searches) == before + 1


class _Failing(nn.Module):
    """An activation whose code fails on what is not a number, as long as somebody has set an error."""

    error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        if _Failing.error is not None and x.isnan().any():
            raise _Failing.error
        return x.relu()


def test_a_search_that_failed_in_the_models_code_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    real = searching_module.find_sites

    def counted(*args: Any, **options: Any) -> Any:
        searches.append(1)
        return real(*args, **options)

    monkeypatch.setattr(searching_module, "find_sites", counted)
    model = nn.Sequential(nn.Linear(3, 4), _Failing(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    growing = grower(model, trained(model), tau=1e9, what="units")
    monkeypatch.setattr(_Failing, "error", torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError), nothing_changes(growing):  # not: nowhere to grow
        growing.step(DATA, loss_fn)
    monkeypatch.setattr(_Failing, "error", OSError("the disk is away"))
    for _ in range(2):
        with pytest.raises(SensliError, match="nowhere to grow"):
            growing.step(DATA, loss_fn)
    monkeypatch.setattr(_Failing, "error", None)
    assert len(growing.sites()) == len(growing.sites()) == 2 and len(searches) == 4
    # What fails in the same way again is how the model is, and what was found is kept.
    growing = grower(model, trained(model), tau=1e9, what="both")
    monkeypatch.setattr(_Failing, "error", OSError("always"))
    for _ in range(4):
        assert len(growing.sites()) == 2
    assert len(searches) == 6


def test_what_callbacks_log_follows_undo_and_another_growth() -> None:
    """As many growths as before, and other FLOPs."""
    model, facts = deep(), LookFacts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growing = grower(model, optimizer)
    growing.step(DATA, loss_fn)
    first = facts.of(growing, points(2))["sensli/flops"]
    undo(model, growing.history.pop(), optimizer=optimizer)
    growing.history.append(insert(model, find_sites(model, points(2), what="units", units=1)[0], optimizer=optimizer))
    assert facts.of(growing, points(2))["sensli/flops"] == count_flops(model, points(2)) != first
