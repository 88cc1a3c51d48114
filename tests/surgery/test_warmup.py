"""Warm-up of what is new alone, and rates by depth: against a slow oracle, to the bit, with every way to step, save and take back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from models import alive, labels, points, residual
from optimizers import KEEPING_COPIES, Lookahead
from sensli import (
    Grower,
    Growth,
    History,
    Rates,
    Site,
    Trial,
    find_sites,
    grow,
    load_checkpoint,
    measure,
    recycle,
    replay,
    save_checkpoint,
    triggers,
    undo,
)
from sensli.errors import CheckpointError, OptimizerError
from sensli.growing.price import _StepCount
from sensli.moves.stacking import find_stack_copies
from sensli.surgery.optimizers import WARMING, is_copy, unwrap_optimizer

STEPS = 5  # of a warm-up
X, Y = points(8), labels(8)
Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adafactor": lambda p: Adafactor(p, lr=0.05),
}


def plain() -> nn.Module:
    torch.manual_seed(0)
    return alive(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return residual(2, 4)


def layer(model: nn.Module) -> Site:
    return find_sites(model, X)[0]


def units(model: nn.Module) -> Site:
    return find_sites(model, X, what="units", units=2)[0]


def copied_units(model: nn.Module) -> Site:
    return find_sites(model, X, what="units", units=2, init="net2net")[-1]


def stack(model: nn.Module) -> Site:
    return find_stack_copies(model, X)[0]


Move = Callable[[nn.Module], Site]
# A model, and what grows at the second and at the fourth step: the first warms up until the sixth.
GROWTHS: dict[str, tuple[Callable[[], nn.Module], Move, Move]] = {
    "layer, units": (plain, layer, units),
    "units, units": (plain, units, units),
    "units, copies": (plain, units, copied_units),
    "block, units": (blocks, layer, units),
    "stack, block": (blocks, stack, layer),
}


def backward(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    cross_entropy(model(X), Y).backward()


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()


def noted(optimizer: Any) -> list[dict[str, Any]]:
    """What is left of a warm-up in the states."""
    return [
        state
        for state in unwrap_optimizer(optimizer).state.values()
        if isinstance(state, dict) and state.keys() & set(WARMING)
    ]


def hooks(optimizer: Any) -> int:
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_post_hooks")
    found = (hook for name in names for hook in getattr(unwrap_optimizer(optimizer), name).values())
    return sum(not isinstance(getattr(hook, "__self__", None), _StepCount) for hook in found)


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return one.state_dict().keys() == theirs.keys() and all(
        torch.equal(v, theirs[k]) for k, v in one.state_dict().items()
    )


class Oracle:
    """What entries should be after a step: that of a plain optimizer on clones, and of new entries a part of it, by their ages."""

    def __init__(self, model: nn.Module, make: Make) -> None:
        self.model, self.make = model, make
        self.ages = {name: torch.full(p.shape, 1000) for name, p in model.named_parameters()}

    def grown(self, growth: Growth) -> None:
        old = {growth.renames.get(name, name): ages for name, ages in self.ages.items()}
        self.ages = {}
        for name, parameter in self.model.named_parameters():
            ages = torch.zeros(parameter.shape, dtype=torch.int64)
            if name in old:  # new rows and columns are the last ones
                ages[tuple(slice(0, length) for length in old[name].shape)] = old[name]
            self.ages[name] = ages

    def step(self, optimizer: Optimizer) -> dict[str, Tensor]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        clones = {name: nn.Parameter(p.detach().clone()) for name, p in self.model.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            own = [clones[names[id(p)]] for p in group["params"]]
            groups.append({**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": own})
        twin = self.make(groups)
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            clones[name].grad = parameter.grad.clone()
            state = {k: copy.deepcopy(v) for k, v in optimizer.state.get(parameter, {}).items() if k not in WARMING}
            if state:
                twin.state[clones[name]] = state
        twin.step()
        expected: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            self.ages[name] = self.ages[name] + 1
            value, before, after = (
                parameter.detach().clone(),
                parameter.detach().flatten(),
                clones[name].detach().flatten(),
            )
            flat = value.view(-1)
            for i, age in enumerate(self.ages[name].flatten().tolist()):
                flat[i] = after[i] if age >= STEPS else (after[i] - before[i]) * (age / STEPS) + before[i]
            expected[name] = value
        return expected


@pytest.mark.parametrize("growths", GROWTHS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_new_entries_go_a_part_of_the_way_and_old_ones_all_of_it(kind: str, growths: str) -> None:
    make, (network, first, second) = OPTIMIZERS[kind], GROWTHS[growths]
    model = network()
    optimizer = make(model.parameters())
    oracle = Oracle(model, make)
    for step in range(10):
        if step in (1, 3):
            site = (first if step == 1 else second)(model)
            oracle.grown(grow(model, site, optimizer=optimizer, warmup=STEPS, check=None if first is stack else X))
        assert bool(noted(optimizer)) == (1 <= step < 7) and bool(hooks(optimizer)) == (1 <= step < 7)
        for state in noted(optimizer):
            assert set(state[WARMING[0]].unique().tolist()) - {0} == {float(own) for own, _, _ in state[WARMING[1]]}
        backward(model)
        expected = oracle.step(optimizer)
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), (step, name)


def test_the_oracle_is_another_one_without_a_warm_up() -> None:
    model = plain()
    optimizer = AdamW(model.parameters(), lr=0.01)
    oracle = Oracle(model, OPTIMIZERS["AdamW"])
    oracle.grown(grow(model, units(model), optimizer=optimizer))
    assert not noted(optimizer) and not hooks(optimizer)
    backward(model)
    expected = oracle.step(optimizer)
    optimizer.step()
    assert not all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", KEEPING_COPIES)
def test_copies_of_new_entries_stay_with_them(kind: str) -> None:
    """What an optimizer keeps of new weights moves as little as they do: slow weights would otherwise drag them along."""
    moved: list[dict[str, Tensor]] = []
    for warmup in (None, 1000):
        model = plain()
        optimizer = KEEPING_COPIES[kind](model.parameters())
        train(model, optimizer, 3)
        grow(model, units(model), optimizer=optimizer, warmup=warmup)
        weight, inner = model.get_parameter("0.weight"), unwrap_optimizer(optimizer)

        def values(weight: Any = weight, inner: Any = inner) -> dict[str, Tensor]:
            copies = {key: value for key, value in inner.state[weight].items() if is_copy(inner, key)}
            return {name: value.detach().clone() for name, value in {"itself": weight, **copies}.items()}

        before = values()
        train(model, optimizer, 4)
        moved.append({name: (value - before[name]).abs().sum(1) for name, value in values().items()})
    assert len(moved[0]) == 1 + (kind in ("ASGD", "Ranger", "schedule-free"))
    for name, rows in moved[0].items():
        assert (rows > 0).all() and (moved[1][name][4:] < 0.05 * rows[4:]).all(), name


class Twice(AdamW):
    """Its step is that of its parent with something before and after, as many have it; the hooks of both run."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.999)
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.999)
        return result


