"""`Grower.watch`: the decision of a check from the steps that train, the same as from a measurement of the same batches."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ranks
from models import Named, batches, cnn, deep, fnn, images, loss_fn, points, residual, snapshot
from sensli import Grower, Trial, find_sites, grow
from sensli.errors import BadExample, DistributedError, MeasurementError, SensliError
from sensli.growing.triggers import At, Diminishing, Every, Limit, Pays, Plateau, Trigger, TriggerContext

MODELS = {
    "fnn": (fnn, points, {}),
    "named": (Named, points, {"form": "parametric"}),
    "residual": (residual, points, {}),
    "cnn": (lambda: cnn(norm=True), images, {}),
    "natural": (deep, points, {"norm": "natural"}),
}


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def growing(model: nn.Module, make: Any = points, optimizer: Any = None, **options: Any) -> Grower:
    given = {"example": make(2), "trigger": Every(1), "tau": 0.0, "what": "layers", "max_factor": None, **options}
    return Grower(model, still(model) if optimizer is None else optimizer, preset="paper", **given)


def train(grower: Grower, data: Any, watch: Any = None) -> None:
    """One step for each batch, each watched."""
    optimizer = grower.optimizers[0]
    for x, y in data:
        with grower.watch() if watch is None else watch():
            optimizer.zero_grad()
            loss_fn(grower.model(x), y).backward()
            optimizer.step()


def same(grower: Grower, other: Grower) -> None:
    """Both have decided the same, by merits that are equal to rounding."""
    merits, expected = grower.last_merits, other.last_merits
    assert merits is not None and expected is not None
    assert [str(m.site) for m in merits] == [str(m.site) for m in expected]
    assert [m.value for m in merits] == pytest.approx([m.value for m in expected], rel=1e-10)
    assert [m.ratio for m in merits] == pytest.approx([m.ratio for m in expected], rel=1e-10)
    assert [m.dead for m in merits] == [m.dead for m in expected]
    assert (merits.norm, merits.batches, merits.samples) == (expected.norm, expected.batches, expected.samples)
    assert [str(growth.site) for growth in grower.history] == [str(growth.site) for growth in other.history] != []
    for ours, theirs in zip(grower.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_decision_is_that_of_a_measurement_of_the_same_batches(name: str) -> None:
    make, data_of, options = MODELS[name]
    model, data = make(), batches((6, 6, 3), data_of)
    plain = copy.deepcopy(model)
    watched, measured = growing(model, data_of, **options), growing(plain, data_of, **options)
    train(watched, data)
    model.load_state_dict(plain.state_dict())  # buffers of batch norms have seen the steps
    watched.step()
    measured.step(data, loss_fn)
    same(watched, measured)


UNITS = {
    "fnn": (fnn, points, {}),
    "cnn": (lambda: cnn(norm=True), images, {}),
    "both": (deep, points, {"what": "both"}),
    "random": (deep, points, {"init": "random"}),
    "gradmax": (lambda: fnn(nn.Tanh), points, {"init": "gradmax"}),
    "natural": (deep, points, {"norm": "natural"}),
    "uniform": (deep, points, {"what": "uniform", "units": 0.5}),
}


@pytest.mark.parametrize("name", UNITS)
def test_new_units_are_those_of_a_measurement_of_the_same_batches(name: str) -> None:
    """Rows are made for the first batch, which `measure` takes whole too if there are eight or more."""
    make, data_of, options = UNITS[name]
    model, data = make(), batches((8,) * 8, data_of)
    plain = copy.deepcopy(model)
    given = {"what": "units", "units": 2, **options}
    watched, measured = growing(model, data_of, **given), growing(plain, data_of, **given)
    train(watched, data)
    model.load_state_dict(plain.state_dict())
    watched.step()
    measured.step(data, loss_fn)
    same(watched, measured)


def hooks_of(model: nn.Module, grower: Grower) -> Any:
    optimizers = [dict(o._optimizer_step_pre_hooks) | dict(o._optimizer_step_post_hooks) for o in grower.optimizers]
    return snapshot(model)["hooks"], any(p._backward_hooks for p in model.parameters()), optimizers


def values(grower: Grower) -> list[float]:
    assert grower.last_merits is not None
    return [merit.value for merit in grower.last_merits]


# --- what counts ---


def test_weights_that_move_give_the_merits_of_the_mean_gradient() -> None:
    """Checked against the gradients of a layer that is really there, step by step."""
    model, data = deep(), batches((8, 8, 8))
    grower = growing(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), norm="frobenius", max_growths=1)
    states = []
    for x, y in data:
        states.append(copy.deepcopy(model))
        train(grower, [(x, y)])
    grower.step()
    assert grower.last_merits is not None
    for number, merit in enumerate(grower.last_merits):
        total: Any = 0
        for state, (x, y) in zip(states, data, strict=True):
            state = copy.deepcopy(state)
            growth = grow(state, find_sites(state, points(2))[number])
            state.zero_grad()
            loss_fn(state(x), y).backward()
            total = total + state.get_submodule(growth.name).linear.weight.grad  # type: ignore[union-attr, operator]
        assert merit.value == pytest.approx((total / 3).square().sum().item(), rel=1e-10)


@pytest.mark.parametrize("what", ["layers", "units"])
def test_batches_of_one_update_are_one_step(what: str) -> None:
    """Gradients are accumulated, two updates in one context; an evaluation inside does not count."""
    model, data = fnn(), batches((6, 6, 6, 6))
    plain = copy.deepcopy(model)
    accumulated, single = growing(model, what=what), growing(plain, what=what)
    optimizer = accumulated.optimizers[0]
    with accumulated.watch():
        for index, (x, y) in enumerate(data):
            (loss_fn(model(x), y) / 2).backward()
            with torch.no_grad():
                model(points(50))
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    accumulated.step()
    pairs = [[torch.cat(each) for each in zip(*data[i : i + 2], strict=True)] for i in (0, 2)]
    train(single, pairs)
    single.step()
    if what == "layers":  # rows of units are made for the first batch, which differs
        assert values(accumulated) == pytest.approx(values(single), rel=1e-10)
    assert accumulated.last_merits.batches == single.last_merits.batches == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("closed", [False, True])
def test_units_in_the_first_batch_of_an_update_are_measured_with_the_weights_that_it_had(closed: bool) -> None:
    """Their rows are chosen before the optimizer moves anything, also where it steps inside of the context."""
    model, data = fnn(nn.GELU), batches((8,))
    moved, held = copy.deepcopy(model), copy.deepcopy(model)
    one = growing(moved, optimizer=torch.optim.SGD(moved.parameters(), lr=10.0), what="units")
    two = growing(held, what="units")
    if closed:

        def closure() -> Tensor:
            loss = loss_fn(moved(data[0][0]), data[0][1])
            loss.backward()
            return loss

        with one.watch():
            one.optimizers[0].step(closure)
    else:
        train(one, data)
    train(two, data)
    moved.load_state_dict(held.state_dict())
    one.step()
    two.step()
    assert values(one) == pytest.approx(values(two), rel=1e-10)


def test_what_is_not_a_step_counts_for_nothing() -> None:
    model, data = fnn(), batches((6, 6))
    grower, plain = growing(model), growing(copy.deepcopy(model))
    before = hooks_of(model, grower)
    train(grower, data[:1])
    with grower.watch():  # no backward pass
        model(data[1][0])
    with pytest.raises(RuntimeError, match="mine"), grower.watch():
        loss_fn(model(data[1][0]), data[1][1]).backward()
        raise RuntimeError("mine")
    assert hooks_of(model, grower) == before
    loss_fn(model(data[1][0]), data[1][1]).backward()  # outside
    train(grower, data[1:])
    grower.step()
    plain.step(data, loss_fn)
    same(grower, plain)


def test_a_scaled_loss_counts_as_the_loss_itself_and_a_step_that_overflows_is_left_out() -> None:
    model, (x, y) = fnn(), batches((6,))[0]
    model, x = model.float(), x.float()
    grower, plain = (
        growing(model, lambda n: points(n).float()),
        growing(copy.deepcopy(model), lambda n: points(n).float()),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    optimizer = grower.optimizers[0]
    for _ in range(12):  # each overflow halves the scale
        with grower.watch(scaler=scaler):
            optimizer.zero_grad()
            scaler.scale(loss_fn(model(x) * 1e6, y)).backward()
            scaler.step(optimizer)
            scaler.update(2.0**8)
    grower.step()
    plain.step([(x, y)], lambda output, target: loss_fn(output * 1e6, target))
    assert values(grower) == pytest.approx(values(plain), rel=1e-3)
    assert grower.last_merits.batches == 11  # type: ignore[union-attr]


def test_autocast_and_checkpoints_inside_of_the_step() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (
                nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU()),
                nn.Linear(6, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    model, data = Checkpointed(), [(x.float(), y) for x, y in batches((8,) * 8)]
    plain = copy.deepcopy(model)
    watched, measured = (
        growing(each, lambda n: points(n).float(), what="both", units=2, select="largest") for each in (model, plain)
    )
    for x, y in data:
        with watched.watch(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss_fn(model(x), y).backward()
    watched.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured.step(data, loss_fn)
    assert values(watched) == pytest.approx(values(measured), rel=1e-4)


def test_the_loss_that_is_noted_tells_when_a_problem_is_solved() -> None:
    found = []
    for noted in (None, 1e-12):
        model = fnn()
        grower = growing(model, floor=0.1)
        grower.strategy.threshold.largest_loss = 1.0  # type: ignore[attr-defined]
        with grower.watch() as watched:
            loss = loss_fn(model(points(6)), batches((6,))[0][1]) * 1e-3
            loss.backward()
            if noted is not None:
                watched.add_loss(torch.tensor(noted))
        grower.step()
        found.append((len(grower.history), grower.last_merits.loss))  # type: ignore[union-attr]
    assert found == [(1, None), (0, pytest.approx(1e-12, rel=1e-6))]
    with pytest.raises(ValueError, match="loss must be a number"), grower.watch() as watched:
        watched.add_loss("small")  # type: ignore[arg-type]


# --- what it costs where no check can follow ---


class Odd(Trigger):
    """A trigger of somebody's own, which says nothing about calls to come."""

    def fires(self, context: TriggerContext) -> bool:
        return False


