"""What is around a place in the data flow: its neighbours, the activation it comes from, who else works on its values."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from itertools import chain

from torch import nn

from sensli.moves.trace.activations import CONVOLUTIONS, Activation, functional
from sensli.moves.trace.flow import Call, Flow, Seen
from sensli.moves.trace.graph import nearest_parameters, operation, origin
from sensli.moves.trace.stacks import Paths, Stack, ancestors, is_list, parent_of

LAYERS = (nn.Linear, *CONVOLUTIONS)


class Surroundings:
    """The run of an example, and the blocks in it that are units of their own."""

    def __init__(self, flow: Flow, stacks: list[Stack]) -> None:
        self.flow = flow
        self.blocks = Paths(block.path for stack in stacks for block in stack.blocks)
        # What is among blocks is a block too, if not an equal one: a stage begins with one that changes the size.
        for stack in stacks:
            container = flow.model.get_submodule(stack.container)
            if stack.residual and stack.container and (isinstance(container, nn.Sequential) or is_list(container)):
                for name, child in container.named_children():
                    path = f"{stack.container}.{name}"
                    if len(list(child.children())) > 1 and not self.blocks.below(path):
                        self.blocks.add(path)
        self._names = Counter(id(module) for _, module in flow.model.named_modules(remove_duplicate=False))
        owners = [call.began for call in flow.calls if any(True for _ in call.module.parameters(recurse=False))]
        self._last_weights = max(owners, default=-1)
        # Memory that a module with ``inplace=True`` gets, and when it last does.
        self._written: dict[int, int] = {}
        for call in flow.calls:
            if getattr(call.module, "inplace", False) is True:
                self._written.update({_memory(given): call.began for given in call.inputs})

    def in_block(self, path: str) -> bool:
        return self.blocks.around(path)

    def has_other_names(self, call: Call) -> bool:
        return self._names[id(call.module)] > 1

    def in_encoder_layer(self, path: str) -> bool:
        return any(isinstance(self.flow.model.get_submodule(p), nn.TransformerEncoderLayer) for p in ancestors(path))

    def weights_follow(self, call: Call) -> bool:
        return self._last_weights > call.ended

    def chained(self, path: str) -> bool:
        """Whether the anchor's container is an nn.Sequential that passes the data through its children itself."""
        parent = self.flow.model.get_submodule(path.rpartition(".")[0])
        own_forward = isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
        return path != "" and own_forward and len(self.flow.calls_of(path.rpartition(".")[0])) == 1

    def neighbours(self, call: Call, seen: Seen) -> list[str]:
        """Paths of the modules that own the nearest parameters: those the values come from, else the anchor's own."""
        near = nearest_parameters(self.flow.parameter_names, seen.node)
        own = (name for name, _ in call.module.named_parameters(prefix=call.path))
        owners: list[str] = []
        for name in chain(near, own):
            if len(owners) == 4:
                break
            if parent_of(name) not in owners:
                owners.append(parent_of(name))
        return owners

    def overwritten_in_training(self, seen: Seen, since: int) -> bool:
        """Whether a module that rests in eval mode (a dropout with ``inplace=True``) will work in place on these values."""
        return self._written.get(_memory(seen), -1) > since

    def activation_in(self, call: Call) -> Activation | None:
        """The first activation inside a block, module or functional: what the block's author would use."""
        for module in call.module.modules():
            known = Activation.of(module)
            if known is not None:
                return known
        first = bisect(self.flow.calls, call.began, key=lambda other: other.began)
        for inner in self.flow.calls[first:]:
            if inner.began > call.ended:
                break
            if isinstance(inner.module, LAYERS) and inner.inputs:
                known = functional(origin(inner.inputs[0].node))
                if known is not None:
                    return known
        return None


def _memory(seen: Seen) -> int:
    return seen.tensor.untyped_storage().data_ptr()


def never_negative(seen: Seen) -> bool:
    """Whether it is proven that values are never below zero: they come from a ReLU. Only they tell what a padding was filled with."""
    source = origin(seen.node) if seen.node is not None else None
    return source is not None and operation(source) == "Relu" and not seen.negative
