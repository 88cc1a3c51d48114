"""The activations that can be told from others, as modules and as nodes of the autograd graph, and the layers with weights around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from sensli.moves.trace.graph import operation

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# Elementwise activations of torch and the constructor arguments that shape them (a copy must be the same function).
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "ReLU": (),
    "ReLU6": (),
    "LeakyReLU": ("negative_slope",),
    "ELU": ("alpha",),
    "CELU": ("alpha",),
    "SELU": (),
    "GELU": ("approximate",),
    "SiLU": (),
    "Mish": (),
    "Tanh": (),
    "Sigmoid": (),
    "LogSigmoid": (),
    "Softplus": ("beta", "threshold"),
    "Softsign": (),
    "Softshrink": ("lambd",),
    "Hardshrink": ("lambd",),
    "Tanhshrink": (),
    "Hardtanh": ("min_val", "max_val"),
    "Hardsigmoid": (),
    "Hardswish": (),
    "Threshold": ("threshold", "value"),
    "RReLU": ("lower", "upper"),
    "PReLU": ("num_parameters",),
}


@dataclass(frozen=True)
class Activation:
    """An elementwise activation by name and arguments, so that it can be written to JSON and built again."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Activation | None:
        """The activation that a module is, or None if it is not one we know."""
        name = type(module).__name__
        if type(module) is not getattr(nn, name, None) or name not in ACTIVATIONS:
            return None
        return cls(name, tuple((key, getattr(module, key)) for key in ACTIVATIONS[name]))

    def build(self) -> nn.Module:
        """A fresh module; never in place, because the residual form still needs its input."""
        module: nn.Module = getattr(nn, self.name)(**dict(self.arguments))
        return module


TANH = Activation("Tanh")
RELU = Activation("ReLU")


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
