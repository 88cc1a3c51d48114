"""The layers of a search: at activations, between blocks, and, where a model has neither, after its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

from torch import nn

from sensli.modules.chain import Chain
from sensli.moves.layer.forms import Layer
from sensli.moves.layer.modules import ParametricLayer
from sensli.moves.layer.placing import Placing
from sensli.moves.search import Refused, Search
from sensli.moves.sites import Site
from sensli.moves.trace.activations import Activation, functional
from sensli.moves.trace.flow import Call, Seen
from sensli.moves.trace.graph import nearest_parameters, origin
from sensli.moves.trace.surroundings import LAYERS, never_negative


class LayerKind:
    """Identity layers: ReLU, residual and parametric ones."""

    move: ClassVar[type[Layer]] = Layer
    grows: ClassVar[str] = "layers"

    def propose(self, search: Search) -> None:
        if search.request.layer != "twin":
            _Visit(search).all()

    def at(self, search: Search, call: Call, side: str, seen: Seen) -> Iterator[Site]:
        if search.request.layer != "twin":
            yield from Placing(search).sites(call, side, seen, block=True, form="residual")

    def otherwise(self, search: Search) -> None:
        if search.request.layer not in ("relu", "twin"):
            _Visit(search).layers()


class _Visit:
    """Points of the data flow in this order, each at most once: the outputs of activation modules outside of blocks, the boundaries of
    stacks of blocks, the inputs of layers that come from a functional activation."""

    def __init__(self, search: Search) -> None:
        self.search, self.flow, self.around = search, search.flow, search.around
        self.placing = Placing(search)
        self._makers: dict[Any, Call] = {}  # which module gave the values of a graph node, the innermost
        for call in search.flow.calls:
            if call.output is not None and call.output.node is not None:
                self._makers[call.output.node] = call

    def all(self) -> None:
        self._activations()
        for stack in self.search.stacks:
            if not stack.added:
                for block, side, seen in stack.boundaries():
                    if seen.node not in self.search.taken:
                        self.search.offer(block, side, seen, self.placing.sites(block, side, seen, block=True))
        self._functional_activations()

    def _activations(self) -> None:
        for path, module in self.flow.model.named_modules():
            # A parametric layer is an activation as a whole: its bend alone is only a part of what it gives.
            known = Activation.of(module.activation if isinstance(module, ParametricLayer) else module)
            if path.endswith(".activation") and isinstance(
                self.flow.model.get_submodule(path.rpartition(".")[0]), ParametricLayer
            ):
                continue
            if known is None and not _could_be_activation(module, self.flow.calls_of(path)):
                continue
            if self.around.in_block(path):
                continue
            calls = self.flow.calls_of(path)
            if len(calls) != 1:
                times = f"is called {len(calls)} times in one forward pass" if calls else "is not called by the example"
                self.search.skipped[path] = f"{times}, so a layer there would not be in a single place"
                continue
            call = calls[0]
            if self.around.has_other_names(call):
                self.search.skipped[path] = (
                    "has several names in the model, so a layer there would not be in a single place"
                )
            elif call.output is None:
                self.search.skipped[path] = f"returns {call.returned}, not a tensor"
            elif not self.around.weights_follow(call):
                self.search.skipped[path] = "comes after the last layer with weights: its output is the model's output"
            elif call.output.node is not None and not self._has_parameters(call.output.node):
                self.search.skipped[path] = "comes before the first layer with weights: its output is the model's input"
            elif call.output.node not in self.search.taken:
                self.search.offer(call, "after", call.output, self.placing.sites(call, "after", call.output, known))

    def _has_parameters(self, node: Any) -> bool:
        return any(True for _ in nearest_parameters(self.flow.parameter_names, node))

    def _functional_activations(self) -> None:
        for call in self.flow.calls:
            if not isinstance(call.module, LAYERS) or not call.inputs or self.around.in_block(call.path):
                continue
            source = origin(call.inputs[0].node)
            activation = functional(source)
            if activation is None or source in self.search.taken:
                continue
            if len(self.flow.calls_of(call.path)) != 1 or self.around.has_other_names(call):
                self.search.skipped[call.path] = (
                    "is used several times in one forward pass, so a layer before it would not be in a single place"
                )
                continue
            maker = self._maker_before(source, call)
            if maker is not None and self._is_taken(maker, activation, source):
                continue
            sites = self.placing.sites(call, "before", call.inputs[0], activation)
            if maker is not None:
                sites = _first_that_goes(self.placing.before_activation(maker, activation, source), sites)
            elif (other := self._nameless_before(call)) is not None and other.output is not None:
                sites = _first_that_goes(self.placing.sites(other, "after", other.output, activation), sites)
            self.search.offer(call, "before", call.inputs[0], sites)

    def _is_taken(self, maker: Call, activation: Activation, source: Any) -> bool:
        """Whether a layer goes there already, because the module is an activation too: one place is one site."""
        assert maker.output is not None
        after = self.placing.leads(activation, source) and not never_negative(maker.output)
        return maker.output.node in self.search.taken and not after

    def _maker_before(self, source: Any, call: Call) -> Call | None:
        """The module whose map goes into a functional activation and is then flattened: the layer belongs to the map, not to its pixels."""
        map_dims, dims = len(source._input_metadata[0].shape), call.inputs[0].tensor.dim()
        maker = self._makers.get(source.next_functions[0][0]) if map_dims > 2 and dims < map_dims else None
        if maker is None or len(self.flow.calls_of(maker.path)) != 1 or self.around.has_other_names(maker):
            return None
        return None if self.around.in_block(maker.path) else maker

    def _nameless_before(self, call: Call) -> Call | None:
        """A module without parameters that gives its values to this layer alone, where a layer goes in and no name changes."""
        parent = self.flow.model.get_submodule(call.path.rpartition(".")[0])
        if self.around.chained(call.path) or isinstance(parent, Chain):
            return None  # nothing is renamed there either
        node = call.inputs[0].node
        other = self._makers.get(node)
        if other is None or not other.path or other.output is None or other.output.tensor is not call.inputs[0].tensor:
            return None
        if any(True for _ in other.module.parameters()) or self.around.in_block(other.path):
            return None
        if len(self.flow.calls_of(other.path)) != 1 or self.around.has_other_names(other):
            return None
        readers = sum(source is node for each in self.flow.nodes for source, _ in each.next_functions)
        return other if readers == 1 else None

    def layers(self) -> None:
        looked_into = any(
            stack.added for stack in self.search.stacks
        )  # next, as nothing was found between those blocks
        for call in self.flow.calls:
            plain = isinstance(call.module, LAYERS) and not self.around.in_block(call.path)
            once = len(self.flow.calls_of(call.path)) == 1
            if plain and once and call.output is not None and self.around.weights_follow(call):
                self.search.offer(call, "after", call.output, self.placing.sites(call, "after", call.output))
            elif plain and once and not self.around.weights_follow(call) and not looked_into:
                why, known = self._why_last(call), self.search.skipped.get(call.path)
                self.search.skipped[call.path] = why if known is None else f"{known}; no layer, because it {why}"

    def _why_last(self, call: Call) -> str:
        if any(self._has_parameters(given.node) for given in call.inputs):
            return (
                "is the last layer with weights: its output is the model's output, and before it there is no activation, linear layer or "
                "convolution that a layer could go after"
            )
        return "is the only layer with weights: its input is the model's input, and its output the model's output"


def _first_that_goes(one: Iterator[Site], other: Iterator[Site]) -> Iterator[Site]:
    with suppress(Refused):
        yield from one
    yield from other


def _could_be_activation(module: nn.Module, calls: list[Call]) -> bool:
    """A parameterless leaf of the user's own that changes values and keeps the shape: treated as an activation."""
    if (
        any(True for _ in module.children())
        or any(True for _ in module.parameters())
        or type(module).__module__.startswith("torch.")
    ):
        return False
    if len(calls) != 1 or calls[0].output is None or len(calls[0].inputs) != 1:
        return False
    given, output = calls[0].inputs[0], calls[0].output
    return (
        output.tensor.is_floating_point()
        and output.tensor.shape == given.tensor.shape
        and output.node is not given.node
    )
