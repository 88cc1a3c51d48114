"""The gradient of a twin that is not there: one vector-Jacobian product through a copy of the block, fed what was caught at its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sensli.arguments import Slot, first_tensor, with_value, without_memory
from sensli.errors import MeasurementError
from sensli.running import HALF, forked_random_state, widened
from sensli.twins import Twin


class VirtualTwin:
    """A twin for measuring: it shares the parameters of its block, except those that are zero in it."""

    def __init__(self, twin: Twin, block: nn.Module, model: nn.Module, slot: Slot) -> None:
        self._block = block
        self._slot = slot
        self._module = twin.build(block, model, share=True)
        self._training = block.training
        named = dict(self._module.named_parameters())
        self._weights = [named[name] for name in twin.measured]
        self.shapes = [tuple(weight.shape) for weight in self._weights]

    def gradient(self, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The gradients of all measured maps at activation ``x`` with cotangent ``g``, as one vector.

        args, kwargs: of the block's call, whose other arguments (a mask, positions) the twin takes too.
        """
        if self._block.training != self._training:
            self._module.train(self._block.training)
            self._training = self._block.training
        if self._weights[0].dtype not in HALF:  # then half precision is autocast's, which is off here
            x, args, kwargs = widened((x, args, kwargs))
        args, kwargs = without_memory(with_value(args, kwargs, self._slot, None))
        args, kwargs = with_value(args, kwargs, self._slot, x.clone())  # it may work in place
        # The step that is being measured must not notice: neither its random numbers nor its gradients.
        with forked_random_state(self._module), torch.enable_grad():
            output = first_tensor(self._module(*args, **kwargs))
            if output is None or output.shape != cotangent.shape:
                raise MeasurementError(
                    f"a copy of the {type(self._block).__name__} does not map its output of shape {tuple(x.shape)} to the same shape, as "
                    "it did for find_sites. Find the sites with an example like the training data."
                )
            gradients = torch.autograd.grad(output, self._weights, cotangent.to(output.dtype), allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(w) if g is None else g).flatten() for w, g in zip(self._weights, gradients, strict=True)]
        )


def split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The vector of all gradients cut into those of the single maps."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