def test_a_step_inside_of_a_step_is_one() -> None:
    AdamW([nn.Parameter(torch.zeros(1))])
    make: Make = lambda p: Twice(p, lr=0.01, foreach=False)  # noqa: E731
    model = plain()
    optimizer = make(model.parameters())
    oracle = Oracle(model, make)
    oracle.grown(grow(model, layer(model), optimizer=optimizer, warmup=STEPS))
    for _ in range(STEPS + 1):
        backward(model)
        expected = oracle.step(optimizer)
        optimizer.step()
        assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_a_step_that_fails_loses_nothing() -> None:
    runs = []
    for fails in (False, True):
        model = plain()
        optimizer = AdamW(model.parameters(), lr=0.01)
        grow(model, units(model), optimizer=optimizer, warmup=STEPS)
        train(model, optimizer)
        if fails:
            saved = copy.deepcopy(optimizer.state_dict())

            def closure() -> Any:
                raise KeyError("data")

            with pytest.raises(KeyError):
                optimizer.step(closure)
            assert repr(optimizer.state_dict()) == repr(saved)
            with pytest.raises(KeyError):
                optimizer.step(closure)
            grow(model, layer(model), optimizer=optimizer)
            undo(model, optimizer=optimizer)
            with pytest.raises(KeyError):
                optimizer.step(closure)
            optimizer.load_state_dict(saved)
        train(model, optimizer, 2)
        runs.append(model)
    assert same(*runs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_no_age(fused: bool) -> None:
    runs = []
    for skips in (False, True):
        model = plain().float()
        optimizer = Adam(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        grow(model, find_sites(model, X.float())[0], optimizer=optimizer, warmup=STEPS)
        for step in range(4):
            optimizer.zero_grad()
            loss = cross_entropy(model(X.float()), Y)
            if skips and step == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(4.0)
            if step == 2 and not skips:
                break
        runs.append((model, [each[WARMING[1]] for each in noted(optimizer)]))
    assert runs[0][1] == runs[1][1] and runs[0][1]
    assert same(runs[0][0], runs[1][0])


def test_other_hooks_run_around_ours_which_go_by_themselves() -> None:
    model = plain()
    optimizer = AdamW(model.parameters(), lr=0.01)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(model[0].weight.detach().clone()))
    grow(model, units(model), optimizer=optimizer, warmup=3)
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: seen.append(model[0].weight.detach().clone()))
    for _ in range(3):
        train(model, optimizer)
        assert all(
            torch.equal(each, model[0].weight) for each in seen
        )  # an average would see what the training goes on with
        seen.clear()
    train(model, optimizer)
    assert hooks(optimizer) == 3 and not noted(optimizer) and len(seen) == 2


