"""A site at one point of the data flow: which layer fits there, or the reason why none does."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sensli.errors import SensliError
from sensli.flow import Call, Seen
from sensli.graph import Channels, channels, operation, origin
from sensli.layers import CONVOLUTIONS, RELU, TANH, Activation, Layer, grouped_like, same_size_kernel
from sensli.lists import ListPlace
from sensli.sites import Ref, Site
from sensli.surroundings import Surroundings, functional
from sensli.twinning import TwinFinder
from sensli.zeroing import NoTwin


class Refused(SensliError):
    """A place that cannot grow; the text becomes its reason in `Sites.skipped`."""


class Placing:
    """What was asked for, and what a new layer at a point of the flow will be."""

    def __init__(
        self, model: nn.Module, around: Surroundings, layer: str, kernel_size: int | None, twins: TwinFinder
    ) -> None:
        self.model, self.around, self.layer, self.kernel_size, self.twins = model, around, layer, kernel_size, twins

    def site(self, call: Call, side: str, seen: Seen, activation: Activation | None, block: bool, twins: bool) -> Site:
        if seen.node is None or not seen.reached:
            raise Refused(
                "no gradient arrives there (the forward pass detaches it, or the output does not depend on it)"
            )
        if side == "before" and not block and not call.positional:
            raise Refused(
                "takes its input by keyword or in a nest, and a layer before it needs it as the first argument"
            )
        if self.around.in_encoder_layer(call.path):
            raise Refused(
                "stands inside torch's TransformerEncoderLayer, which in eval mode reads the weights without calling the modules"
            )
        source = origin(seen.node)
        # The graph does not say what a padding was filled with, so the values have a say too.
        from_relu = source is not None and operation(source) == "Relu" and not seen.negative
        neighbours = self.around.neighbours(call, seen)
        path, module = call.path, self.model.get_submodule(call.path)
        layer, place = None, None
        if twins:
            layer, place = self._twin(call, seen)
        else:
            form = self._form(from_relu, activation or functional(seen.node))
            layer = self._plan(form, call, seen, neighbours, activation)
        return Site(
            anchor=Ref.to(path, module),
            side=side,
            layer=layer,
            shape=tuple(seen.tensor.shape[1:]),
            neighbours=tuple(Ref.to(name, self.model.get_submodule(name)) for name in neighbours),
            chained=self.around.chained(path),
            overwritten=seen.overwritten
            or self.around.overwritten_in_training(seen, call.ended if side == "after" else call.began),
            slot=call.slot if block and call.slot is not None else 0,
            first_part=side == "after" and call.output is None,
            place=place,
        )

    def _twin(self, call: Call, seen: Seen) -> tuple[Layer, ListPlace | None]:
        """A twin of the block, and its place in the list."""
        try:
            return self.twins.find(self.around.flow, call, seen, chained=self.around.chained(call.path))
        except NoTwin as refusal:
            raise Refused(str(refusal)) from refusal

    def _form(self, from_relu: bool, activation: Activation | None) -> str:
        if self.layer == "auto":
            return "relu" if from_relu else "residual"
        if self.layer == "relu" and not from_relu:
            behind = activation.name if activation else "this"
            raise Refused(
                f'is not idempotent: an identity layer + ReLU behind {behind} would change the function; use layer="residual"'
            )
        return self.layer

    def _plan(self, form: str, call: Call, seen: Seen, neighbours: list[str], activation: Activation | None) -> Layer:
        shape = tuple(seen.tensor.shape)
        if len(shape) < 2 or not seen.tensor.is_floating_point():
            raise Refused(
                f"its values have shape {shape} and type {seen.tensor.dtype}: no batch of floating-point features"
            )
        # A matrix of samples and features leaves no choice, whatever its features were before they were flattened.
        lies = channels(seen.node, shape) if len(shape) > 2 else Channels(1, False)
        if lies is None and call.path in self.around.blocks and call.result is not None:
            lies = channels(call.result.node, shape)  # a block maps a space into itself
        if lies is None:
            raise Refused(f"it cannot be told along which dimension of its shape {shape} the features lie")
        if lies.dim not in (1, len(shape) - 1):
            raise Refused(f"its features lie along dimension {lies.dim} of {len(shape)}, neither second nor last")
        conv = lies.dim == 1 and (lies.first or len(shape) > 2) and 3 <= len(shape) <= 5
        s = RELU if form == "relu" else (activation or functional(seen.node) or self.around.activation_in(call) or TANH)
        if not conv:
            if lies.dim != len(shape) - 1:
                raise Refused(
                    f"its features lie along dimension {lies.dim} of shape {shape}, where no layer of ours acts"
                )
            # torch's slopes per channel lie along the second dimension, which are the features only in a matrix
            return Layer(form, "linear", shape[-1], activation=_fitted(s, shape[-1] if len(shape) == 2 else 1))
        kernel, groups = (3,) * (len(shape) - 2), 1
        for name in neighbours:
            module = self.model.get_submodule(name)
            if isinstance(module, CONVOLUTIONS) and len(module.kernel_size) == len(shape) - 2:
                kernel, groups = same_size_kernel(module.kernel_size), grouped_like(shape[1], module.groups)
                break
        if self.kernel_size is not None:
            kernel = (self.kernel_size,) * len(kernel)
        return Layer(form, "conv", shape[1], kernel, groups, _fitted(s, shape[1]))


def _fitted(activation: Activation, width: int) -> Activation:
    """The same activation for another width: a PReLU with one slope per channel has to fit."""
    if activation.name == "PReLU" and dict(activation.arguments)["num_parameters"] > 1:
        return replace(activation, arguments=(("num_parameters", width),))
    return activation
