"""A twin: a copy of a block that is an identity because some of its parameters are zero.

Which parameters must be zero is found by trying (`zeroing`); here is the plan that comes of it, and the module it builds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedSite, one_of
from sensli.modules.copies import copied_block

INITS = ("copy", "fresh")


class Bypass(nn.Identity):
    """Stands in a twin where the copied block has a module on its main path; no configuration of the model tells of it."""


@dataclass(frozen=True)
class Twin:
    """What turns a copy of a block into an identity. Names are within the block; plain data, so it goes to JSON."""

    block: str  # class of the block, for people
    zeroed: tuple[str, ...]  # parameters
    replaced: tuple[
        str, ...
    ] = ()  # modules that an identity stands for: a norm on the main path, a trailing activation
    init: str = "copy"
    parameters: int = 0
    flops: int = 0  # of one forward pass, per sample
    remembers: bool = (
        False  # the block is called with an object that it changes, such as a cache; a trial call goes without
    )
    null: bool = False  # it gives zero instead of its input: the loop around the blocks adds what they give

    @property
    def measured(self) -> tuple[str, ...]:
        """The zeroed maps, whose gradient is the merit; biases are left out as everywhere."""
        maps = tuple(name for name in self.zeroed if not name.endswith("bias"))
        return maps or self.zeroed

    def build(self, source: nn.Module, outside: nn.Module | None = None, *, share: bool = False) -> nn.Module:
        """The module, from the block as it is now.

        ``share``: all but the zeroed parameters are the block's own (or, with ``init="fresh"``, drawn): for measuring only.
        """
        twin = copied_block(source, outside, share=share)
        for path in self.replaced:
            parent, _, key = path.rpartition(".")
            twin.get_submodule(parent)._modules[key] = Bypass()
        if self.init == "fresh":
            _freshen(twin)
        elif self.init != "copy":
            raise ValueError(one_of("init", self.init, INITS))
        named = dict(twin.named_parameters())
        gone = next((name for name in self.zeroed if name not in named), None)
        if gone is not None:
            raise UnsupportedSite(
                f"the {self.block} has no parameter {gone!r} any more, which would have to be zero in a copy of it: it has grown or was "
                "changed since find_sites saw it. Call find_sites again."
            )
        for name in self.zeroed:
            _put(twin, named[name], torch.zeros_like(named[name]))
        if not share:
            for parameter in twin.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.requires_grad_(True)
        return twin

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Twin:
        """The inverse of `to_dict`."""
        return cls(**{**data, "zeroed": tuple(data["zeroed"]), "replaced": tuple(data["replaced"])})


def _freshen(twin: nn.Module) -> None:
    """New matrices with the spread of the old ones, the same at every place so that merits compare; norms and biases stay."""
    generator = torch.Generator().manual_seed(0)  # of its own: building a layer leaves the global random state alone
    for parameter in list(twin.parameters()):
        if parameter.ndim >= 2 and parameter.is_floating_point():
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.detach().float().std().cpu()
            _put(twin, parameter, drawn.to(parameter.device, parameter.dtype))


def _put(module: nn.Module, old: nn.Parameter, value: Tensor) -> None:
    """Another parameter in the place of an old one, wherever the module holds it; the old one may be shared and stays as it is."""
    new = nn.Parameter(value)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new
