"""A stand-in for a module whose container does not run its children itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from sensli.modules.arguments import Slot, first_tensor, value_at, with_first, with_value
from sensli.modules.marks import ALL

_OWN = frozenset({"slot", "takes_call", "training", *ALL})  # of the chain itself; torch's own start with an underscore


class Chain(nn.Module):
    """Takes the place of a module and runs it, with the inserted layers before or after it; other attributes are the module's.

    A layer takes the value alone (the argument in ``slot``, or the output or its first part); a block takes the other arguments too.
    """

    def __init__(self, anchor: nn.Module, slot: Slot = 0) -> None:
        super().__init__()
        self.add_module("anchor", anchor)
        self.slot = slot
        self.takes_call: set[str] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        after = False
        value: Any = None
        for name, part in self._modules.items():
            assert part is not None
            if name == "anchor":
                value, after = part(*args, **kwargs), True
                continue
            given = first_tensor(value) if after else value_at(args, kwargs, self.slot)
            if name in self.takes_call:
                own, named = with_value(args, kwargs, self.slot, given)
                output = part(*own, **named)
            else:
                output = with_first(value, part(given)) if after else part(given)
            if after:
                value = output
            else:
                args, kwargs = with_value(args, kwargs, self.slot, first_tensor(output))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """What belongs to the module is set there: a temperature that is annealed from outside must reach it."""
        anchor = self.__dict__.get("_modules", {}).get("anchor")
        private = (
            anchor is not None and name.startswith("_") and name not in vars(anchor)
        )  # torch's own, set on any module
        if anchor is None or private or name in _OWN or name in self.__dict__ or name in self._modules:
            super().__setattr__(name, value)
        else:
            setattr(anchor, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self._modules:
            super().__delattr__(name)
        else:
            delattr(self._modules["anchor"], name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how the anchor is copied or stored is not how its chain is
                raise
            return getattr(super().__getattr__("anchor"), name)
