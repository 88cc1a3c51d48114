"""The modules that are inserted where torch has none of the kind, and torch's own without their default values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

# The same modules without their default initialisation.
_UNDRAWN = {
    kind: type(kind.__name__, (kind,), {"reset_parameters": lambda self: None}) for kind in (nn.Linear, *CONVS.values())
}


def undrawn(kind: type[nn.Module], *arguments: Any, **options: Any) -> nn.Module:
    """A module with empty parameters: their default initialisation would move the global random state."""
    module: nn.Module = _UNDRAWN[kind](*arguments, **options)
    module.__class__ = kind
    return module


class ResidualLayer(nn.Module):
    """``x + W2 s(W1 x + b)``: an identity as long as ``W2 = 0``."""

    def __init__(
        self, first: nn.Module, activation: nn.Module, second: nn.Module, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.first = first
        self.norm = norm
        self.activation = activation
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        if self.norm is not None:
            z = self.norm(z)
        update: Tensor = self.second(self.activation(z))
        return x + update


class ParametricLayer(nn.Module):
    """``(1 - a) z + a s(z)`` with ``z = W x + b``: linear at ``a = 0``, the network's own activation at ``a = 1``."""

    def __init__(self, kind: str, weight: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.begins_with = kind  # what comes before that module comes before the whole layer
        self.add_module(kind, weight)
        self.activation = activation
        self.a = nn.Parameter(torch.zeros((), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.get_submodule(self.begins_with)(x)
        bent: Tensor = self.activation(z)
        # z + a (s(z) - z) rather than the two products: at a = 0 it is z to the last bit.
        return z + self.a * (bent - z)
