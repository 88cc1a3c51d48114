"""A twin: a copy of a block that is an identity because some of its parameters are zero.

Which parameters must be zero is found by trying (`finding`); here is the plan that comes of it, and the module it builds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError, UnsupportedSite, unknown_choice
from sensli.modules import random_state
from sensli.modules.copies import copied_block, is_large
from sensli.modules.engines.distributed import readable_part, running_part
from sensli.modules.running import (
    HALF,
    Slot,
    first_tensor,
    nothing_like,
    undraw_hooks,
    upcast,
    value_at,
    with_value,
    without_memory,
)
from sensli.modules.wrappers import compile_like, is_sharded
from sensli.moves.factors import Outer, Use, watch_uses
from sensli.moves.inserting import Inserts, apply_cut, example_parameter, plan_cut, take_out
from sensli.moves.point import Point
from sensli.moves.roles import LAYERS, Geometry, role_of
from sensli.moves.sites import Cost, Gauge

if TYPE_CHECKING:
    from sensli.moves.sites import Site

# ---- The gradient of a twin that is not there: one vector-Jacobian product through a copy of the block, fed what was
# caught at its place.


class _TwinGauge(Gauge):
    """A twin for measuring: it shares the parameters of its block, except those that are zero in it."""

    factors: ClassVar[bool] = True

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(shape=(1, *point.shape))
        self._point, self._block, self._measured = point, block, measured
        self._take(module)
        self.entries = sum(weight.numel() for weight in self._maps)
        # where maps were used in the pass that comes back, with the cotangents
        self._met: list[tuple[int, Use, Tensor]] = []

    def _take(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        self._module, self._maps = module, [named[name] for name in self._measured]

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        """Those of the single maps."""
        names = (f"gradient{index}" for index in range(len(self._measured)))
        return [(sums[name], Geometry()) for name in names if name in sums]

    def _watch(self, output: Tensor, *, aside: bool) -> None:
        """Have the cotangents at all maps arrive with the backward pass from the twin's output; ``aside``: in one of its own."""
        numbers = {id(weight): index for index, weight in enumerate(self._maps)}

        def arrived(key: int, use: Use, cotangent: Tensor) -> Tensor:
            if aside or self.counts():
                self._met.append((numbers[key], use, cotangent.detach()))
            return cotangent if aside else self.marked(cotangent)

        watch_uses([output.grad_fn], {id(weight): weight for weight in self._maps}, arrived)

    def _plain_sums(self, gradients: Sequence[Tensor | None]) -> dict[str, Tensor | Outer]:
        return {f"gradient{index}": gradient for index, gradient in enumerate(gradients) if gradient is not None}

    def _natural_sums(self, gradients: Sequence[Tensor | None], samples: int) -> dict[str, Tensor | Outer]:
        met, self._met = self._met, []
        sums: dict[str, Any] = {}
        for index, use, cotangent in met:
            gradient = None if f"map{index}" in sums else gradients[index]
            for name, value in use.sums(index, gradient, cotangent, samples).items():
                sums[name] = sums[name] + value if name in sums else value
        if not sums:
            raise MeasurementError(
                f"norm='natural' needs linear maps, convolutions or scales, but what is zero in a copy of the {type(self._block).__name__} "
                "is none of them. Use another norm, for example norm='frobenius'."
            )
        return sums


class VirtualTwin(_TwinGauge):
    """Runs the twin on what was caught, aside from the model."""

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(point, block, module, measured)
        self.points = [(point, block)]
        self._training = block.training

    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, Tensor | Outer]:
        """The gradients of all measured maps. The twin takes the block's other arguments too: a mask, positions."""
        if self._block.training != self._training:
            self._module.train(self._block.training)
            self._training = self._block.training
        if self._maps[0].dtype not in HALF:  # then half precision is autocast's, which is off here
            x, args, kwargs = upcast((x, args, kwargs))
        slot = self._point.slot
        args, kwargs = without_memory(with_value(args, kwargs, slot, None))
        args, kwargs = with_value(args, kwargs, slot, x.clone())  # it may work in place
        # The step that is being measured must not notice: neither its random numbers nor its gradients.
        with random_state.kept(), torch.enable_grad():
            output = first_tensor(self._module(*args, **kwargs))
            if output is None or output.shape != cotangent.shape:
                raise MeasurementError(
                    f"a copy of the {type(self._block).__name__} does not map its output of shape {tuple(x.shape)} to the same shape, as "
                    "it did for find_sites. Find the sites with an example like the training data."
                )
            if self.natural:
                self._watch(output, aside=True)
            gradients = torch.autograd.grad(output, self._maps, cotangent.to(output.dtype), allow_unused=True)
        return self._natural_sums(gradients, len(x)) if self.natural else self._plain_sums(gradients)


