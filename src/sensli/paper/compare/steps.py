"""Steps of training: ordinary ones, and in between as many as possible that are replayed, which give the same numbers to the bit.

After each change of the model the first step is an ordinary one. The passes are recorded beside it, and replayed from then on if loss and
gradients were equal to the bit; so is the update, compared at the second step. What cannot be replayed is done as always.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.paper.compare.replay import Loss, Recorded, recorded
from sensli.paper.compare.updates import Part, parts, step

PLAIN_EVERY = 64  # steps; the others in between are replayed


class Steps:
    """The steps of a model that stays as it is but for its values; when it grows, begin another one.

    Args:
        model: The network.
        optimizer: Of all its parameters.
        loss: Of an output and a target.
        constant: Whether all batches are the same tensors.

    Attributes:
        plain: Seconds of an ordinary step, the quickest so far.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss, *, constant: bool) -> None:
        self.model, self.optimizer, self.loss, self.constant = model, optimizer, loss, constant
        self.plain = float("inf")
        self._taken = 0
        self._passes: Recorded | None = None
        self._parts: list[Part] | None = None

    def take(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; its loss."""
        number, self._taken = self._taken, self._taken + 1
        if number == 0:
            return self._first(x, y)
        if self._passes is None or number % PLAIN_EVERY == 0:
            return self._ordinary(x, y)
        self._passes.replay(x, y)
        if self._parts is not None:
            step(self.optimizer, self._parts)
        else:
            self._update(self._passes, compared=number == 1)
        return self._passes.loss.clone()  # the next one is written over it

    def _ordinary(self, x: Tensor, y: Tensor, compared: Recorded | None = None) -> Tensor:
        """A step as everybody does it; passes that gave the same loss and gradients are replayed from then on."""
        began = time.perf_counter()
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        if compared is not None:
            known = [each for each in self.model.parameters() if each.grad is not None]
            found = [loss, *(each.grad for each in known)]
            if _are(known, compared.parameters) and _equal(found, [compared.loss, *compared.gradients]):
                self._passes = compared
        self.optimizer.step()
        self.plain = min(self.plain, time.perf_counter() - began)
        return loss.detach()

    def _first(self, x: Tensor, y: Tensor) -> Tensor:
        """An ordinary step, with which replayed passes are compared."""
        self.model.train()
        passes = recorded(self.model, self.loss, (x, y), constant=self.constant)
        if passes is not None:
            passes.replay(x, y)
        return self._ordinary(x, y, passes)

    def _update(self, passes: Recorded, *, compared: bool) -> None:
        """The optimizer's step, and whether it can do without the optimizer from now on."""
        quick = parts(self.optimizer, passes.parameters, passes.gradients) if compared else None
        changing = [tensor for part in quick or () for tensor in part.tensors()]
        before = _copies(changing)
        if quick is not None:
            step(self.optimizer, quick)
        after = _copies(changing)
        with torch.no_grad():
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(passes.parameters, passes.gradients, strict=True):
            parameter.grad = gradient  # a hook may have put another one there
        self.optimizer.step()
        self._parts = quick if quick is not None and _equal(changing, after) else None


def _are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


@torch.no_grad()
def _equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]
