"""`max_check_share`: checks wait, or take fewer batches, where they would take more than that share of the training."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ranks
from sensli import Grower, load_checkpoint, save_checkpoint, triggers
from sensli.errors import HistoryError

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = X.prod(1, keepdim=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def make_grower(model: Any, optimizer: Any, scheduler: Any = None, **options: Any) -> Grower:
    given = {"max_check_share": 0.25, "trigger": triggers.Every(1), "preset": "paper", "tau": 100.0, **options}
    return Grower(model, optimizer, example=X[:2], **given)


def batches(count: int) -> list[Any]:
    return [(X[index : index + 4], Y[index : index + 4]) for index in range(0, 4 * count, 4)]


class Seen:
    """Batches that count how many of them are taken."""

    def __init__(self, count: int) -> None:
        self.data, self.taken = batches(count), 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        for batch in self.data:
            self.taken += 1
            yield batch


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        mse_loss(model(X[:4]), Y[:4]).backward()
        optimizer.step()


def calls(grower: Grower) -> list[int]:
    return [look.call for look in grower.history.record.decisions]


def test_a_check_waits_until_it_is_within_the_share_and_the_log_says_so() -> None:
    model = network()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer)
    for _ in range(10):
        train(model, optimizer, 6)
        grower.step(batches(3), mse_loss)
    # Three batches stand for 4.5 steps, a quarter of 18: the third call; and of 36, and 54.
    assert calls(grower) == [3, 6, 9]
    reasons = [look.reason for look in grower.history.record.decisions]
    assert all(reason.endswith("; checks that had to wait for max_check_share = 0.25: 2") for reason in reasons)
    free = make_grower(model, optimizer, max_check_share=None)
    assert "price" not in free.state_dict()


def test_it_takes_fewer_batches_where_eight_are_affordable() -> None:
    model = network()
    optimizer = make_optimizer(model)
    grower, data = make_grower(model, optimizer), Seen(12)
    train(model, optimizer, 47)  # 7 batches
    grower.step(data, mse_loss)
    assert data.taken == 0 and calls(grower) == []
    train(model, optimizer, 7)  # 9 batches
    grower.step(data, mse_loss)
    assert data.taken == 9 and calls(grower) == [2]
    assert "; measured on 9 batches only, as max_check_share = 0.25 allows" in grower.history.record.decisions[0].reason
    train(model, optimizer, 300)
    grower.step(data, mse_loss)
    assert data.taken == 9 + 12 and "batches only" not in grower.history.record.decisions[1].reason


def test_nothing_waits_where_nothing_is_known() -> None:
    model = network()
    without = make_grower(model, None)
    with pytest.warns(UserWarning, match="no optimizer"):
        for _ in range(3):
            without.step(batches(3), mse_loss)
    assert calls(without) == [1, 2, 3]
    optimizer = make_optimizer(model)
    untrained = make_grower(model, optimizer)
    for _ in range(2):
        untrained.step(batches(3), mse_loss)
    assert calls(untrained) == [1, 2]
    # Batches without a length: the first check tells what the next one costs.
    unsized = make_grower(model, optimizer)
    for _ in range(4):
        train(model, optimizer, 2)
        unsized.step(iter(batches(3)), mse_loss)
    assert calls(unsized) == [1]


def test_a_trigger_that_fired_fires_again_after_a_check_that_waited() -> None:
    model = network()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, trigger=triggers.Plateau(2))
    for _ in range(6):
        train(model, optimizer, 4)
        grower.step(batches(3), mse_loss, metric=1.0)
    assert calls(grower) == [5]  # flat from the third call on; 20 steps are enough at the fifth


def test_it_is_saved_and_resumed(tmp_path: Path) -> None:
    model = network()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer)
    for call in range(1, 10):
        train(model, optimizer, 6)
        grower.step(batches(3), mse_loss)
        if call == 5:
            save_checkpoint(tmp_path / "run.ckpt", model, optimizer=optimizer, grower=grower)
    found = load_checkpoint(tmp_path / "run.ckpt", network, make_optimizer, make_grower=make_grower)
    again = found.grower
    assert again is not None
    for _ in range(4):
        train(found.model, found.optimizer, 6)
        again.step(batches(3), mse_loss)
    assert json.loads(json.dumps(again.state_dict())) == json.loads(json.dumps(grower.state_dict()))
    assert calls(again) == calls(grower) == [3, 6, 9]
    state = grower.state_dict()
    for wrong in ({"steps": -1}, {"batches": 1.5}, {"last": "3"}, {"skipped": None}):
        with pytest.raises(HistoryError, match="the counts of steps and of batches are"):
            grower.load_state_dict({**state, "price": {**state["price"], **wrong}})
        assert grower.state_dict() == state
    del state["price"]  # of a Grower without a limit
    grower.load_state_dict(state)
    assert grower.state_dict()["price"]["steps"] == 0


def test_a_call_that_raises_takes_back_what_it_counted() -> None:
    model = network()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer)
    train(model, optimizer, 40)
    before = grower.state_dict()

    def fails(output: Any, target: Any) -> Any:
        raise RuntimeError("no loss")

    with pytest.raises(Exception, match="no loss"):
        grower.step(batches(3), fails)
    assert grower.state_dict() == before


def test_the_count_ends_with_the_grower() -> None:
    model = network()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    del grower
    gc.collect()
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks


class Asked(triggers.Trigger):
    """Notes the steps that it is told."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []

    def fires(self, context: triggers.TriggerContext) -> bool:
        self.steps.append(context.steps)
        return False


