"""A twin: a copy of a block that is an identity because some of its parameters are zero.

Which parameters must be zero is found by trying (`zeroing`); here is the plan that comes of it, and the module it builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedSite, one_of
from sensli.modules import random_state
from sensli.modules.arguments import Slot, value_at
from sensli.modules.copies import copied_block
from sensli.modules.engines.fsdp import readable_part
from sensli.moves.inserting import Inserts, example_parameter
from sensli.moves.move import Cost, Gauge
from sensli.moves.point import Point
from sensli.moves.twin.gauges import AddedTwin, VirtualTwin

if TYPE_CHECKING:
    from sensli.moves.sites import Site

INITS = ("copy", "fresh")
LASTS = (
    "zero",
    "uniform",
    "normal",
    "trained",
)  # what is zero in a twin, or its last norm, may also be drawn or trained
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


class Bypass(nn.Identity):
    """Stands in a twin where the copied block has a module on its main path; no configuration of the model tells of it."""


@dataclass(frozen=True)
class Twin(Inserts):
    """A copy of a block, and what makes it an identity. Names are within the block; plain data, so it goes to JSON."""

    tag: ClassVar[str] = "twin"
    form: ClassVar[str] = "twin"
    kind: ClassVar[str] = "block"
    takes_call: ClassVar[bool] = True

    block: str  # class of the block, for people
    zeroed: tuple[str, ...]  # parameters
    # modules that an identity replaces: a norm on the main path, a trailing activation
    replaced: tuple[str, ...] = ()
    init: str = "copy"
    parameters: int = 0
    flops: int = 0  # of one forward pass, per sample
    remembers: bool = (
        False  # the block is called with an object that it changes, such as a cache; a trial call goes without
    )
    null: bool = False  # it gives zero instead of its input: the loop around the blocks adds what they give
    last: str = "zero"  # how what is zeroed begins; otherwise than by zero the function is not kept
    seed: int = 0  # of what is drawn
    # Of a last norm that was trained, by name. Values are in a state dict, not in JSON: without them it is as it initialises itself.
    _values: tuple[tuple[str, Tensor], ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        return f"Twin({self.block})" if self.last == "zero" else f"New({self.block}, {self.last} last norm)"

    def new_block(self, block: nn.Module, last: str, seed: int) -> Twin:
        """A block of this kind as its modules initialise themselves, but for its last norm, as AutoGrow adds it.

        With ``last="zero"`` it is an identity as the twin is. Otherwise nothing is left out of it, and its last norm is drawn, or has the
        values of `trained`.
        """
        if last == "zero":
            return replace(self, init="default", seed=seed)
        parameters = sum(parameter.numel() for parameter in block.parameters())
        return replace(self, init="default", seed=seed, last=last, replaced=(), parameters=parameters)

    def trained(self, values: Mapping[str, Tensor]) -> Twin:
        """The same with these values of its last norm, by the names of `last_norm`."""
        return replace(self, _values=tuple(values.items()))

    def last_norm(self, block: nn.Module) -> list[str]:
        """The names of the parameters of a block's last norm; none if it ends with something else."""
        return [name for name in self.zeroed if isinstance(block.get_submodule(name.rpartition(".")[0]), _NORMS)]

    def cost(self, point: Point) -> Cost:
        return Cost(self.parameters, self.flops, 1)

    @property
    def caught_at_site(self) -> bool:
        return not self.null

    def gives(self, value: Tensor) -> Tensor:
        return torch.zeros_like(value) if self.null else value

    @property
    def family(self) -> object:
        return "Twin", self.null

    def fixed(self, point: Point) -> bool:
        """Around its neighbour a twin would have the neighbour's number, or its entry in a cache."""
        return self.null or (point.place is not None and bool(point.place.indices or self.remembers))

    def gauge(self, site: Site, model: nn.Module) -> Gauge:
        anchor = site.find(model)[1]
        module = self.build(anchor, model, share=True)
        if self.null:
            return AddedTwin(site.point, anchor, module, self.measured)
        return VirtualTwin(site.point, anchor, module, self.measured)

    def module_at(self, model: nn.Module, site: Site, anchor: nn.Module) -> nn.Module:
        example_parameter(model, [*(module for _, module in site.point.around(model)), anchor])
        whole, source = readable_part(model, anchor)
        return self.build(source, whole)

    def stand_in(self, model: nn.Module, site: Site, anchor: nn.Module, *, real: bool) -> nn.Module:
        return self.build(anchor, model, share=True) if real else _StandIn(self, site.point.slot)

    def relatives(self, anchor: nn.Module) -> dict[str, nn.Parameter]:
        return dict(anchor.named_parameters())  # the one that it is a copy of

    def outline(self, anchor: nn.Module) -> dict[str, tuple[int, ...]]:
        gone = tuple(f"{path}." for path in self.replaced)
        return {name: tuple(p.shape) for name, p in anchor.named_parameters() if not name.startswith(gone)}

    def check(self, point: Point) -> None:
        """Any shape will do: the block says what it takes."""
        if self.last not in LASTS:
            raise ValueError(one_of("last", self.last, LASTS))

    @property
    def measured(self) -> tuple[str, ...]:
        """The zeroed maps, whose gradient is the merit; biases are left out as everywhere."""
        maps = tuple(name for name in self.zeroed if not name.endswith("bias"))
        return maps or self.zeroed

    def build(self, source: nn.Module, outside: nn.Module | None = None, *, share: bool = False) -> nn.Module:
        """The module, from the block as it is now.

        ``share``: all but the zeroed parameters are the block's own (or, with ``init="fresh"``, drawn): for measuring only.
        """
        twin = copied_block(source, outside, share=share and self.init != "default")
        for path in self.replaced:
            parent, _, key = path.rpartition(".")
            twin.get_submodule(parent)._modules[key] = Bypass()
        if self.init == "fresh":
            _freshen(twin)
        elif self.init == "default":
            _reset(twin, self.seed)
        elif self.init != "copy":
            raise ValueError(one_of("init", self.init, INITS))
        named = dict(twin.named_parameters())
        gone = next((name for name in self.zeroed if name not in named), None)
        if gone is not None:
            raise UnsupportedSite(
                f"the {self.block} has no parameter {gone!r} any more, which would have to be zero in a copy of it: it has grown or was "
                "changed since find_sites saw it. Call find_sites again."
            )
        for name, value in self._last(twin, named).items():
            _put(twin, named[name], value)
        if not share:
            for parameter in twin.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.requires_grad_(True)
        return twin

    def _last(self, twin: nn.Module, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """What the zeroed parameters begin with; drawn and trained ones are those of norms alone."""
        if self.last == "zero":
            return {name: torch.zeros_like(named[name]) for name in self.zeroed}
        if self.last == "trained":
            return {name: value.clone().to(named[name]) for name, value in self._values}
        generator = torch.Generator().manual_seed(self.seed)
        draw = torch.randn if self.last == "normal" else torch.rand
        norms = self.last_norm(twin)
        return {name: draw(named[name].shape, generator=generator).to(named[name]) for name in norms}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("_")}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Twin:
        """The inverse of `to_dict`."""
        return cls(**{**data, "zeroed": tuple(data["zeroed"]), "replaced": tuple(data["replaced"])})


