"""The gradient of a twin that is not there: one vector-Jacobian product through a copy of the block, fed what was caught at its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules.arguments import first_tensor, with_value, without_memory
from sensli.modules.running import HALF, forked_random_state, undrawn, widened
from sensli.moves.cutting import apply_cut, plan_cut, take_out
from sensli.moves.geometry import Geometry
from sensli.moves.move import Gauge
from sensli.moves.point import Point


class _TwinGauge(Gauge):
    """A twin for measuring: it shares the parameters of its block, except those that are zero in it."""

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(shape=(1, *point.shape))
        self._point, self._block, self._module = point, block, module
        named = dict(module.named_parameters())
        self._maps = [named[name] for name in measured]

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        """The vector of all gradients cut into those of the single maps."""
        parts = sums["gradient"].split([weight.numel() for weight in self._maps])
        return [(part.view(weight.shape), Geometry()) for part, weight in zip(parts, self._maps, strict=True)]


class VirtualTwin(_TwinGauge):
    """Runs the twin on what was caught, aside from the model."""

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(point, block, module, measured)
        self.points = [(point, block)]
        self._training = block.training

    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The gradients of all measured maps as one vector. The twin takes the block's other arguments too: a mask, positions."""
        if self._block.training != self._training:
            self._module.train(self._block.training)
            self._training = self._block.training
        if self._maps[0].dtype not in HALF:  # then half precision is autocast's, which is off here
            x, args, kwargs = widened((x, args, kwargs))
        slot = self._point.slot
        args, kwargs = without_memory(with_value(args, kwargs, slot, None))
        args, kwargs = with_value(args, kwargs, slot, x.clone())  # it may work in place
        # The step that is being measured must not notice: neither its random numbers nor its gradients.
        with forked_random_state(self._module), torch.enable_grad():
            output = first_tensor(self._module(*args, **kwargs))
            if output is None or output.shape != cotangent.shape:
                raise MeasurementError(
                    f"a copy of the {type(self._block).__name__} does not map its output of shape {tuple(x.shape)} to the same shape, as "
                    "it did for find_sites. Find the sites with an example like the training data."
                )
            gradients = torch.autograd.grad(output, self._maps, cotangent.to(output.dtype), allow_unused=True)
        pairs = zip(self._maps, gradients, strict=True)
        return {"gradient": torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for w, g in pairs])}


class AddedTwin(_TwinGauge):
    """A twin that gives zero, for a list whose loop adds what its blocks give: ``x = x + f(block(x))``.

    What the loop does between its blocks is in no module, so the twin is put into the list while the hooks are set. It changes nothing
    but the time that a pass takes: what it gives is zero, and the random numbers that it draws are given back.
    """

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(point, block, module, measured)
        for weight in self._maps:
            weight.requires_grad_()
        self.weights = self._maps

    def hooks(self, add: Callable[[dict[str, Tensor]], None]) -> list[Any]:
        """Hand on the gradients of all measured maps, as parts of one vector."""
        self._module.train(self._block.training)
        sizes = [weight.numel() for weight in self._maps]

        def hook(index: int) -> Callable[[Tensor], None]:
            def arrived(gradient: Tensor) -> None:
                parts = [gradient.new_zeros(size) for size in sizes]
                parts[index] = gradient.detach().flatten()
                add({"gradient": torch.cat(parts)})

            return arrived

        return [*undrawn(self._module), *(w.register_hook(hook(index)) for index, w in enumerate(self._maps))]

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """The twin is in its list as long as the context lasts."""
        found = self._point.anchor.find(model)
        assert found is not None
        cut = plan_cut(model, self._point, found[0], takes_call=True)
        apply_cut(model, cut, self._module)
        try:
            yield
        finally:
            take_out(model, cut.path, cut.place)
            for weight in self._maps:
                weight.grad = None