class OfParent(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def told(grower: Grower) -> int | None:
    grower.step(batches(1), mse_loss)
    trigger = grower.options.trigger
    assert isinstance(trigger, Asked)
    return trigger.steps[-1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, OfParent])
@pytest.mark.parametrize("share", [None, 0.25])
def test_each_step_is_counted_once_and_triggers_are_told(kind: Any, share: Any) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=0.01)
    grower = make_grower(model, optimizer, max_check_share=share, trigger=Asked())
    assert told(grower) is None  # nobody knows yet whether it tells of its steps
    train(model, optimizer, 5)
    assert told(grower) == 5
    again = make_grower(model, kind(model.parameters(), lr=0.01), max_check_share=share, trigger=Asked())
    again.load_state_dict(grower.state_dict())
    again.add_steps(3)
    train(model, again.optimizers[0], 2)
    assert told(again) == 10 and told(grower) == 5
    with pytest.raises(ValueError, match="count must be a whole number of at least 0"):
        grower.add_steps(-1)


def test_a_step_that_fails_is_none() -> None:
    model = network()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, trigger=Asked())

    def fails() -> Any:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        optimizer.step(fails)
    train(model, optimizer, 2)
    assert told(grower) == 2


def test_of_several_optimizers_the_one_counts_that_takes_most_steps() -> None:
    model: Any = network()
    first, second = (torch.optim.SGD(model[index].parameters(), lr=0.01) for index in (0, 2))
    third = torch.optim.SGD(model[4].parameters(), lr=0.01)
    grower = make_grower(model, [first, second, third], trigger=Asked())
    for _ in range(4):
        second.step()
        third.step()
    second.step()
    assert told(grower) == 5


def test_a_copy_counts_the_steps_of_the_copies() -> None:
    model = network()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, trigger=Asked())
    train(model, optimizer, 3)
    copied = copy.deepcopy((model, optimizer, grower))
    train(*copied[:2], 4)
    assert told(grower) == 3 and told(copied[2]) == 7


def uneven_steps_on_ranks() -> None:
    rank = dist.get_rank()
    model: Any = DistributedDataParallel(network())
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, trigger=Asked())
    with Join([model]):  # one rank has fewer batches
        train(model, optimizer, 7 - 2 * rank)
    assert told(grower) == 5


@pytest.mark.process
def test_with_uneven_inputs_all_ranks_are_told_the_least(tmp_path: Path) -> None:
    ranks.run(uneven_steps_on_ranks, 2, tmp_path)


