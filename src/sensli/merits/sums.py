"""What is summed over batches: gradients, and the moments that the natural merit measures them by."""

from __future__ import annotations

import torch
from torch import Tensor

from sensli.moves.factors import Outer, mirrored


class Sum:
    """A gradient summed over batches: of all of them, and of groups of batches where an estimate of its noise is wanted."""

    def __init__(self, groups: int = 1) -> None:
        # The last one is the sum over all, in the order of the batches: the same bits with groups and without.
        self.groups: list[Tensor | None] = [None] * (groups + 1 if groups > 1 else 1)
        self._owned = [False] * len(self.groups)

    def __len__(self) -> int:
        """How many groups there are."""
        return max(len(self.groups) - 1, 1)

    def add(self, gradient: Tensor, group: int) -> None:
        gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        if gradient.dtype in (torch.float16, torch.bfloat16):
            gradient = gradient.float()
        for j in {group % len(self), len(self.groups) - 1}:
            held = self.groups[j]
            if held is None:
                self.groups[j] = gradient
            elif self._owned[j]:
                held.add_(gradient)
            else:  # the first one came from autograd: it may be expanded, or the gradient of another weight as well
                self.groups[j], self._owned[j] = held + gradient, True

    def like(self) -> Sum:
        """An empty one with as many groups."""
        return Sum(len(self))

    def total(self, without: int | None = None) -> Tensor | None:
        """The sum over all groups, or over all but one."""
        if without is None or len(self.groups) == 1:
            return self.groups[-1]
        whole, part = self.groups[-1], self.groups[without]
        return whole if whole is None or part is None else whole - part


class Moment:
    """A moment summed over batches, in place: of a symmetric matrix one half, and the other when it is read."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._whole = True

    def add(self, value: Outer) -> None:
        self._total, self._whole = value.added_to(self._total), False

    def total(self, without: int | None = None) -> Tensor | None:
        """The sum over all batches: gradients without a group of batches are measured by it too."""
        if self._total is not None and not self._whole:
            self._total, self._whole = mirrored(self._total), True
        return self._total

    @property
    def groups(self) -> list[Tensor | None]:
        """The one group that all batches are in."""
        return [self.total()]
