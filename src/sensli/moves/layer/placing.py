"""Which layer fits at a point of the data flow, or the reason why none does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sensli.moves.layer.forms import Layer
from sensli.moves.search import Refused, Search
from sensli.moves.sites import Site
from sensli.moves.trace.activations import CONVOLUTIONS, RELU, TANH, Activation, functional
from sensli.moves.trace.flow import Call, Seen
from sensli.moves.trace.graph import Channels, channels, is_score, operation, origin
from sensli.moves.trace.surroundings import never_negative


class Placing:
    """What was asked for, and what a new layer at a point of the flow will be."""

    def __init__(self, search: Search) -> None:
        self.search, self.around = search, search.around
        self.layer, self.kernel_size = search.request.layer, search.request.kernel_size

    def sites(
        self,
        call: Call,
        side: str,
        seen: Seen,
        activation: Activation | None = None,
        *,
        block: bool = False,
        form: str | None = None,
    ) -> Iterator[Site]:
        """What could be put at a point, the best first; the others are for the case that a trial refuses it. Raises `Refused`."""
        self.search.check(call, side, seen, block=block)
        near = self.around.neighbours(call, seen)
        form = form or self._form(seen, activation or functional(seen.node))
        layer = self._plan(form, call, seen, near, activation)
        point = self.search.point(call, side, seen, block=block)
        yield from layer.ways(Site(point, layer))
        if self.layer == "auto" and (form == "relu" or layer.norm):
            # what trains otherwise than it rests has the plain form left
            layer = replace(self._plan("residual", call, seen, near, activation), norm=0)
            yield from layer.ways(Site(point, layer))

    def before_activation(self, call: Call, activation: Activation, inner: Any) -> Iterator[Site]:
        """A layer after the module whose output goes into a functional activation, where no module comes after the activation.

        ``inner`` is the activation's graph node. ``relu(W relu(x))`` is what the layer after the ReLU would be.
        """
        assert call.output is not None
        self.search.check(call, "after", call.output, block=False)
        near = self.around.neighbours(call, call.output)
        normed = after_batch_norm(inner)
        if self.leads(activation, inner):
            layer = replace(self._plan("relu", call, call.output, near, activation), leading=True)
        elif self.layer == "relu":
            raise Refused(f"its output goes into {activation.name}, which is not a ReLU")
        else:
            form = "residual" if self.layer == "auto" else self.layer
            layer = self._plan(form, call, call.output, near, activation)
            layer = replace(layer, norm=len(layer.kernel) if normed and form == "residual" else 0)
        yield from layer.ways(Site(self.search.point(call, "after", call.output), layer))

    def leads(self, activation: Activation, inner: Any) -> bool:
        """Whether the layer before this activation begins with one like it, and so is a layer after it."""
        return activation == RELU and not after_batch_norm(inner) and self.layer in ("auto", "relu")

    def _form(self, seen: Seen, activation: Activation | None) -> str:
        from_relu = never_negative(seen)
        if self.layer == "auto":
            return "relu" if from_relu and not after_batch_norm(seen.node) else "residual"
        if self.layer == "relu" and not from_relu:
            source = activation.name if activation else "this"
            raise Refused(
                f'is not idempotent: an identity layer + ReLU after {source} would change the function; use layer="residual"'
            )
        return self.layer

    def _plan(self, form: str, call: Call, seen: Seen, neighbours: list[str], activation: Activation | None) -> Layer:
        shape = tuple(seen.tensor.shape)
        if len(shape) < 2 or not seen.tensor.is_floating_point():
            raise Refused(
                f"its values have shape {shape} and type {seen.tensor.dtype}: not a batch of floating-point features"
            )
        # A matrix of samples and features leaves no choice, whatever its features were before they were flattened.
        scores = len(shape) == 2 and is_score(seen.node, shape)
        lies = channels(seen.node, shape) if len(shape) > 2 or scores else Channels(1, False)
        if lies is None and call.path in self.around.blocks and call.result is not None:
            lies = channels(call.result.node, shape)  # a block maps a space into itself
        if lies is None:
            raise Refused(f"it is unclear which dimension of its shape {shape} holds the features")
        if lies.dim not in (1, len(shape) - 1):
            raise Refused(f"its features are in dimension {lies.dim} of {len(shape)}, neither second nor last")
        conv = lies.dim == 1 and (lies.first or len(shape) > 2) and 3 <= len(shape) <= 5
        s = RELU if form == "relu" else (activation or functional(seen.node) or self.around.activation_in(call) or TANH)
        if not conv:
            if lies.dim != len(shape) - 1:
                raise Refused(
                    f"its features are in dimension {lies.dim} of shape {shape}, where none of the layer forms can act"
                )
            # torch's slopes per channel lie along the second dimension, which are the features only in a matrix
            norm = int(form == "residual" and len(shape) == 2 and after_batch_norm(seen.node))
            return Layer(
                form, "linear", shape[-1], activation=_fitted(s, shape[-1] if len(shape) == 2 else 1), norm=norm
            )
        kernel, groups = same_size_kernel((3,) * (len(shape) - 2), shape[2:]), 1
        for name in neighbours:
            module = self.search.model.get_submodule(name)
            if isinstance(module, CONVOLUTIONS) and len(module.kernel_size) == len(shape) - 2:
                kernel = same_size_kernel(module.kernel_size, shape[2:])
                groups = grouped_like(shape[1], module.groups)
                break
        if self.kernel_size is not None:
            kernel = (self.kernel_size,) * len(kernel)
        norm = len(kernel) if form == "residual" and after_batch_norm(seen.node) else 0
        return Layer(form, "conv", shape[1], kernel, groups, _fitted(s, shape[1]), norm=norm)


def after_batch_norm(node: Any) -> bool:
    """Whether the values are those of a batch norm, bent by an activation."""
    node = origin(node)
    if node is None or functional(node) is None:
        return False
    source = origin(node.next_functions[0][0])
    return source is not None and operation(source) in ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")


def _fitted(activation: Activation, width: int) -> Activation:
    """The same activation for another width: a PReLU with one slope per channel has to fit."""
    if activation.name == "PReLU" and dict(activation.arguments)["num_parameters"] > 1:
        return replace(activation, arguments=(("num_parameters", width),))
    return activation


def grouped_like(width: int, groups: int) -> int:
    """The number of groups a new convolution takes over from its neighbour: as many, if they divide its width."""
    return groups if groups > 1 and width % groups == 0 else 1


def same_size_kernel(kernel: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """The neighbour's kernel where it is odd (only an odd one keeps the map's size and has a centre), otherwise 3.

    Never with entries that lie outside of the map wherever the kernel is put: on a map of 1 x 1 it is 1 x 1.
    """
    return tuple(min(k if k % 2 == 1 else 3, 2 * max(length, 1) - 1) for k, length in zip(kernel, size, strict=True))