@pytest.mark.parametrize(
    ("trigger", "free"),
    [
        (At(3), [True, True, False, True]),
        (Every(2) & Limit(parameters=1), [True] * 4),
        (Every(2) & Limit(growths=1), [True, False, True, False]),
        (At(1) | At(3), [False, True, False, True]),
        (Plateau(2), [True, True, False, True]),
        (Pays(1e9), [False, True, False, True]),
        (Diminishing(window=3), [True, True, True, False]),
        (Odd(), [False] * 4),
    ],
)
def test_a_watch_costs_nothing_if_the_trigger_cannot_fire(trigger: Trigger, free: list[bool]) -> None:
    model, (x, y) = fnn(), batches((6,))[0]
    grower, found = growing(model, trigger=trigger, tau=1e9), []
    before = hooks_of(model, grower)[0]
    for metric in (1.0, 1.0, 1.0, 1.0):
        with grower.watch():
            found.append(hooks_of(model, grower)[0] == before)
            loss_fn(model(x), y).backward()
        grower.step(metric=metric)
    assert found == free


# --- what is refused ---


def test_a_call_without_batches_needs_watched_steps_and_both_are_refused() -> None:
    model, data = fnn(), batches((6,))
    grower = growing(model)
    with pytest.raises(MeasurementError, match="no step was watched"):
        grower.step()
    with grower.watch():
        pass
    with pytest.raises(MeasurementError, match="no backward pass was seen"):
        grower.step()
    assert grower.calls == 0
    train(grower, data)
    with pytest.raises(SensliError, match="batches must be left out"):
        grower.step(data, loss_fn)
    with grower.watch():
        with pytest.raises(MeasurementError, match="open already"), grower.watch():
            pass
        with pytest.raises(SensliError, match="was called inside of"):
            grower.step()
    grower.step()
    assert grower.calls == len(grower.history) == 1
    with pytest.raises(MeasurementError, match="no step was watched"):
        grower.step()
    grower.step(data, loss_fn)
    with pytest.raises(BadExample, match="sites to watch"), growing(fnn(), example=None).watch():
        pass


