"""Train a network that grows while a held-out part improves, and stop by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sensli.grower import Grower
from sensli.history import Growth, History
from sensli.surgery import undo
from sensli.triggers import Every

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
    tolerance: float  # relative improvement of the loss that counts
    max_growths: int
    tau: float
    steps: int = 10  # at least so many between two looks at the held-out part: an epoch of few data says little


@dataclass
class Fitted:
    """What came out, besides the model itself."""

    history: History
    loss: float  # on the held-out part, of the weights that were kept
    epochs: int


def fit_growing(
    model: nn.Module, train: Data, held_out: Data, loss_fn: Loss, plan: Plan, say: Callable[[str], None]
) -> Fitted:
    """Train until the held-out loss stops improving, insert a layer, train on; keep what was best, layers and weights.

    A layer that did not help is taken out again, and that ends the fit. Draws from the global random state of torch.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=True)
    grower = Grower(model, optimizer, example=train[0][:1], trigger=Every(1), tau=plan.tau, layer="relu")
    growths: list[Growth] = []
    best = _Best(model, _value(model, held_out, loss_fn))
    epoch, stage = 0, best.loss
    while True:
        waited = 0
        start = best.loss
        while waited < plan.patience and epoch < plan.max_epochs:
            for _ in range(max(1, plan.steps // max(1, len(train[0]) // plan.batch_size))):
                for x, rest in _batches(train, plan.batch_size):
                    optimizer.zero_grad()
                    loss_fn(model(x), rest).backward()
                    optimizer.step()
                epoch += 1
            value = _value(model, held_out, loss_fn)
            enough = value < stage * (1 - plan.tolerance)
            waited, stage = (0, value) if enough else (waited + 1, stage)
            best.see(model, value, len(growths))
        say(f"{1 + len(growths)} hidden layers: loss {best.loss:.4g} on the held-out part, epoch {epoch}")
        helped = not growths or best.loss < start * (1 - plan.tolerance)
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
    return Fitted(grower.history, best.loss, epoch)


class _Best:
    """The weights with the lowest loss so far, and how many layers had been inserted."""

    def __init__(self, model: nn.Module, loss: float) -> None:
        self.loss, self.growths = loss, 0
        self._state = copy.deepcopy(model.state_dict())

    def see(self, model: nn.Module, loss: float, growths: int) -> None:
        if loss < self.loss:
            self.loss, self.growths, self._state = loss, growths, copy.deepcopy(model.state_dict())

    def restore(self, model: nn.Module) -> None:
        # A layer that came in after the best weights is an identity still, so only what is known is put back.
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
