"""`Trial`: the winner is the network that separate copies would find, its values are to the bit theirs, and losers leave no trace."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from models import Block, alive, snapshot
from sensli import Grower, History, Rates, SensliError, Site, Trial, count_flops, find_sites, grow, measure, triggers
from sensli.errors import HistoryError, MeasurementError, UnsupportedModel
from sensli.modules import random_state
from sensli.surgery.averaging import follow

X = torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()
DATA = list(zip(X.split(8), Y.split(8), strict=True))


def network() -> nn.Module:
    """Norms, dropout and blocks: buffers and random numbers take part."""
    torch.manual_seed(0)
    return alive(
        nn.Sequential(
            nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 6), nn.ReLU(), Block(6), Block(6),
            nn.Linear(6, 2),
        )
    )  # fmt: skip


class Training:
    """A model and all that follows it, after a few steps."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        self.model = network()
        self.optimizer = make(self.model.parameters(), lr=0.01, **options)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=500)
        self.average = AveragedModel(self.model)
        for batch in DATA[:3]:
            step(self.model, self.optimizer, batch, self.scheduler, self.average)

    def grower(self, trial: Trial, **options: Any) -> Grower:
        given: dict[str, Any] = {
            "example": X[:2], "trigger": triggers.Every(1), "tau": 0.0, "scheduler": self.scheduler, "averaged": self.average,
            "max_factor": None, "select": "largest",
        }  # fmt: skip
        return Grower(self.model, self.optimizer, preset="paper", trial=trial, **{**given, **options})

    def state(self) -> dict[str, Any]:
        """Values alone, by name and position."""
        return {
            "model": dict(self.model.state_dict()),
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "average": dict(self.average.state_dict()),
            "random": [torch.get_rng_state(), random.getstate()[1][:3], np.random.get_state()[1].tolist()],  # noqa: NPY002
        }

    def identity(self) -> dict[str, Any]:
        """Values and objects."""
        others = [
            self.scheduler.state_dict(),
            snapshot(self.average),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002
        ]
        return {**snapshot(self.model, self.optimizer), "others": others}


