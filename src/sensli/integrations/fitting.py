"""Train a network that grows while a held-out part improves and stops by itself; then train again in the same way on all data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from sensli.growing.grower import Grower
from sensli.growing.triggers import Every
from sensli.surgery.history.history import Growth, History
from sensli.surgery.insertion import undo
from sensli.surgery.replaying import repeat

Data = tuple[Tensor, Any]  # inputs, and what the loss takes besides the output
Loss = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Plan:
    """How to train: the numbers that a user may want to change."""

    learning_rate: float
    weight_decay: float
    batch_size: int
    max_epochs: int
    patience: int
    tolerance: float  # improvement of the loss that counts, relative to it; and a tenth of that, relative to the first
    max_growths: int
    tau: float
    steps: int = 10  # the smallest number between two looks at the held-out part: an epoch of few data says little


@dataclass
class Fitted:
    """What came out, besides the model itself."""

    history: History
    loss: float  # on the held-out part, of the weights that were kept
    epochs: int
    way: tuple[int, ...]  # epochs before the first layer, between two, and after the last


def fit_growing(
    model: nn.Module, train: Data, held_out: Data, loss_fn: Loss, plan: Plan, say: Callable[[str], None]
) -> Fitted:
    """Train until the held-out loss stops improving, insert a layer, train on; keep what was best, layers and weights.

    A layer that did not help is taken out again, and that ends the fit. Draws from the global random state of torch.
    """
    optimizer = _optimizer(model, plan)
    # A second hidden layer is usually larger than the rest of the network; the held-out part shows whether it helped.
    options: dict[str, Any] = {"tau": plan.tau, "layer": "relu", "max_factor": None}
    grower = Grower(model, optimizer, example=train[0][:1], trigger=Every(1), **options)
    growths: list[Growth] = []
    best = _Best(model, _value(model, held_out, loss_fn))
    epoch, stage, first = 0, best.loss, best.loss
    way: list[int] = []
    while True:
        waited = 0
        start, began = best.loss, epoch
        best.epoch = epoch
        while waited < plan.patience and epoch < plan.max_epochs:
            epochs = min(max(1, plan.steps // max(1, len(train[0]) // plan.batch_size)), plan.max_epochs - epoch)
            _train(model, train, loss_fn, optimizer, plan.batch_size, epochs)
            epoch += epochs
            value = _value(model, held_out, loss_fn)
            enough = value < stage - plan.tolerance * max(stage, 0.1 * first)
            waited, stage = (0, value) if enough else (waited + 1, stage)
            best.see(model, value, len(growths), epoch)
        way.append(best.epoch - began)
        say(f"{1 + len(growths)} hidden layers: loss {best.loss:.4g} on the held-out part, epoch {epoch}")
        helped = not growths or best.loss < start - plan.tolerance * max(start, 0.1 * first)
        if not helped or len(growths) >= plan.max_growths or epoch >= plan.max_epochs:
            break
        best.restore(model)
        growth = grower.step([train], loss_fn)
        if growth is None:  # no place is worth a layer
            break
        growths.append(growth)
        say(str(growth))
        stage = best.loss
    while len(growths) > best.growths:
        undo(model, growths.pop(), optimizer=optimizer)
        grower.history.pop()
    best.restore(model)
    return Fitted(grower.history, best.loss, epoch, tuple(way[: len(growths) + 1]))


def fit_again(model: nn.Module, data: Data, loss_fn: Loss, plan: Plan, found: Fitted) -> None:
    """Train another model through the same epochs and insertions, on data of which nothing is held out.

    The end is known this time, so the learning rate falls to zero over the second half.
    """
    optimizer, total = _optimizer(model, plan), sum(found.way)
    schedule = LambdaLR(optimizer, lambda epoch: min(1.0, 2 * (1 - epoch / max(1, total))))
    for epochs, growth in zip(found.way, (*found.history, None), strict=True):
        for _ in range(epochs):
            _train(model, data, loss_fn, optimizer, plan.batch_size, 1)
            schedule.step()
        if growth is not None:
            repeat(model, growth, optimizer=optimizer, scheduler=schedule)


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=True)


def _train(
    model: nn.Module, data: Data, loss_fn: Loss, optimizer: torch.optim.Optimizer, batch_size: int, epochs: int
) -> None:
    for _ in range(epochs):
        for x, rest in _batches(data, batch_size):
            optimizer.zero_grad()
            loss_fn(model(x), rest).backward()
            optimizer.step()


class _Best:
    """The weights with the lowest loss so far, and how many layers had been inserted."""

    def __init__(self, model: nn.Module, loss: float) -> None:
        self.loss, self.growths, self.epoch = loss, 0, 0
        self._state = copy.deepcopy(model.state_dict())

    def see(self, model: nn.Module, loss: float, growths: int, epoch: int) -> None:
        if loss < self.loss:
            self.loss, self.growths, self.epoch = loss, growths, epoch
            self._state = copy.deepcopy(model.state_dict())

    def restore(self, model: nn.Module) -> None:
        # A layer that came in after the best weights is still an identity, so only what is known is restored.
        model.load_state_dict(self._state, strict=False)


def _batches(data: Data, size: int) -> Iterator[Data]:
    """Shuffled batches; data that fit into one batch keep their order."""
    x, rest = data
    if len(x) <= size:
        yield data
        return
    order = torch.randperm(len(x))
    for index in order[: len(x) - len(x) % size].split(size):  # a small last batch would count as much as a full one
        yield x[index], tuple(part[index] for part in rest)


def _value(model: nn.Module, data: Data, loss_fn: Loss) -> float:
    with torch.no_grad():
        return float(loss_fn(model(data[0]), data[1]))