class ShardedTwin(VirtualTwin):
    """The same in a sharded model, whose blocks are whole only in their own passes: the twin is there while it runs.

    After its block it comes right before the block's backward pass, so nothing is gathered for it.
    """

    def __init__(self, site: Site, twin: Twin, model: nn.Module, block: nn.Module) -> None:
        super().__init__(site.point, block, block, twin.measured)
        self._twin, self._model = twin, model

    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, Tensor | Outer]:
        with running_part(self._model, self._block, leave=self._point.side == "after") as block:
            self._take(self._twin.build(block, self._model, share=True))
            self._training = self._block.training  # as the twin is, being new
            try:
                return super().caught(index, x, cotangent, args, kwargs)
            finally:
                self._module, self._maps = self._block, []


class AddedTwin(_TwinGauge):
    """A twin that gives zero, for a list whose loop adds what its blocks give: ``x = x + f(block(x))``.

    What the loop does between its blocks is in no module, so the twin is put into the list while the hooks are set. It changes nothing
    but the time that a pass takes: what it gives is zero, and the random numbers that it draws are given back.
    """

    enters: ClassVar[bool] = True

    def __init__(self, point: Point, block: nn.Module, module: nn.Module, measured: Sequence[str]) -> None:
        super().__init__(point, block, module, measured)
        for weight in self._maps:
            weight.requires_grad_()
        self.weights = self._maps

    def hooks(
        self, add: Callable[[Mapping[str, Tensor | Outer]], None], unscaled: Callable[[Tensor], Tensor]
    ) -> list[Any]:
        """Hand on the gradients of all measured maps, one by one.

        The sums of a natural merit are handed on map by map, when a gradient arrives: that is after the cotangents of all uses of the map.
        """
        self._module.train(self._block.training)
        samples: list[int] = []

        def ran(module: nn.Module, args: Any, output: Any) -> None:
            value = first_tensor(output)
            if value is not None and value.grad_fn is not None:
                samples[:] = [len(value)]
                self._watch(value, aside=False)

        def hook(index: int) -> Callable[[Tensor], Tensor | None]:
            def arrived(gradient: Tensor) -> Tensor | None:
                if not self.counts():
                    return None
                gradients: list[Tensor | None] = [None] * len(self._maps)
                gradients[index] = unscaled(gradient.detach())
                if not self.natural:
                    add(self._plain_sums(gradients))
                    return nothing_like(gradient)
                mine = [(number, use, unscaled(g)) for number, use, g in self._met if number == index]
                others, self._met = [each for each in self._met if each[0] != index], mine
                add(self._natural_sums(gradients, samples[0]))
                self._met = others
                return nothing_like(gradient)

            return arrived

        handles = [*undraw_hooks(self._module), *(w.register_hook(hook(index)) for index, w in enumerate(self._maps))]
        if self.natural:
            handles.append(self._module.register_forward_hook(ran))
        return handles

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """The twin is in its list as long as the context lasts."""
        found = self._point.anchor.find(model)
        assert found is not None
        cut = plan_cut(model, self._point, found[0], takes_call=True)
        apply_cut(model, cut, self._module)
        try:
            yield
        finally:
            take_out(model, cut.path, cut.place)
            for weight in self._maps:
                weight.grad = None