def test_several_optimizers_count_their_own_steps() -> None:
    model = plain()
    first = AdamW(model[0].parameters(), lr=0.01)
    second = SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)
    grow(model, units(model), optimizer=[first, second], warmup=STEPS)  # rows in the first, columns in the second
    train(model, first, 2)
    train(model, second, 1)
    assert [each[WARMING[1]][0][1:] for each in noted(first)] == [[2, STEPS]] * 2
    assert [each[WARMING[1]][0][1:] for each in noted(second)] == [[1, STEPS]]


def test_a_closure_is_evaluated_inside_of_the_step() -> None:
    runs = []
    for closes in (False, True):
        model = plain()
        optimizer = AdamW(model.parameters(), lr=0.01)
        grow(model, units(model), optimizer=optimizer, warmup=STEPS)
        for _ in range(3):
            if closes:
                optimizer.step(lambda model=model: backward(model))  # type: ignore[misc]
            else:
                train(model, optimizer)
        runs.append(model)
    assert same(*runs)


def test_a_wrapper_around_an_optimizer() -> None:
    model = plain()
    optimizer = Lookahead(SGD(model.parameters(), lr=0.1))
    grow(model, layer(model), optimizer=optimizer, warmup=STEPS)
    train(model, optimizer, STEPS)
    assert not noted(optimizer) and not hooks(optimizer)


# ---- Taken back, tried, recycled, replayed.


def states(optimizer: Optimizer) -> str:
    return repr(optimizer.state_dict())


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("growths", GROWTHS)
def test_undo_leaves_what_was(growths: str, trained: int) -> None:
    network, first, second = GROWTHS[growths]
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, trained)
    start = states(optimizer)
    one = grow(model, first(model), optimizer=optimizer, warmup=STEPS)
    train(model, optimizer, trained)
    before, count = states(optimizer), hooks(optimizer)
    two = grow(model, second(model), optimizer=optimizer, warmup=7)
    assert states(optimizer) != before
    undo(model, two, optimizer=optimizer)
    assert states(optimizer) == before and hooks(optimizer) == count
    undo(model, Growth.from_dict(json.loads(json.dumps(one.to_dict()))), optimizer=optimizer)
    assert not hooks(optimizer) and not noted(optimizer)
    if not trained:
        assert states(optimizer) == start


