"""A batch cut down to its first samples: enough to see what a model does, at a fraction of the cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sensli.modules.running import mapped, tensors


def count_samples(value: Any) -> int:
    """How many samples a nest of tensors holds: the leading dimension of the first; 0 where it has none."""
    first = next(tensors(value), None)
    return first.shape[0] if first is not None and first.dim() else 0


def first_samples(value: Any, few: int, count: int) -> Any:
    """The first few of so many samples; a tensor with another leading dimension belongs to all of them and stays whole."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:few] if tensor.dim() and tensor.shape[0] == count else tensor

    return mapped(value, cut)


def with_another(value: Any) -> Any:
    """A nest of one sample, and one more like it: statistics of a batch need two. Unlike it too, or their spread would be zero."""

    def twice(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != 1:
            return tensor
        return torch.cat([tensor, tensor / 2 if tensor.is_floating_point() else tensor])

    return mapped(value, twice) if count_samples(value) == 1 else value
