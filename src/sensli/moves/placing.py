"""A site at one point of the data flow: which layer fits there, or the reason why none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from sensli.errors import SensliError
from sensli.moves.layers import Layer, grouped_like, same_size_kernel
from sensli.moves.lists import ListPlace
from sensli.moves.sites import Ref, Site
from sensli.moves.trace.activations import CONVOLUTIONS, RELU, TANH, Activation, functional
from sensli.moves.trace.flow import Call, Seen
from sensli.moves.trace.graph import Channels, channels, is_score, is_weight, operation, origin
from sensli.moves.trace.stacks import parent_of
from sensli.moves.trace.surroundings import Surroundings
from sensli.moves.twin.twinning import TwinFinder
from sensli.moves.twin.zeroing import NoTwin, never_negative


class Refused(SensliError):
    """A place that cannot grow; the text becomes its reason in `Sites.skipped`."""


class Placing:
    """What was asked for, and what a new layer at a point of the flow will be."""

    def __init__(
        self, model: nn.Module, around: Surroundings, layer: str, kernel_size: int | None, twins: TwinFinder
    ) -> None:
        self.model, self.around, self.layer, self.kernel_size, self.twins = model, around, layer, kernel_size, twins

    def sites(
        self,
        call: Call,
        side: str,
        seen: Seen,
        activation: Activation | None,
        block: bool,
        twins: bool,
        added: bool = False,
    ) -> Iterator[Site]:
        """What could be put at a point, the best first; the others are for the case that a trial refuses it. Raises `Refused`."""
        self._check(call, side, seen, block)
        chained = self.around.chained(call.path) or added
        if added or twins:
            layer, place = self._null(call) if added else self._twin(call, seen)
            yield from _ways(
                self._site(call, side, seen, layer, block=True, chained=chained, place=place), wrap=not added
            )
            if added or self.layer == "twin":
                return
            form = "residual"
        else:
            form = self._form(seen, activation or functional(seen.node))
        layer = self._plan(form, call, seen, self.around.neighbours(call, seen), activation)
        yield from _ways(self._site(call, side, seen, layer, block=block, chained=chained))
        if self.layer == "auto" and (
            form == "relu" or layer.norm
        ):  # what trains otherwise than it rests has the plain form left
            layer = replace(self._plan("residual", call, seen, self.around.neighbours(call, seen), activation), norm=0)
            yield from _ways(self._site(call, side, seen, layer, block=block, chained=chained))

    def before_activation(self, call: Call, activation: Activation, inner: Any) -> Iterator[Site]:
        """A layer behind the module whose output goes into a functional activation, where behind the activation there is no module.

        ``inner`` is the activation's graph node. ``relu(W relu(x))`` is what the layer behind the ReLU would be.
        """
        assert call.output is not None
        self._check(call, "after", call.output, False)
        near = self.around.neighbours(call, call.output)
        chained = self.around.chained(call.path)
        normed = behind_batch_norm(inner)
        if activation == RELU and not normed and self.layer in ("auto", "relu"):
            layer = replace(self._plan("relu", call, call.output, near, activation), leading=True)
        elif self.layer == "relu":
            raise Refused(f"its output goes into {activation.name}, which is not a ReLU")
        else:
            form = "residual" if self.layer == "auto" else self.layer
            layer = self._plan(form, call, call.output, near, activation)
            layer = replace(layer, norm=len(layer.kernel) if normed and form == "residual" else 0)
        yield from _ways(self._site(call, "after", call.output, layer, block=False, chained=chained))

    def _check(self, call: Call, side: str, seen: Seen, block: bool) -> None:
        if not self.around.flow.reaches(seen):
            raise Refused(
                "no gradient arrives there (the forward pass detaches it, or the output does not depend on it)"
            )
        if side == "before" and not block and not call.positional:
            raise Refused("takes its input by keyword or nested, but a layer before it needs it as the first argument")
        if self.around.in_encoder_layer(call.path):
            raise Refused(
                "is inside torch's TransformerEncoderLayer, which in eval mode reads the weights without calling the modules"
            )
        if "parametrizations" in call.path.split(".") or is_weight(seen.node):
            raise Refused("computes a weight, not an activation: its values do not depend on the input")

    def _site(
        self,
        call: Call,
        side: str,
        seen: Seen,
        layer: Layer,
        *,
        block: bool,
        chained: bool,
        place: ListPlace | None = None,
    ) -> Site:
        neighbours = self.around.neighbours(call, seen)
        since = call.ended if side == "after" else call.began
        return Site(
            anchor=Ref.to(call.path, self.model.get_submodule(call.path)),
            side=side,
            layer=layer,
            shape=tuple(seen.tensor.shape[1:]),
            neighbours=tuple(Ref.to(name, self.model.get_submodule(name)) for name in neighbours),
            chained=chained,
            overwritten=seen.overwritten or self.around.overwritten_in_training(seen, since),
            slot=call.slot if block and call.slot is not None else 0,
            first_part=side == "after" and call.output is None,
            place=place,
        )

    def _null(self, call: Call) -> tuple[Layer, ListPlace | None]:
        in_sequential = isinstance(self.model.get_submodule(parent_of(call.path)), nn.Sequential)
        try:
            return self.twins.find_null(self.around.flow, call, chained=in_sequential)
        except NoTwin as refusal:
            raise Refused(str(refusal)) from refusal

    def _twin(self, call: Call, seen: Seen) -> tuple[Layer, ListPlace | None]:
        """A twin of the block, and its place in the list."""
        try:
            return self.twins.find(self.around.flow, call, seen, chained=self.around.chained(call.path))
        except NoTwin as refusal:
            raise Refused(str(refusal)) from refusal

    def _form(self, seen: Seen, activation: Activation | None) -> str:
        from_relu = never_negative(seen)
        if self.layer == "auto":
            return "relu" if from_relu and not behind_batch_norm(seen.node) else "residual"
        if self.layer == "relu" and not from_relu:
            behind = activation.name if activation else "this"
            raise Refused(
                f'is not idempotent: an identity layer + ReLU after {behind} would change the function; use layer="residual"'
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
            norm = int(form == "residual" and len(shape) == 2 and behind_batch_norm(seen.node))
            return Layer(
                form, "linear", shape[-1], activation=_fitted(s, shape[-1] if len(shape) == 2 else 1), norm=norm
            )
        kernel, groups = same_size_kernel((3,) * (len(shape) - 2), shape[2:]), 1
        for name in neighbours:
            module = self.model.get_submodule(name)
            if isinstance(module, CONVOLUTIONS) and len(module.kernel_size) == len(shape) - 2:
                kernel = same_size_kernel(module.kernel_size, shape[2:])
                groups = grouped_like(shape[1], module.groups)
                break
        if self.kernel_size is not None:
            kernel = (self.kernel_size,) * len(kernel)
        norm = len(kernel) if form == "residual" and behind_batch_norm(seen.node) else 0
        return Layer(form, "conv", shape[1], kernel, groups, _fitted(s, shape[1]), norm=norm)


def _ways(site: Site, *, wrap: bool = True) -> Iterator[Site]:
    """The same layer, where possible in the container itself, otherwise around its neighbour."""
    yield site
    twin = site.layer.twin
    # Around its neighbour a twin would have the neighbour's number, or its entry in a cache.
    numbered = site.place is not None and (site.place.indices or (twin is not None and twin.remembers))
    if wrap and (site.chained or site.place is not None) and not numbered:
        yield replace(site, chained=False, place=None)


def behind_batch_norm(node: Any) -> bool:
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
