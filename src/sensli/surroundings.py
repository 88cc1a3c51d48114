"""What stands around a place in the data flow: its neighbours, the activation it comes from, who else works on its values."""

from __future__ import annotations

from typing import Any

from torch import nn

from sensli.flow import Call, Flow, Seen
from sensli.graph import nearest_parameters, operation, origin
from sensli.layers import CONVOLUTIONS, Activation
from sensli.stacks import Stack

LAYERS = (nn.Linear, *CONVOLUTIONS)

# Graph nodes of functional activations, and the module that is the same function.
_FUNCTIONAL = {
    "Relu": "ReLU", "Tanh": "Tanh", "Sigmoid": "Sigmoid", "Gelu": "GELU", "Silu": "SiLU", "Mish": "Mish", "Softplus": "Softplus",
    "LeakyRelu": "LeakyReLU", "Elu": "ELU", "Hardswish": "Hardswish", "Hardsigmoid": "Hardsigmoid", "Hardtanh": "Hardtanh",
    "LogSigmoid": "LogSigmoid",
}  # fmt: skip


def functional(node: Any) -> Activation | None:
    """The activation that a graph node is, if it is one."""
    name = operation(node) if node is not None else ""
    return Activation(_FUNCTIONAL[name]) if name in _FUNCTIONAL else None


class Surroundings:
    """The run of an example, and the blocks in it that are units of their own."""

    def __init__(self, flow: Flow, stacks: list[Stack]) -> None:
        self.flow = flow
        self.blocks = [block.path for stack in stacks for block in stack.blocks]
        # What stands among blocks is a block too, if not an equal one: a stage begins with one that changes the size.
        for stack in stacks:
            if stack.residual and stack.container:
                container = flow.model.get_submodule(stack.container)
                if isinstance(container, (nn.Sequential, nn.ModuleList)):
                    blocks = [
                        f"{stack.container}.{n}"
                        for n, child in container.named_children()
                        if len(list(child.children())) > 1
                    ]
                    self.blocks += [path for path in blocks if not any(b.startswith(f"{path}.") for b in self.blocks)]

    def in_block(self, path: str) -> bool:
        return any(path == block or path.startswith(block + ".") for block in self.blocks)

    def has_other_names(self, call: Call) -> bool:
        names = self.flow.model.named_modules(remove_duplicate=False)
        return any(module is call.module and path != call.path for path, module in names)

    def in_encoder_layer(self, path: str) -> bool:
        while path:
            path = path.rpartition(".")[0]
            if isinstance(self.flow.model.get_submodule(path), nn.TransformerEncoderLayer):
                return True
        return False

    def weights_follow(self, call: Call) -> bool:
        return any(
            later.began > call.ended and any(True for _ in later.module.parameters(recurse=False))
            for later in self.flow.calls
        )

    def chained(self, path: str) -> bool:
        """Whether the anchor's container is an nn.Sequential that passes the data through its children itself."""
        parent = self.flow.model.get_submodule(path.rpartition(".")[0])
        own_forward = isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
        return path != "" and own_forward and len(self.flow.calls_of(path.rpartition(".")[0])) == 1

    def neighbours(self, call: Call, seen: Seen) -> list[str]:
        """Paths of the modules that own the nearest parameters: those the values come from, else the anchor's own."""
        owners = [name.rpartition(".")[0] for name in nearest_parameters(self.flow.parameter_names, seen.node)]
        owners += [name.rpartition(".")[0] for name, _ in call.module.named_parameters(prefix=call.path)]
        return list(dict.fromkeys(owners))[:4]

    def overwritten_in_training(self, seen: Seen, since: int) -> bool:
        """Whether a module that rests in eval mode (a dropout with ``inplace=True``) will work in place on these values."""
        memory = seen.tensor.untyped_storage().data_ptr()
        return any(
            call.began > since
            and getattr(call.module, "inplace", False) is True
            and any(given.tensor.untyped_storage().data_ptr() == memory for given in call.inputs)
            for call in self.flow.calls
        )

    def activation_in(self, call: Call) -> Activation | None:
        """The first activation inside a block, module or functional: what the block's author would use."""
        for module in call.module.modules():
            known = Activation.of(module)
            if known is not None:
                return known
        for inner in self.flow.calls:
            if (
                call.began < inner.began
                and inner.ended < call.ended
                and isinstance(inner.module, LAYERS)
                and inner.inputs
            ):
                known = functional(origin(inner.inputs[0].node))
                if known is not None:
                    return known
        return None