def dying() -> nn.Module:
    model = plain()
    with torch.no_grad():
        model[0].weight[1:3], model[0].bias[1:3] = 0.0, -1.0
    return model


def test_recycled_units_warm_up_and_come_back_by_undo() -> None:
    model = dying()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    grower = Grower(
        model, optimizer, example=X, what="units", recycle=True, trigger=triggers.Every(1), max_factor=1.0001,
        rates=Rates(warmup=STEPS),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="more than max_factor"):
        grower.step([(X, Y)], cross_entropy)
    assert len(grower.history) == 1 and not grower.history.additions
    new = optimizer.state[model[0].weight][WARMING[0]]
    assert new[:, 0].tolist() == [0, 1, 1, 0]
    assert optimizer.state[model[2].weight][WARMING[0]][0].tolist() == [0, 1, 1, 0]
    plain_one = copy.deepcopy(model)
    train(plain_one, SGD(plain_one.parameters(), lr=0.1, momentum=0.9))
    before = model[0].weight.detach().clone()
    train(model, optimizer)
    step, whole = model[0].weight - before, plain_one[0].weight - before
    assert torch.equal(step[[0, 3]], whole[[0, 3]]) and torch.allclose(step[1:3], whole[1:3] / STEPS, atol=1e-15)
    undo(model, grower.history.pop(), optimizer=optimizer)
    assert not noted(optimizer) and not hooks(optimizer)
    assert recycle(dying(), X)[0].site.kind == "units"


@pytest.mark.parametrize("warmup", [3, 50])
def test_a_trial_trains_with_it_and_hands_it_on(warmup: int) -> None:
    model = plain()
    optimizer = AdamW(model.parameters(), lr=0.01)
    grower = Grower(
        model, optimizer, example=X, what="layers", trigger=triggers.Every(1), max_factor=None, rates=Rates(warmup=warmup),
        trial=Trial(steps=12, metric=lambda model: -sum(1 for _ in model.parameters())),
    )  # fmt: skip
    growth = grower.step([(X, Y)], cross_entropy)
    assert growth is not None and growth.parameters
    tried = grower.history.record.decisions[-1].tried
    assert tried is not None
    taken = tried.arms[tried.winner].steps
    ages = {each[WARMING[1]][0][1] for each in noted(optimizer)}
    assert ages == ({taken} if warmup == 50 else set())

    again = plain()  # the same by hand
    other = AdamW(again.parameters(), lr=0.01)
    grow(again, growth.site.by_path(), optimizer=other, warmup=warmup)
    train(again, other, taken + 2)
    train(model, optimizer, 2)
    assert same(model, again) and bool(hooks(optimizer)) == (warmup == 50)


def test_a_history_is_replayed_without_it_and_as_one_with_it() -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    growths = [grow(model, layer(model), optimizer=optimizer, warmup=STEPS, depth_power=1.0)]
    history = History.from_json(History(growths).to_json())
    again = replay(plain(), history)
    again.load_state_dict(model.state_dict())
    assert same(model, again)


# ---- Saved and resumed to the bit.