INITS = ("copy", "fresh")
LASTS = ("zero", "uniform", "normal", "trained")  # what is zero in a twin, or its last norm, may be drawn or trained
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
    _needed = ("replaced",)

    block: str  # class of the block, for people
    zeroed: tuple[str, ...]  # parameters
    replaced: tuple[str, ...] = ()  # modules that an identity replaces: a norm on the main path, a trailing activation
    init: str = "copy"
    parameters: int = 0
    flops: int = 0  # of one forward pass, per sample
    # The block is called with an object that it changes, such as a cache; a trial call goes without.
    remembers: bool = False
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
        if is_sharded(model):
            self._check_zeroed(dict(anchor.named_parameters()))
            return ShardedTwin(site, self, model, anchor)
        module = self.build(anchor, model, share=True)
        if self.null:
            return AddedTwin(site.point, anchor, module, self.measured)
        weights = [name for name in self.zeroed if name.endswith(".weight")] if self.last == "zero" else []
        for part in (module.get_submodule(name.rpartition(".")[0]) for name in weights):
            if isinstance(part, LAYERS) and role_of(part) is not None and not part._forward_hooks:
                # Nothing comes back through zeros: the backward pass need not go on from there.
                part.register_forward_pre_hook(lambda _, *given: without_memory(given), with_kwargs=True)
        return VirtualTwin(site.point, anchor, module, self.measured)

    def module_at(self, model: nn.Module, site: Site, anchor: nn.Module) -> nn.Module:
        example_parameter(model, [*(module for _, module in site.point.around(model)), anchor])
        twin = self.build(readable_part(model, anchor), model)
        compile_like(twin, anchor)
        return twin

    def stand_in(self, model: nn.Module, site: Site, anchor: nn.Module, *, real: bool) -> nn.Module:
        return self.build(anchor, model, share=True) if real else _StandIn(self, site.point.slot, anchor)

    def relatives(self, anchor: nn.Module) -> dict[str, nn.Parameter]:
        return dict(anchor.named_parameters())  # the one that it is a copy of

    def outline(self, anchor: nn.Module) -> dict[str, tuple[int, ...]]:
        gone = tuple(f"{path}." for path in self.replaced)
        return {name: tuple(p.shape) for name, p in anchor.named_parameters() if not name.startswith(gone)}

    def check(self, point: Point) -> None:
        """Any shape will do: the block says what it takes."""
        if self.last not in LASTS:
            raise ValueError(unknown_choice("last", self.last, LASTS))

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
            raise ValueError(unknown_choice("init", self.init, INITS))
        named = dict(twin.named_parameters())
        self._check_zeroed(named)
        for name, value in self._last(twin, named, share).items():
            _put(twin, named[name], value)
        if not share:
            for parameter in twin.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.requires_grad_(True)
        return twin

    def _check_zeroed(self, named: Mapping[str, nn.Parameter]) -> None:
        gone = next((name for name in self.zeroed if name not in named), None)
        if gone is not None:
            raise UnsupportedSite(
                f"the {self.block} has no parameter {gone!r} any more, which would have to be zero in a copy of it: it has grown or was "
                "changed since find_sites saw it. Call find_sites again."
            )

    def _last(self, twin: nn.Module, named: dict[str, nn.Parameter], share: bool) -> dict[str, Tensor]:
        """What the zeroed parameters begin with; drawn and trained ones are those of norms alone."""
        if self.last == "zero":
            return {name: _zeros(named[name], light=share) for name in self.zeroed}
        if self.last == "trained":
            return {name: value.clone().to(named[name]) for name, value in self._values}
        generator = torch.Generator().manual_seed(self.seed)
        draw = torch.randn if self.last == "normal" else torch.rand
        norms = self.last_norm(twin)
        return {name: draw(named[name].shape, generator=generator).to(named[name]) for name in norms}


class _StandIn(nn.Module):
    """What a twin does as long as it is an identity, at hardly any cost; it takes what the block takes."""

    def __init__(self, twin: Twin, slot: Slot, anchor: nn.Module) -> None:
        super().__init__()
        self._twin, self._slot = twin, slot
        for name, value in vars(anchor).items():  # the model may ask a block of which kind it is
            if isinstance(value, (str, int)) and name not in self.__dict__:
                self.__dict__[name] = value

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = value_at(args, kwargs, self._slot)
        return value * 0 if self._twin.null else value.clone()


def _freshen(twin: nn.Module) -> None:
    """New matrices with the spread of the old ones, the same at every place so that merits compare; norms and biases stay."""
    # A separate generator: building a layer leaves the global random state alone.
    generator = torch.Generator().manual_seed(0)
    for parameter in list(twin.parameters()):
        if parameter.ndim >= 2 and parameter.is_floating_point():
            spread = parameter.detach().float().std().cpu()
            drawn = torch.randn(parameter.shape, generator=generator, device="cpu") * spread
            _put(twin, parameter, drawn.to(parameter.device, parameter.dtype))


def _reset(twin: nn.Module, seed: int) -> None:
    """Let all modules initialise themselves as when they were made; parameters of a module that cannot stay copies."""
    with random_state.kept():
        random_state.seed_torch(seed)
        for module in reversed(list(twin.modules())):  # a module after its parts, which it may set itself
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()


def _zeros(like: Tensor, *, light: bool) -> Tensor:
    """Zeros like a parameter; ``light``: a large matrix is one number in memory, as long as nobody writes to it."""
    light = light and like.dim() == 2 and is_large(like)
    return like.new_zeros(()).expand(like.shape) if light else torch.zeros_like(like)


def _put(module: nn.Module, old: nn.Parameter, value: Tensor) -> None:
    """Another parameter in the place of an old one, wherever the module holds it; the old one may be shared and stays as it is."""
    new = nn.Parameter(value)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new