def looks_on_ranks() -> None:
    rank = dist.get_rank()
    model: Any = DistributedDataParallel(network())
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer)
    for _ in range(6):
        train(model, optimizer, 6)
        grower.step(batches(3 + 3 * rank), mse_loss)  # one has more batches, so all wait for what that one can afford
    assert calls(grower) == [6]


@pytest.mark.process
def test_all_ranks_wait_for_the_one_that_can_afford_least(tmp_path: Path) -> None:
    ranks.run(looks_on_ranks, 2, tmp_path)


@pytest.mark.filterwarnings("ignore:.*checks in a row")
def test_the_default_earns_two_percent_and_begins_with_ten_checks() -> None:
    model = network()
    optimizer = make_optimizer(model)
    given = {"example": X[:2], "log": None}
    limits = [
        Grower(model, optimizer, **given).options.max_check_share,
        Grower(model, optimizer, trigger=triggers.Every(1), **given).options.max_check_share,
        Grower(model, optimizer, max_check_share=None, **given).options.max_check_share,
        Grower(model, optimizer, preset="paper", trigger=triggers.Every(1), **given).options.max_check_share,
    ]
    assert limits == ["auto", None, None, None]  # who says when to check has said what it costs
    grower, data = make_grower(model, optimizer, max_check_share="auto"), Seen(12)
    for _ in range(14):
        train(model, optimizer, 1)
        grower.step(data, mse_loss)
    # Thirteen checks of 12 batches leave four, which are too few.
    assert data.taken == 13 * 12 and calls(grower) == list(range(1, 14))
    train(model, optimizer, 300 - 14 - 1)  # 2 % of 300 steps are 4 batches
    grower.step(data, mse_loss)
    assert calls(grower)[-1] == 13
    train(model, optimizer, 1)
    grower.step(data, mse_loss)
    assert data.taken == 164 and calls(grower)[-1] == 16 and grower.state_dict()["price"]["batches"] == 164
    many, data = make_grower(model, optimizer, max_check_share="auto"), Seen(12)
    data.data = data.data * 4
    train(model, optimizer, 1)
    many.step(data, mse_loss)
    assert data.taken == 16  # what is free is not spent at once
    train(model, optimizer, 2999)
    many.step(data, mse_loss)
    assert data.taken == 16 + 24  # 2 % of 3,000 steps are 40 batches


def test_a_limited_check_leaves_the_order_of_a_loader_and_decides_as_one_without_a_limit() -> None:
    dataset = torch.utils.data.TensorDataset(X, Y)
    found = []
    for limit in ("auto", None):
        model = network()
        optimizer = make_optimizer(model)
        loader = torch.utils.data.DataLoader(dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(0))
        grower = make_grower(model, optimizer, max_check_share=limit, what="units", tau=0.0)
        train(model, optimizer, 3)
        grower.step(loader, mse_loss)
        assert grower.last_merits is not None
        found.append(
            ([str(growth) for growth in grower.history], [x for x, _ in loader], grower.last_merits.best.value)
        )
    (grown, order, merit), (freely, freely_ordered, free_merit) = found
    assert grown == freely != [] and merit == free_merit
    assert all(torch.equal(one, other) for one, other in zip(order, freely_ordered, strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return x + self.layer(x).tanh()


def test_losses_that_stand_for_a_metric_are_held_to_the_share_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(4, 1))
    optimizer = make_optimizer(model)
    grower, taken = Grower(model, optimizer, example=X[:2]), []
    for _ in range(100):
        train(model, optimizer, 1)
        data = Seen(10)
        grower.step(data, mse_loss)
        taken.append(data.taken)
    assert (
        sum(taken) <= 720 + 6 and taken[:90] == [8] * 90
    )  # as much as 160 batches, which are 240 steps, or 720 losses
    again = Grower(model, optimizer, example=X[:2])
    again.load_state_dict(json.loads(json.dumps(grower.state_dict())))
    assert again.state_dict()["price"]["losses"] == sum(taken)