def continued(optimizer: Any, model: nn.Module) -> nn.Module:
    train(model, optimizer, 9)
    assert not noted(optimizer) and not hooks(optimizer)
    return model


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("kind", ["SGD", "AdamW fused", "Adafactor"])
def test_a_checkpoint_in_the_middle_of_a_warm_up(kind: str, after: int, tmp_path: Path) -> None:
    model = plain()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer)
    history = History([grow(model, units(model), optimizer=optimizer, warmup=7)])
    train(model, optimizer, 2)
    history.append(grow(model, layer(model), optimizer=optimizer, warmup=STEPS))
    train(model, optimizer, after)
    save_checkpoint(tmp_path / "file", model, optimizer=optimizer, history=history)
    found = load_checkpoint(tmp_path / "file", plain, lambda model: OPTIMIZERS[kind](model.parameters()))
    assert same(continued(optimizer, model), continued(found.optimizer, found.model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("first", ["optimizer", "grower", "before"])
def test_by_hand_in_any_order(first: str, dtype: torch.dtype) -> None:
    def made() -> nn.Module:
        return plain().to(dtype)

    x = X.to(dtype)

    def grower_of(model: nn.Module, optimizer: Optimizer) -> Grower:
        return Grower(
            model, optimizer, example=x, trigger=triggers.Every(1), max_factor=None, units=2, rates=Rates(warmup=9)
        )

    def steps(model: nn.Module, optimizer: Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            cross_entropy(model(x), Y).backward()
            optimizer.step()

    model = made()
    optimizer = AdamW(model.parameters(), lr=0.01)
    grower = grower_of(model, optimizer)
    assert grower.step([(x, Y)], cross_entropy) is not None
    steps(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), grower.state_dict()))
    steps(model, optimizer, 7)
    again = replay(made(), History.from_dict(saved[2]["history"]))
    again.load_state_dict(saved[0])
    other = AdamW(again.parameters(), lr=0.01)
    if first == "before":
        other.load_state_dict(saved[1])
    loaded = grower_of(again, other)
    if first == "grower":
        loaded.load_state_dict(saved[2])
    if first != "before":
        other.load_state_dict(saved[1])
    steps(again, other, 7)
    assert same(model, again) and not noted(other) and not hooks(other)


def test_a_damaged_warm_up_is_refused(tmp_path: Path) -> None:
    model = plain()
    optimizer = AdamW(model.parameters(), lr=0.01)
    history = History([grow(model, units(model), optimizer=optimizer, warmup=7)])
    for key, value in (
        (WARMING[1], [[1, 9, 7]]),
        (WARMING[1], "x"),
        (WARMING[1], [[1, 2]]),
        (WARMING[0], torch.zeros(2)),
        (WARMING[0], None),
    ):
        state = optimizer.state[model[0].weight]
        kept, state[key] = state[key], value
        save_checkpoint(tmp_path / "file", model, optimizer=optimizer, history=history)
        with pytest.raises(CheckpointError, match="AdamW tells of a warm-up that does not fit"):
            load_checkpoint(tmp_path / "file", plain, lambda model: AdamW(model.parameters()))
        state[key] = kept


# ---- Rates by depth.


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("network", "move", "share"),
    [(plain, layer, 3 / 4), (blocks, layer, 2 / 3), (blocks, stack, 2 / 4), (plain, units, 1.0)],
)
def test_rates_fall_with_depth(network: Callable[[], nn.Module], move: Move, share: float) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=20)
    train(model, optimizer)
    scheduler.step()
    before = rates(optimizer)
    growth = grow(model, move(model), optimizer=optimizer, scheduler=scheduler, depth_power=1.5, lr_factor=0.5)
    assert rates(optimizer) == pytest.approx([0.5 * share**1.5 * rate for rate in before], rel=1e-12)
    assert growth.rates is not None and growth.rates.factor == pytest.approx(0.5 * share**1.5)
    reference = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    other = CosineAnnealingLR(reference, T_max=20)
    for _ in range(3):
        train(model, optimizer)
        scheduler.step()
    for _ in range(4):
        reference.step()
        other.step()
    assert rates(optimizer) == pytest.approx([0.5 * share**1.5 * rate for rate in rates(reference)], rel=1e-9)
    undo(model, Growth.from_dict(json.loads(json.dumps(growth.to_dict()))), optimizer=optimizer, scheduler=scheduler)
    assert rates(optimizer) == pytest.approx(rates(reference), rel=1e-9)