def test_a_model_that_was_changed_by_hand_is_refused_once() -> None:
    model, data = deep(), batches((6,))
    grower = growing(model)
    train(grower, data)
    grow(model, find_sites(model, points(2))[0], optimizer=grower.optimizers[0])
    with pytest.raises(MeasurementError, match="has changed since its steps were watched"):
        grower.step()
    with pytest.raises(MeasurementError, match="What was watched before is dropped"), grower.watch():
        pass
    train(grower, data)
    grower.step()
    assert len(grower.history) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "stack"}, "strategy='stack' measures nothing, so there is nothing to watch"),
        ({"strategy": "firefly"}, "strategy='firefly' scores sites in passes of its own"),
        ({"strategy": "random-start"}, "strategy='random-start' scores sites in passes of its own"),
        ({"select": "least"}, "select='least' measures how much the blocks matter in a pass of its own"),
        ({"recycle": True}, "recycle=True looks for dead units in batches"),
        ({"confidence": 0.9}, "confidence=0.9 chooses the number of batches"),
        ({"trial": Trial(2)}, "a Trial trains on batches"),
    ],
)
def test_options_that_need_passes_of_their_own_are_refused_before_any_training(options: Any, reason: str) -> None:
    model = fnn()
    if "strategy" in options:
        grower = Grower(model, still(model), trigger=Every(1), **options)
    else:
        grower = growing(model, **options)
    with pytest.raises(SensliError, match=reason):
        grower.watch()


