"""What a model with one more block in a list should give on the example, and whether another one gives it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sensli.modules import random_state
from sensli.modules.failing import note
from sensli.modules.nearness import moved
from sensli.modules.running import device_of, run, tensors, to_device
from sensli.modules.samples import count_samples, first_samples


class Known:
    """The example, and the outputs that a list with one more block should give on it."""

    def __init__(self, example: Any, trial: nn.Module, output: Any) -> None:
        self._example = to_device(example, device_of(trial))
        self._count = count_samples(self._example)
        self._outputs = [t.detach() for t in _comparable(output)]

    def is_given_by(self, model: nn.Module, watched: nn.Module | None = None) -> bool:
        """Whether a model gives these outputs too and calls the watched module once; one sample that shows it is enough."""
        if not self._outputs:
            return False
        return (self._count > 1 and self._is_given(model, watched, 1)) or self._is_given(model, watched, self._count)

    def _is_given(self, model: nn.Module, watched: nn.Module | None, few: int) -> bool:
        calls: list[None] = []
        handle = watched.register_forward_pre_hook(lambda *_: calls.append(None)) if watched is not None else None
        try:
            with random_state.kept(), torch.no_grad():
                given = copy.deepcopy(first_samples(self._example, few, self._count))
                after = list(_comparable(run(model, given)))
        except Exception as error:
            note(error)
            return False
        finally:
            if handle is not None:
                handle.remove()
        before = first_samples(self._outputs, few, self._count)
        same = [one.shape == other.shape and not moved(one, other) for one, other in zip(before, after, strict=False)]
        return len(after) == len(before) and all(same) and (watched is None or len(calls) == 1)


def _comparable(output: Any) -> Iterator[Tensor]:
    """The parts of an output that do not grow with the number of blocks: a record without its lists of all blocks' states."""
    if isinstance(output, dict):
        output = [value for value in output.values() if isinstance(value, Tensor)]
    return (tensor for tensor in tensors(output) if tensor.dim() > 0)
