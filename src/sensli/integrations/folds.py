"""Samples divided among networks that train together: what each trains on, what each holds out, and one epoch of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sensli.integrations.stacked import Stacked

Samples = Callable[[Tensor, Tensor], Tensor]  # outputs and targets to one number per sample
Part = tuple[Tensor, Tensor, Tensor]  # inputs, targets, weights


class Diverged(ValueError):
    """The loss is not a finite number any more."""


class Data:
    """Samples, and which of them each network trains on and holds out. Without the latter nothing grows."""

    def __init__(
        self, x: Tensor, y: Tensor, weight: Tensor, rows: Sequence[Tensor], held_out: Sequence[Tensor] = ()
    ) -> None:
        self.x, self.y = x, y
        self.weight = weight / weight.mean()  # the scale of the loss does not depend on that of the weights
        self.rows, self._shares = self._padded(rows)
        self.watched = self._padded(held_out or rows)
        self.grows = len(held_out) > 0

    def _padded(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of equal number for every network, and the weights of these samples: zero where a row fills up."""
        padded = pad_sequence(list(rows), batch_first=True)
        real = torch.arange(padded.shape[1], device="cpu") < torch.tensor([[len(each)] for each in rows], device="cpu")
        padded = padded.to(self.x.device)
        return padded, self.weight[padded] * real.to(self.x.device)

    def part(self, rows: Tensor, weight: Tensor) -> Part:
        """The samples of these rows."""
        return self.x[rows], self.y[rows], weight

    def count(self, size: int) -> int:
        """How many batches of about this size there are in an epoch."""
        return math.ceil(self.rows.shape[1] / size)

    def batches(self, size: int) -> Iterator[Part]:
        """One epoch in equally large batches, for each network its own; one batch keeps its order."""
        count = self.count(size)
        if count == 1:
            yield self._whole
            return
        order = (
            torch.rand(self.rows.shape, device="cpu").argsort(dim=1).to(self.rows.device)
        )  # the same on every device
        rows, weight = self.rows.gather(1, order), self._shares.gather(1, order)
        for some, its in zip(rows.chunk(count, dim=1), weight.chunk(count, dim=1), strict=True):
            yield self.part(some, its)

    @cached_property
    def _whole(self) -> Part:
        return self.part(self.rows, self._shares)


def train_on(stacked: Stacked, data: Data, losses: Samples, batch_size: int) -> float:
    """One epoch of all networks; their mean training loss."""
    loss = float(sum(_step(stacked, part, losses) for part in data.batches(batch_size))) / data.count(batch_size)
    if not math.isfinite(loss):
        rate = stacked.optimizer.param_groups[0]["lr"]
        raise Diverged(f"learning_rate must be small enough for a finite loss, got {rate:g} and a loss of {loss}.")
    return loss


def _step(stacked: Stacked, part: Part, losses: Samples) -> Tensor:
    """One step of all networks; their mean loss before it."""
    x, y, weight = part
    each = losses(stacked.forward(x).flatten(0, 1), y.flatten(0, 1)) * weight.flatten()
    loss = each.sum() / weight.shape[1]  # a sum over the networks: none of them feels the others
    stacked.step(loss)
    return loss.detach() / len(weight)