def step(model: nn.Module, optimizer: Any, batch: Any, scheduler: Any, averaged: Any) -> float:
    """A loop's own step: noise of three libraries, clipping, a scheduler and an average per step."""
    x, y = batch
    model.train()
    optimizer.zero_grad()
    noise = 0.01 * (torch.randn_like(x) + random.gauss(0, 1) + np.random.standard_normal())  # noqa: NPY002
    loss = cross_entropy(model(x + noise), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    averaged.update_parameters(model)
    return loss.item()


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}/{index}")
    elif isinstance(one, Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


# --- equal to what copies would find ---


def forked(training: Training, site: Site | None, steps: int) -> tuple[Training, list[float]]:
    """The slow way: a deep copy of everything, grown there and trained for equal FLOPs; ends with the same batches."""
    fork = copy.deepcopy(training)
    if site is not None:
        growth = grow(fork.model, site.in_model(fork.model), optimizer=fork.optimizer, scheduler=fork.scheduler)
        follow(fork.average, growth, fork.model)
    taken = steps * int(count_flops(training.model, X[:2])) // int(count_flops(fork.model, X[:2]))
    batches = (DATA * 9)[:steps][-taken:]
    return fork, [step(fork.model, fork.optimizer, batch, fork.scheduler, fork.average) for batch in batches]


def size(model: nn.Module) -> int:
    torch.rand(3)  # whatever a metric draws or switches leaves no trace
    model.eval()
    return sum(parameter.numel() for parameter in model.parameters())


CASES = [
    ("by loss", torch.optim.AdamW, {}, {"what": "both", "units": 2}),
    ("largest", torch.optim.SGD, {"momentum": 0.9}, {"form": "residual"}),
    ("largest", torch.optim.NAdam, {}, {"what": "units", "units": 2}),
    ("smallest", torch.optim.NAdam, {}, {"what": "units", "units": 2}),
    ("largest", torch.optim.RAdam, {}, {"where": "block"}),
]


@pytest.mark.parametrize(("winner", "make", "options", "growing"), CASES)
@pytest.mark.slow
def test_the_winner_is_to_the_bit_what_a_copy_of_everything_becomes(
    winner: str, make: Any, options: Any, growing: Any
) -> None:
    training = Training(make, **options)
    held = dict(training.model.named_parameters())
    sites = find_sites(training.model, X[:2], **growing)
    ranked = [merit.site for merit in measure(training.model, sites, DATA, cross_entropy).ranked]
    begin, ends = random_state.capture(), []
    for site in (None, *ranked[:2]):
        random_state.restore(begin)
        fork, losses = forked(training, site, 9)
        ends.append((fork.state(), losses, size(fork.model)))
    random_state.restore(begin)

    metric = None if winner == "by loss" else size
    trial = Trial(9, candidates=2, step=step, metric=metric, mode="max" if winner == "largest" else "min")
    grower = training.grower(trial, **growing)
    growth = grower.step(DATA, cross_entropy)
    tried = grower.history.record.decisions[0].tried
    assert tried is not None and tried.grew == (growth is not None) and len(tried.arms) == 3
    assert [arm.steps for arm in tried.arms] == [len(losses) for _, losses, _ in ends]
    common = min(arm.steps for arm in tried.arms) // 2
    scores = [sum(losses[-common:]) / common if metric is None else size for _, losses, size in ends]
    assert [arm.score for arm in tried.arms] == scores
    assert tried.winner == scores.index(max(scores) if winner == "largest" else min(scores))
    assert_equal(training.state(), ends[tried.winner][0])
    assert all(held[name] is now for name, now in training.model.named_parameters() if name in held)
    assert len(grower.history) == tried.grew


def test_a_plain_step_trains_in_training_mode_and_leaves_the_mode_and_equals_a_plain_loop() -> None:
    training = Training()
    training.model.eval()
    fork, begin = copy.deepcopy(training), torch.get_rng_state()
    training.grower(Trial(4, metric=size)).step(DATA, cross_entropy)
    torch.set_rng_state(begin)
    fork.model.train()
    for x, y in DATA[:4]:
        fork.optimizer.zero_grad()
        cross_entropy(fork.model(x), y).backward()
        fork.optimizer.step()
    assert_equal(training.state(), fork.state())
    assert not any(module.training for module in training.model.modules())


def test_batches_are_drawn_as_training_draws_them_and_taken_again_when_they_end() -> None:
    training, seen = Training(), list[float]()
    loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True)

    def watched(model: nn.Module, optimizer: Any, batch: Any) -> float:
        seen.append(batch[0][0, 0].item())
        return 0.0

    torch.manual_seed(5)
    expected = [x[0, 0].item() for _ in range(3) for x, _ in loader][:7]
    torch.manual_seed(5)
    grower = training.grower(Trial(7, candidates=1, batches=loader, step=watched))
    grower.step(DATA, cross_entropy)
    assert seen[:7] == expected and seen[7:] == expected[-len(seen[7:]) :] and len(seen) > 7
    assert next(iter(loader))[0][0, 0].item() not in expected[::3]  # the next epoch has another order
    endless = iter(DATA)
    training.grower(Trial(3, batches=endless)).step(DATA, cross_entropy)
    assert len(list(endless)) == len(DATA) - 3
    with pytest.raises(MeasurementError, match="ended after 2 of 3 steps and cannot be taken again"):
        training.grower(Trial(3, batches=iter(DATA[:2]))).step(DATA, cross_entropy)


# --- what it cost ---


