"""New units that are copies of old ones: what makes a unit is copied, what reads it is shared between the unit and its copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sensli.moves.stretching import Resize, Stretch


@dataclass(frozen=True)
class Copied(Stretch):
    """More units along one axis, each a copy of the one in ``sources``. Of moments it is an ordinary stretch."""

    sources: tuple[int, ...] = ()
    shared: bool = False  # a unit and its copies have together what the unit had alone

    def copied(self, tensor: Tensor) -> Tensor:
        """The tensor with its copies."""
        before, middle, after = self._split(tensor, self.units)
        if self.shared:
            counts = self._counts().to(middle.device, middle.dtype)
            middle = middle / counts.reshape(-1, *[1] * (middle.dim() - self.dim - 2))
        picked = middle.index_select(self.dim + 1, torch.tensor(self.sources, device=middle.device))
        return self._joined(before, torch.cat([middle, picked], dim=self.dim + 1), after)

    def given_back(self, tensor: Tensor) -> Tensor:
        """The tensor without its copies; what they shared goes back to the units that they were copied from."""
        before, middle, after = self._split(tensor, self.units + self.more)
        old, new = middle.split([self.units, self.more], dim=self.dim + 1)
        if self.shared:
            old = old.index_add(self.dim + 1, torch.tensor(self.sources, device=old.device), new)
        return self._joined(before, old, after)

    def _counts(self) -> Tensor:
        """How many of each unit there are, with its copies."""
        return 1 + torch.bincount(torch.tensor(self.sources), minlength=self.units)


def is_copied(resize: Resize) -> bool:
    """Whether the new entries of a tensor are copies of its old ones."""
    return any(isinstance(stretch, Copied) for stretch in resize.stretches)


def is_shared(resize: Resize) -> bool:
    """Whether the change divides old entries of a tensor between units and their copies."""
    return any(isinstance(stretch, Copied) and stretch.shared for stretch in resize.stretches)


def copied(resize: Resize, tensor: Tensor) -> Tensor:
    """A tensor of values, such as the parameter itself, with its copies."""
    for stretch in resize.stretches:
        assert isinstance(stretch, Copied)
        tensor = stretch.copied(tensor)
    return tensor


def given_back(resize: Resize, tensor: Tensor) -> Tensor:
    """The inverse of `copied`, up to rounding; what has changed since is added up."""
    for stretch in reversed(resize.stretches):
        assert isinstance(stretch, Copied)
        tensor = stretch.given_back(tensor)
    return tensor
