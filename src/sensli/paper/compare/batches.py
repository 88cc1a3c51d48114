"""Which samples a step and a look are given: the same for all methods of a seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from sensli.paper.compare.task import Part, Task
from sensli.paper.plans.seeds import generator

Batch = tuple[Tensor, Tensor]


class Batches:
    """The batches of a run by the number of the step. As an iterable, those from the step ``next`` on, without an end.

    ``taken`` of them were trained on between the steps, in trials: the steps after that take the batches after these.
    """

    def __init__(self, task: Task, part: Part, seed: int) -> None:
        self.task, self.part, self.seed = task, part, seed
        self.next = self.taken = 0
        self._drawn: tuple[int, Tensor] | None = None

    def at(self, step: int) -> Batch:
        """The batch of a step. A rest that fills no batch is left to another epoch."""
        part, size = self.part, self.task.batch
        if size is None:
            return part.x, part.y
        epoch, place = divmod(step + self.taken, len(part) // size)
        index = self._order(epoch)[place * size : (place + 1) * size]
        return part.x[index], part.y[index]

    def __iter__(self) -> Iterator[Batch]:
        return (self.at(step) for step in itertools.count(self.next))

    def of_look(self, look: int) -> Iterator[Batch]:
        """The training samples of a look, others at each one, in batches as large as those of a step."""
        part, size = self.part, self.task.batch
        if size is None:
            yield part.x, part.y
            return
        source = generator(self.seed, look, "look")
        index = torch.randperm(len(part), generator=source, device=source.device)[: self.task.looked_at]
        for some in index.split(size):
            yield part.x[some], part.y[some]

    def _order(self, epoch: int) -> Tensor:
        if self._drawn is None or self._drawn[0] != epoch:
            order = torch.randperm(len(self.part), generator=generator(self.seed, epoch, "order"), device="cpu")
            self._drawn = epoch, order
        return self._drawn[1]