def test_larger_networks_take_fewer_steps_and_the_look_says_what_all_of_them_cost() -> None:
    training, lines = Training(), list[Any]()
    grower = training.grower(Trial(30, candidates=2), log=lines.append, what="both", units=6)
    before = int(count_flops(training.model, X[:2]))
    grower.step(DATA, cross_entropy)
    tried = lines[0].tried
    own, *others = tried.arms
    assert own.name == "no growth" and own.steps == 30 and own.flops == 3 * before * 8 * 30
    for arm in others:
        each = before + next(m.flops for m in lines[0].merits if m.site == arm.name)
        assert arm.steps == 30 * before // each < 30
        assert arm.flops == 3 * each * 8 * arm.steps <= own.flops
    assert tried.flops == sum(arm.flops for arm in tried.arms)
    assert tried.lost == tried.flops - tried.arms[tried.winner].flops
    assert "won the trial of 3 networks: mean loss" in str(lines[0]) and "% of them lost" in str(lines[0])
    assert History.from_json(grower.history.to_json()).record.decisions == lines
    damaged = grower.history.to_dict()
    damaged["record"]["looks"][0]["tried"]["winner"] = 3
    with pytest.raises(HistoryError, match="the winner of 3 networks is 3"):
        History.from_dict(damaged)


def test_a_writer_gets_the_flops() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars = dict[str, float]()

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.scalars[tag] = scalar_value

        def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...

    training, writer = Training(), Writer()
    grower = training.grower(Trial(2), log=writer)
    grower.step(DATA, cross_entropy)
    tried = grower.history.record.decisions[0].tried
    assert tried is not None
    assert (writer.scalars["sensli/trial FLOPs"], writer.scalars["sensli/lost FLOPs"]) == (tried.flops, tried.lost)


@pytest.mark.parametrize(
    ("losses", "winner"), [((math.nan, 1, 2), 1), ((1, math.inf, math.nan), 0), ((1, 1, 1), 0), ((2, 2, 1), 2)]
)
def test_a_network_that_diverges_loses_and_an_equal_one_does_not_win(losses: Any, winner: int) -> None:
    training, sizes = Training(), list[int]()

    def pretended(model: nn.Module, optimizer: Any, batch: Any) -> float:
        sizes.extend({size(model)} - {*sizes})
        return float(losses[sizes.index(size(model))])

    grower = training.grower(Trial(2, candidates=2, step=pretended), where=lambda site: site.path in ("2", "7"))
    grower.step(DATA, cross_entropy)
    tried = grower.history.record.decisions[0].tried
    assert tried is not None and tried.winner == winner and len(sizes) == 3
    assert [arm.score is None for arm in tried.arms] == [not math.isfinite(loss) for loss in losses]


# --- nothing is left of what fails ---


class Failing:
    """A step that fails at its n-th call."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def __call__(self, model: nn.Module, optimizer: Any, batch: Any, scheduler: Any, averaged: Any) -> float:
        loss = step(model, optimizer, batch, scheduler, averaged)
        self.left -= 1
        if not self.left:
            raise self.error
        return loss


class Counter:
    """An object with a state that a step changes, such as a GradScaler."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(
    "growing",
    [
        {"what": "both", "units": 2},
        {"where": "block", "rates": Rates(lr_factor=0.5)},
        {"rates": Rates(new_lr_factor=0.5)},
    ],
)
@pytest.mark.parametrize("at", [1, 8])
def test_an_exception_inside_of_the_users_step_leaves_all_as_it_was(at: int, growing: Any) -> None:
    training = Training()
    for error in (ZeroDivisionError("mine"), KeyboardInterrupt()):
        grower = training.grower(Trial(6, step=Failing(at, error)), **growing)
        before, state = training.identity(), grower.state_dict()
        with pytest.raises(type(error)):
            grower.step(DATA, cross_entropy)
        assert_equal(training.identity(), before)
        assert grower.state_dict() == state and grower.calls == 0 and grower.last_merits is None