def test_a_trial_with_its_own_batches_and_step_decides_after_watched_steps() -> None:
    model, data = fnn(), batches((6, 6))

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = growing(model, optimizer=optimizer, trial=Trial(2, batches=data, step=step))
    train(grower, data)
    grower.step()
    assert grower.history.record.decisions[0].tried is not None


def test_what_was_watched_is_not_saved_and_all_else_resumes() -> None:
    model, data = fnn(), batches((6, 6))
    grower = growing(model)
    before = json.dumps(grower.state_dict())
    train(grower, data)
    after = grower.state_dict()
    assert after.pop("price")["steps"] == 2 and json.dumps(after) == before
    grower.load_state_dict(json.loads(before))
    with pytest.raises(MeasurementError, match="no step was watched"):
        grower.step()


# --- several processes ---


def on_ranks() -> dict[str, list[float]]:
    """Each rank watches its own batches, one without sharing gradients; the merits are those of all batches."""
    found = {}
    for what in ("layers", "units"):
        torch.manual_seed(0)
        model, data = fnn(), batches((6,) * 16)
        plain = copy.deepcopy(model)
        wrapped = DistributedDataParallel(model)
        grower = growing(wrapped, what=what)
        own, optimizer = data[dist.get_rank() :: dist.get_world_size()], grower.optimizers[0]
        for index, (x, y) in enumerate(own):
            with grower.watch():
                optimizer.zero_grad()
                if index == 1:
                    with wrapped.no_sync():
                        loss_fn(wrapped(x), y).backward()
                else:
                    loss_fn(wrapped(x), y).backward()
                optimizer.step()
        grower.step()
        measured = growing(plain, what=what)
        measured.step(data, loss_fn)
        found[what] = [*values(grower), *values(measured)]
        assert values(grower) == pytest.approx(values(measured), rel=1e-9)
        assert str(grower.history[0].site) == str(measured.history[0].site)
        with pytest.raises((DistributedError, MeasurementError)):  # one rank has watched, the other has not
            if dist.get_rank() == 0:
                with grower.watch():
                    pass
            grower.step()
        assert grower.calls == 1
    return found


@pytest.mark.process
def test_ranks_decide_by_what_all_of_them_have_watched(tmp_path: Path) -> None:
    assert ranks.run(on_ranks, 2, tmp_path)
