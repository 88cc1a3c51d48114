"""New units that are copies of old ones: what makes a unit is copied, what reads it is shared between the unit and its copies.

Some of the new units may be no copies: their source is `FRESH`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sensli.moves.stretching import Resize, Stretch

FRESH = -1  # the source of a unit that is not a copy


@dataclass(frozen=True)
class Copied(Stretch):
    """More units along one axis, each a copy of the one in ``sources``. Of moments it is an ordinary stretch."""

    sources: tuple[int, ...] = ()
    shared: bool = False  # a unit and its copies have together what the unit had alone

    def copied(self, tensor: Tensor, new: Tensor | complex = 0.0) -> Tensor:
        """The tensor with its copies. ``new``: what units that are not copies begin with; a tensor of entries is also added to copies."""
        before, middle, after = self._split(tensor, self.units)
        if self.shared:
            counts = self._counts().to(middle.device, middle.dtype)
            middle = middle / counts.reshape(-1, *[1] * (middle.dim() - self.dim - 2))
        sources = torch.tensor(self.sources, device=middle.device)
        picked = middle.index_select(self.dim + 1, sources.clamp_min(0))
        if min(self.sources) == FRESH:
            fresh = (sources == FRESH).reshape(-1, *[1] * (middle.dim() - self.dim - 2))
            number = 0.0 if isinstance(new, Tensor) else new
            picked = torch.where(fresh, torch.full_like(picked, number), picked)
        if isinstance(new, Tensor):
            picked = picked + self._entries(middle, self.more, new)
        return self._joined(before, torch.cat([middle, picked], dim=self.dim + 1), after)

    def given_back(self, tensor: Tensor) -> Tensor:
        """The tensor without its copies; what they shared goes back to the units that they were copied from."""
        before, middle, after = self._split(tensor, self.units + self.more)
        old, new = middle.split([self.units, self.more], dim=self.dim + 1)
        if self.shared:
            copies = torch.tensor(
                [place for place, source in enumerate(self.sources) if source != FRESH], device=old.device
            )
            sources = torch.tensor([source for source in self.sources if source != FRESH], device=old.device)
            old = old.index_add(self.dim + 1, sources.long(), new.index_select(self.dim + 1, copies.long()))
        return self._joined(before, old, after)

    def _counts(self) -> Tensor:
        """How many of each unit there are, with its copies."""
        copies = torch.tensor([source for source in self.sources if source != FRESH], dtype=torch.long, device="cpu")
        return 1 + torch.bincount(copies, minlength=self.units)

    def owned(self, tensor: Tensor) -> Tensor:
        """Of what is there before whether it is the tensor's own, with that of the new units: copies are, others are not."""
        _, middle, _ = self._split(tensor, self.units)
        copies = torch.tensor([source != FRESH for source in self.sources], device=tensor.device)
        shape = list(middle.shape)
        shape[self.dim + 1] = self.more
        entries = copies.reshape(-1, *[1] * (middle.dim() - self.dim - 2)).expand(shape)
        return self.applied(tensor, self._flat(entries))


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


def is_own(resize: Resize) -> Tensor:
    """Of each entry of the tensor after the change whether it was there before or is a copy of such a one."""
    own = torch.ones(resize.old_shape, dtype=torch.bool, device=resize.tensor.device)
    for stretch in resize.stretches:
        own = stretch.owned(own) if isinstance(stretch, Copied) else stretch.applied(own, False)
    return own


def given_back(resize: Resize, tensor: Tensor) -> Tensor:
    """The inverse of `copied`, up to rounding; what has changed since is added up."""
    for stretch in reversed(resize.stretches):
        assert isinstance(stretch, Copied)
        tensor = stretch.given_back(tensor)
    return tensor
