"""The gradient of a twin that is not there: one vector-Jacobian product through a copy of the block, fed what was caught at its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.modules import random_state
from sensli.modules.arguments import first_tensor, with_value, without_memory
from sensli.modules.running import HALF, undrawn, widened
from sensli.moves.cutting import apply_cut, plan_cut, take_out
from sensli.moves.factors import Outer
from sensli.moves.geometry import Geometry
from sensli.moves.move import Gauge
from sensli.moves.point import Point
from sensli.moves.uses import Use, watch_uses


class _TwinGauge(Gauge):
    """A twin for measuring: it shares the parameters of its block, except those that are zero in it."""

    factors: ClassVar[bool] = True

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(shape=(1, *point.shape))
        self._point, self._block, self._module = point, block, module
        named = dict(module.named_parameters())
        self._maps = [named[name] for name in measured]
        # where maps were used in the pass that comes back, with the cotangents
        self._met: list[tuple[int, Use, Tensor]] = []

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        """The vector of all gradients cut into those of the single maps."""
        parts = sums["gradient"].split([weight.numel() for weight in self._maps])
        return [(part.view(weight.shape), Geometry()) for part, weight in zip(parts, self._maps, strict=True)]

    def _watch(self, output: Tensor, *, aside: bool) -> None:
        """Have the cotangents at all maps arrive with the backward pass from the twin's output; ``aside``: in one of its own."""
        numbers = {id(weight): index for index, weight in enumerate(self._maps)}

        def arrived(key: int, use: Use, cotangent: Tensor) -> Tensor:
            if aside or self.counts():
                self._met.append((numbers[key], use, cotangent.detach()))
            return cotangent if aside else self.marked(cotangent)

        watch_uses([output.grad_fn], {id(weight): weight for weight in self._maps}, arrived)

    def _natural_sums(self, gradients: Sequence[Tensor | None], samples: int) -> dict[str, Tensor | Outer]:
        met, self._met = self._met, []
        sums: dict[str, Any] = {}
        for index, use, cotangent in met:
            gradient = None if f"map{index}" in sums else gradients[index]
            for name, value in use.sums(index, gradient, cotangent, samples).items():
                sums[name] = sums[name] + value if name in sums else value
        if not sums:
            raise MeasurementError(
                f"norm='natural' needs linear maps, convolutions or scales, but what is zero in a copy of the {type(self._block).__name__} "
                "is none of them. Use another norm, for example norm='frobenius'."
            )
        return sums


class VirtualTwin(_TwinGauge):
    """Runs the twin on what was caught, aside from the model."""

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(point, block, module, measured)
        self.points = [(point, block)]
        self._training = block.training

    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, Tensor | Outer]:
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
        with random_state.kept(), torch.enable_grad():
            output = first_tensor(self._module(*args, **kwargs))
            if output is None or output.shape != cotangent.shape:
                raise MeasurementError(
                    f"a copy of the {type(self._block).__name__} does not map its output of shape {tuple(x.shape)} to the same shape, as "
                    "it did for find_sites. Find the sites with an example like the training data."
                )
            if self.natural:
                self._watch(output, aside=True)
            gradients = torch.autograd.grad(output, self._maps, cotangent.to(output.dtype), allow_unused=True)
        pairs = zip(self._maps, gradients, strict=True)
        if self.natural:
            return self._natural_sums(gradients, len(x))
        return {"gradient": torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for w, g in pairs])}


class AddedTwin(_TwinGauge):
    """A twin that gives zero, for a list whose loop adds what its blocks give: ``x = x + f(block(x))``.

    What the loop does between its blocks is in no module, so the twin is put into the list while the hooks are set. It changes nothing
    but the time that a pass takes: what it gives is zero, and the random numbers that it draws are given back.
    """

    enters: ClassVar[bool] = True

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(point, block, module, measured)
        for weight in self._maps:
            weight.requires_grad_()
        self.weights = self._maps

    def hooks(
        self, add: Callable[[Mapping[str, Tensor | Outer]], None], unscaled: Callable[[Tensor], Tensor]
    ) -> list[Any]:
        """Hand on the gradients of all measured maps, as parts of one vector."""
        self._module.train(self._block.training)
        if self.natural:
            return [*undrawn(self._module), *self._natural_hooks(add, unscaled)]
        sizes = [weight.numel() for weight in self._maps]

        def hook(index: int) -> Callable[[Tensor], None]:
            def arrived(gradient: Tensor) -> None:
                parts = [gradient.new_zeros(size) for size in sizes]
                parts[index] = unscaled(gradient.detach()).flatten()
                add({"gradient": torch.cat(parts)})

            return arrived

        return [*undrawn(self._module), *(w.register_hook(hook(index)) for index, w in enumerate(self._maps))]

    def _natural_hooks(
        self, add: Callable[[Mapping[str, Tensor | Outer]], None], unscaled: Callable[[Tensor], Tensor]
    ) -> list[Any]:
        """Each map's own sums as soon as its gradient arrives, which is after the cotangents of all its uses."""
        samples: list[int] = []

        def ran(module: nn.Module, args: Any, output: Any) -> None:
            value = first_tensor(output)
            if value is not None and value.grad_fn is not None:
                samples[:] = [len(value)]
                self._watch(value, aside=False)

        def hook(index: int) -> Callable[[Tensor], None]:
            def arrived(gradient: Tensor) -> None:
                if not self.counts():
                    return
                mine = [(number, use, unscaled(g)) for number, use, g in self._met if number == index]
                others, self._met = [each for each in self._met if each[0] != index], mine
                gradients: list[Tensor | None] = [None] * len(self._maps)
                gradients[index] = unscaled(gradient.detach())
                add(self._natural_sums(gradients, samples[0]))
                self._met = others

            return arrived

        return [
            self._module.register_forward_hook(ran),
            *(weight.register_hook(hook(index)) for index, weight in enumerate(self._maps)),
        ]

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
