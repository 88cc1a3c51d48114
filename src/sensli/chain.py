"""A stand-in for a module whose container does not run its children itself."""

from __future__ import annotations

from typing import Any

from torch import nn


class Chain(nn.Module):
    """Stands where a module stood and runs it, with the inserted layers before or behind it; other attributes are the module's."""

    def __init__(self, anchor: nn.Module) -> None:
        super().__init__()
        self.add_module("anchor", anchor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        behind = False
        value: Any = None
        for name, part in self._modules.items():
            assert part is not None
            if name == "anchor":
                value, behind = part(*args, **kwargs), True
            elif behind:
                value = part(value)
            else:
                args = (part(args[0]), *args[1:])
        return value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how the anchor is copied or stored is not how its chain is
                raise
            return getattr(super().__getattr__("anchor"), name)