def test_a_grower_scales_by_depth_at_every_growth_and_by_its_factor_once() -> None:
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model, optimizer, example=X, what="layers", trigger=triggers.Every(1), max_growths=2, max_factor=None,
        rates=Rates(lr_factor=0.5, depth_power=1.0, warmup=STEPS),
    )  # fmt: skip
    grower.step([(X, Y)], cross_entropy)
    assert len(grower.history) == 2 and rates(optimizer) == pytest.approx([0.1 * 0.5 * 3 / 5])
    new = {id(p) for name, p in model.named_parameters() if name in {n for g in grower.history for n in g.parameters}}
    assert {id(p) for p, state in optimizer.state.items() if WARMING[0] in state} == new


# ---- What is refused, and leaves everything as it was.


WHOLE = "warmup must be a whole number of at least 2 (for example 200), got"
POWER = "depth_power must be a number of at least 0 (for example 1.5), got"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"warmup": 1}, f"{WHOLE} 1."),
        ({"warmup": 2.5}, f"{WHOLE} 2.5."),
        ({"warmup": True}, f"{WHOLE} True."),
        ({"depth_power": -1}, f"{POWER} -1."),
        ({"depth_power": "x"}, f"{POWER} 'x'."),
        ({"depth_power": float("inf")}, f"{POWER} inf."),
    ],
)
def test_refused(given: dict[str, Any], text: str) -> None:
    model = plain()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    before, weights = states(optimizer), copy.deepcopy(model)
    with pytest.raises(OptimizerError) as error:
        grow(model, layer(model), optimizer=optimizer, **given)
    assert str(error.value) == text
    with pytest.raises(OptimizerError) as error:
        Rates(**given)
    assert str(error.value) == text
    assert states(optimizer) == before and same(model, weights) and not hooks(optimizer)


class Bare(SGD):
    """Does not call the constructor of its parents."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups, self.state, self.defaults = [{"params": list(parameters), "lr": 0.1}], {}, {"lr": 0.1}


def test_an_optimizer_without_hooks_grows_without_a_warm_up() -> None:
    model = plain()
    optimizer = Bare(model.parameters())
    for refused in (
        lambda: grow(model, layer(model), optimizer=optimizer, warmup=STEPS),
        lambda: Grower(model, optimizer, rates=Rates(warmup=STEPS)),
    ):
        with pytest.raises(
            OptimizerError, match=r"^warmup must be None with Bare, got 5: it has no hooks around its steps"
        ):
            refused()
    assert not optimizer.state and same(model, plain())
    undo(model, grow(model, layer(model), optimizer=optimizer), optimizer=optimizer)


def test_refused_without_what_it_needs() -> None:
    model = plain()
    optimizer = AdamW(model.parameters(), lr=0.01)
    CosineAnnealingLR(optimizer, T_max=9)
    before = states(optimizer)
    for name in ("warmup", "depth_power"):
        with pytest.raises(
            OptimizerError, match=f"^{name}= needs optimizer=: rates and groups belong to the optimizer"
        ):
            grow(model, layer(model), **{name: 2})
        with pytest.raises(
            OptimizerError, match=f"^{name}= needs optimizer=: rates and groups belong to the optimizer"
        ):
            Grower(model, preset="paper", trigger=triggers.Every(1), rates=Rates(**{name: 2}))
    with pytest.raises(OptimizerError, match="without its scheduler"):
        grow(model, layer(model), optimizer=optimizer, depth_power=1.0, warmup=STEPS)
    with pytest.raises(OptimizerError, match="without its scheduler"):
        Grower(model, optimizer, what="layers", trigger=triggers.Every(1), rates=Rates(depth_power=1.0))
    with pytest.raises(
        ValueError, match=r"^depth_power must be 0 with what='units', got 1.0: new units make nothing deeper"
    ):
        Grower(model, optimizer, what="units", rates=Rates(depth_power=1.0))
    with pytest.raises(OptimizerError, match="LBFGS cannot follow a growth: it keeps its memory in one flat vector"):
        Grower(model, torch.optim.LBFGS(model.parameters()), rates=Rates(warmup=STEPS))
    assert states(optimizer) == before and not hooks(optimizer)
    assert measure(model, find_sites(model, X), [(X, Y)], cross_entropy)