def test_what_fails_after_the_trial_takes_the_winners_steps_back_too() -> None:
    class Late(triggers.Trigger):
        def fires(self, context: triggers.TriggerContext) -> bool:
            return True

        def judged(self, grew: bool) -> None:
            raise ZeroDivisionError("late")

    counter = Counter()

    def counted(model: nn.Module, optimizer: Any, batch: Any, scheduler: Any, averaged: Any) -> float:
        counter.count += 1
        return step(model, optimizer, batch, scheduler, averaged)

    for mode in ("min", "max"):
        training = Training()
        loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True, generator=torch.Generator().manual_seed(1))
        trial = Trial(4, step=counted, batches=loader, metric=size, mode=mode, stateful=[counter])
        failing, grower = training.grower(trial, trigger=Late(), recycle=True), training.grower(trial)
        before, drawn = training.identity(), loader.generator.get_state()
        with pytest.raises(ZeroDivisionError):
            failing.step(DATA, cross_entropy)
        assert_equal(training.identity(), before)
        assert torch.equal(drawn, loader.generator.get_state()) and counter.count == 0
        grower.step(DATA, cross_entropy)
        tried = grower.history.record.decisions[0].tried
        assert tried is not None and counter.count == tried.arms[tried.winner].steps  # the winner's alone
        counter.count = 0


def test_a_step_that_returns_no_loss_is_refused_and_needs_none_with_a_metric() -> None:
    training = Training()

    def silent(model: nn.Module, optimizer: Any, batch: Any) -> None:
        optimizer.step()

    before = training.identity()
    text = r"what step\(model, optimizer, batch\) returns must be the loss of the batch, a number, got None"
    with pytest.raises(ValueError, match=text):
        training.grower(Trial(2, step=silent)).step(DATA, cross_entropy)
    with pytest.raises(ValueError, match=r"what metric\(model\) returns must be a number, got 'good'"):
        training.grower(Trial(2, step=silent, metric=lambda model: "good")).step(DATA, cross_entropy)
    with pytest.raises(MeasurementError, match="batch 0 of the trial has no gradient"):
        frozen = copy.deepcopy(training)
        calls = iter(range(100))
        frozen.grower(Trial(2)).step(DATA, lambda o, y: cross_entropy(o if next(calls) < len(DATA) else o.detach(), y))
    assert_equal(training.identity(), before)
    assert training.grower(Trial(2, step=silent, metric=size)).step(DATA, cross_entropy) is None


# --- beside the other options ---


def test_triggers_are_told_and_their_limits_hold_in_the_trial() -> None:
    class Told(triggers.Trigger):
        def __init__(self) -> None:
            self.verdicts = list[bool]()

        def fires(self, context: triggers.TriggerContext) -> bool:
            return True

        def allows(self, site: Site, context: triggers.TriggerContext) -> bool:
            return site.path == "7"

        def judged(self, grew: bool) -> None:
            self.verdicts.append(grew)

    told = Told()
    for mode in ("max", "min"):
        training = Training()
        grower = training.grower(Trial(1, metric=size, mode=mode), trigger=(told & triggers.Limit(growths=1)) | told)
        grower.step(DATA, cross_entropy)
        tried = grower.history.record.decisions[0].tried
        assert (
            tried is not None and len(tried.arms) == 2 and all(arm.name.endswith("after 7") for arm in tried.arms[1:])
        )
    assert told.verdicts == [True, True, False, False]
    nothing = training.grower(Trial(1), tau=1e9)
    assert nothing.step(DATA, cross_entropy) is None and nothing.history.record.decisions[0].tried is None


def test_count_and_a_step_for_a_callback_do_not_go_with_a_trial() -> None:
    training = Training()
    with pytest.raises(ValueError, match="max_growths must be 1 with trial=, got 2"):
        training.grower(Trial(3), max_growths=2)
    from sensli.integrations.callback import GrowingCallback

    assert GrowingCallback(triggers.Every(1), trial=Trial(3)).options.trial is not None
    with pytest.raises(SensliError, match=r"Trial\(batches=\) is not an option in GrowthCallback: a trial trains with"):
        GrowingCallback(triggers.Every(1), trial=Trial(3, batches=[1]))


def test_a_sharded_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr("sensli.growing.options.is_sharded", lambda model: True)
    with pytest.raises(UnsupportedModel, match="trial= cannot be used with a model sharded by fully_shard"):
        training.grower(Trial(3))
