"""The gradient of a twin that is not there: one vector-Jacobian product through a copy of the block, fed what was caught at its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules.arguments import Slot, first_tensor, with_value, without_memory
from sensli.modules.running import HALF, forked_random_state, undrawn, widened
from sensli.moves.cutting import Cut, apply_cut, plan_cut, take_out
from sensli.moves.sites import Site
from sensli.moves.twin.twins import Twin


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


class AddedTwin:
    """A twin that gives zero, for a list whose loop adds what its blocks give: ``x = x + f(block(x))``.

    What the loop does between its blocks is in no module, so the twin is put into the list while the hooks are set. It changes nothing
    but the time that a pass takes: what it gives is zero, and the random numbers that it draws are given back.
    """

    def __init__(self, site: Site, twin: Twin, block: nn.Module, model: nn.Module) -> None:
        self.site = site
        self._block = block
        self.module = twin.build(block, model, share=True)
        named = dict(self.module.named_parameters())
        self.weights = [named[name].requires_grad_() for name in twin.measured]
        self.shapes = [tuple(weight.shape) for weight in self.weights]

    def hooked(self, arrived: Callable[[Tensor], None]) -> list[Any]:
        """Hand on the gradients of all measured maps, as parts of one vector."""
        self.module.train(self._block.training)
        sizes = [weight.numel() for weight in self.weights]

        def hook(index: int) -> Callable[[Tensor], None]:
            def add(gradient: Tensor) -> None:
                parts = [gradient.new_zeros(size) for size in sizes]
                parts[index] = gradient.detach().flatten()
                arrived(torch.cat(parts))

            return add

        return [*undrawn(self.module), *(w.register_hook(hook(index)) for index, w in enumerate(self.weights))]


@contextmanager
def virtually_in(model: nn.Module, added: Sequence[AddedTwin]) -> Iterator[None]:
    """The twins stand in their lists as long as the context lasts."""
    done: list[Cut] = []
    try:
        for each in reversed(added):  # from the end, so that what comes before keeps its number
            cut = plan_cut(model, each.site, each.site.find(model)[0])
            apply_cut(model, cut, each.module)
            done.append(cut)
        yield
    finally:
        for cut in reversed(done):
            take_out(model, cut.path, cut.place)
        for each in added:
            for weight in each.weights:
                weight.grad = None


def split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The vector of all gradients cut into those of the single maps."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