class _StandIn(nn.Module):
    """What a twin does as long as it is an identity, at hardly any cost; it takes what the block takes."""

    def __init__(self, twin: Twin, slot: Slot) -> None:
        super().__init__()
        self._twin, self._slot = twin, slot

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = value_at(args, kwargs, self._slot)
        return value * 0 if self._twin.null else value.clone()


def _freshen(twin: nn.Module) -> None:
    """New matrices with the spread of the old ones, the same at every place so that merits compare; norms and biases stay."""
    generator = torch.Generator().manual_seed(
        0
    )  # a separate one: building a layer leaves the global random state alone
    for parameter in list(twin.parameters()):
        if parameter.ndim >= 2 and parameter.is_floating_point():
            drawn = (
                torch.randn(parameter.shape, generator=generator, device="cpu") * parameter.detach().float().std().cpu()
            )
            _put(twin, parameter, drawn.to(parameter.device, parameter.dtype))


def _reset(twin: nn.Module, seed: int) -> None:
    """Let all modules initialise themselves as when they were made; parameters of a module that cannot stay copies."""
    with random_state.kept():
        random_state.seed_torch(seed)
        for module in reversed(list(twin.modules())):  # a module after its parts, which it may set itself
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()


def _put(module: nn.Module, old: nn.Parameter, value: Tensor) -> None:
    """Another parameter in the place of an old one, wherever the module holds it; the old one may be shared and stays as it is."""
    new = nn.Parameter(value)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new
