"""The layers that can be inserted: each starts as the identity. What one is worth, where it fits, and how a search finds it."""

from __future__ import annotations

import math
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import unknown_choice
from sensli.modules.grown import CONVS, Chain, ParametricLayer, ResidualLayer, empty_module
from sensli.modules.running import upcast
from sensli.moves.factors import Outer, Windows, of_convolution, of_features, parts_of
from sensli.moves.inserting import Inserts, example_parameter
from sensli.moves.point import Point
from sensli.moves.roles import CONVOLUTIONS, LAYERS, Geometry, convolution_gradient, map_of
from sensli.moves.search import Refused, Search
from sensli.moves.sites import Cost, Gauge, Kind, Site
from sensli.moves.trace.flow import ModuleCall, SeenTensor
from sensli.moves.trace.graph import Channels, channels, is_score, nearest_parameters, operation, origin
from sensli.moves.trace.stacks import ACTIVATIONS, RELU, TANH, Activation, activation_of, never_negative
from sensli.moves.trial import IdentityStandIn
from sensli.text.commands import FORMS

_FEW = 4  # samples


@dataclass(kw_only=True)
class LayerGauge(Gauge):
    """Sums the gradient of the virtual layer's measured weight, and counts the passes in which a unit was alive."""

    factors: ClassVar[bool] = True

    layer: Layer
    anchor: nn.Module
    _bend: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self._bend = self.layer.features().eval()  # a random activation (RReLU) by its mean: no number is drawn

    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, Tensor | Outer]:
        self.shape = tuple(x.shape)
        x = upcast(x)
        if any(True for _ in self._bend.parameters()):
            self._bend.to(x)
        if self.layer.norm:  # statistics of the batch where the model takes them
            next(self._bend.children()).train(self.anchor.training)
        dim = 1 if self.layer.kind == "conv" else x.dim() - 1
        others = [d for d in range(x.dim()) if d != dim]
        alive = self._alive(x, others)
        features, g = self.layer.sides(x, cotangent, self._bend)
        gradient = self.layer.weight_gradient(features, g)
        if not self.natural:
            return {"gradient": gradient, "alive": alive}
        if self.layer.kind == "linear":
            inputs, outputs = of_features(features), of_features(g)
        else:
            inputs, outputs = of_convolution(features, g, self.layer.windows)
        groups = len(inputs.values)
        matrix = gradient.reshape(groups, self.layer.width // groups, -1)
        return {**parts_of(0, matrix, inputs, outputs, len(x)), "alive": alive}

    def _alive(self, x: Tensor, others: list[int]) -> Tensor:
        """Of each unit 1 if it is not zero everywhere."""
        if x.is_cpu and 0 in others and len(x) > _FEW:  # they usually tell; elsewhere to ask would be to wait
            alive = self._alive(x[:_FEW], others)
            if alive.all():
                return alive
        # behind a ReLU nothing is negative
        return ((x.amax(others) != 0) | (not self.rectified and x.amin(others) != 0)).float()

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> Iterable[tuple[Tensor, Geometry]]:
        return [(sums["gradient"], self.layer.geometry(shape))]

    def dead(self, sums: Mapping[str, Tensor]) -> float | None:
        return 1.0 - (sums["alive"] > 0).float().mean().item()


# ---- The layers that can be inserted: each starts as the identity and has a weight whose gradient is not zero.
#
# Form        new layer                          starts with             measured weight
# relu        ``relu(W x + b)``, x >= 0          W = I, b = 0            W
#             ``W relu(x) + b`` before a ReLU    W = I, b = 0            W
#             ``relu(norm(W x + b))``            a norm that undoes      W
#                                                itself (Net2Net)
# residual    ``x + W2 s(W1 x + b)``             W1 = 0.8 I, b, W2 = 0   W2
#             ``x + W2 s(norm(W1 x + b))``       beside batch norms      W2
# parametric  ``(1 - a) z + a s(z)``, z = W x+b  W = I, b = 0, a = 0     W
#
# ``W`` is a matrix (``kind="linear"``) or a convolution (``kind="conv"``) that keeps the shape. What a layer at a
# place would be worth needs no layer there: `sides` and `weight_gradient` are the vector-Jacobian product through the
# virtual layer alone.

BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

# W1 of the residual form: the paper's choice, the same at every place so that merits compare.
RESIDUAL_SCALE = 0.8


@dataclass(frozen=True)
class Layer(Inserts):
    """A new layer: a plan that prints as one phrase, goes to JSON and builds the module when it is wanted."""

    tag: ClassVar[str] = "layer"
    _needed = ("width", "kernel", "groups", "activation")

    form: str
    kind: str  # "linear" (features last) or "conv" (channels at dimension 1)
    width: int = 0  # features or channels
    kernel: tuple[int, ...] = ()
    groups: int = 1
    activation: Activation = RELU
    # of the ReLU form: the ReLU comes first, because the model applies one itself after the place
    leading: bool = False
    norm: int = 0  # a batch norm of so many dimensions after the (first) map, not in the parametric form; 0 for none
    # Of a norm in the ReLU form: mean and variance of what arrives, which it undoes. Values are in a state dict, not in JSON.
    _undone: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        if self.kind == "conv":
            size = str(self.kernel[0]) if len(set(self.kernel)) == 1 else str(self.kernel)
            groups = f", groups={self.groups}" if self.groups > 1 else ""
            weight = f"Conv{len(self.kernel)}d({self.width}, {self.width}, {size}{groups})"
        else:
            weight = f"Linear({self.width}, {self.width})"
        if self.form == "relu":
            normed = f"{weight} + BatchNorm{self.norm}d" if self.norm else weight
            return f"ReLU + {normed}" if self.leading else f"{normed} + ReLU"
        norm = f", BatchNorm{self.norm}d" if self.norm else ""
        return f"{self.form.capitalize()}({weight}{norm}, {self.activation.name})"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the measured weight."""
        if self.kind == "conv":
            return (self.width, self.width // self.groups, *self.kernel)
        return (self.width, self.width)

    @property
    def windows(self) -> Windows:
        """How the maps of a convolution meet their input: they keep its size."""
        ones = (1,) * len(self.kernel)
        return Windows(self.kernel, ones, [k // 2 for k in self.kernel], ones, self.groups)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names, within the built module, of the parameters whose gradient is the merit."""
        return ("second.weight",) if self.form == "residual" else (f"{self.kind}.weight",)

    @property
    def weights(self) -> int:
        """How many weight maps the layer has: two in the residual form."""
        return 2 if self.form == "residual" else 1

    def cost(self, point: Point) -> Cost:
        """Forward FLOPs are counted by the rule: two per multiply-add, at every position (pixel, token) of a sample."""
        own = sum(p.numel() for p in self.activation.build().parameters())
        own += 2 * self.width if self.norm else 0
        own += 1 if self.form == "parametric" else 0
        maps = self.weights * math.prod(self.weight_shape)
        positions = math.prod(point.shape[1:] if self.kind == "conv" else point.shape[:-1])
        return Cost(maps + self.width + own, 2 * maps * positions, self.weights)

    def gives(self, value: Tensor) -> Tensor:
        return value.relu() if self.leading else value  # the model's own ReLU gives the same for either

    def gauge(self, site: Site, model: nn.Module) -> LayerGauge:
        anchor = site.find(model)[1]
        return LayerGauge(
            [(site.point, anchor)],
            shape=(1, *site.shape),
            entries=math.prod(self.weight_shape),
            rectified=self.form == "relu" and not self.leading,
            layer=self,
            anchor=anchor,
        )

    def module_at(self, model: nn.Module, site: Site, anchor: nn.Module) -> nn.Module:
        """The layer with the type, device, memory layout and mode of what is around its place."""
        neighbours = [module for _, module in site.point.around(model)]
        like = example_parameter(model, [*neighbours, anchor])
        layer = self.build(dtype=None if like is None else like.dtype, device=None if like is None else like.device)
        layer.train(anchor.training)
        weights = [p for module in neighbours for p in module.parameters(recurse=False) if p.ndim in (4, 5)]
        for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if any(w.ndim == dims and w.is_contiguous(memory_format=layout) and not w.is_contiguous() for w in weights):
                layer.to(memory_format=layout)  # type: ignore[call-overload]
        return layer

    def stand_in(self, model: nn.Module, site: Site, anchor: nn.Module, *, real: bool) -> nn.Module:
        return IdentityStandIn(self, self.module_at(model, site, anchor))

    def outline(self, anchor: nn.Module) -> dict[str, tuple[int, ...]]:
        return {"weight": self.weight_shape, "bias": (self.width,)}

    def check(self, point: Point) -> None:
        if self.width not in point.shape:
            raise ValueError(f"a layer of width {self.width} does not fit an activation of shape {point.shape}")

    def geometry(self, shape: Sequence[int]) -> Geometry:
        """How the measured weight acts on an activation of this shape: what the operator norms need."""
        return Geometry(size=tuple(shape[2:]), groups=self.groups) if self.kind == "conv" else Geometry()

    def build(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> nn.Module:
        """The module, an identity on its domain. Draws no random number."""

        def weight(scale: float, bias: bool = True) -> nn.Module:
            return self._map(scale, bias, dtype=dtype, device=device)

        if self.form == "relu":
            norm = self._norm(device)
            parts = [(self.kind, weight(1.0)), *([] if norm is None else [("norm", norm)])]
            bend: list[tuple[str, nn.Module]] = [("relu", nn.ReLU())]
            layer: nn.Module = nn.Sequential(OrderedDict([*bend, *parts] if self.leading else [*parts, *bend]))
        elif self.form == "residual":
            first, second = weight(RESIDUAL_SCALE), weight(0.0, bias=False)
            layer = ResidualLayer(first, self.activation.build(), second, self._norm(device))
        elif self.form == "parametric":
            layer = ParametricLayer(self.kind, weight(1.0), self.activation.build())
        else:
            raise ValueError(unknown_choice("layer form", self.form, FORMS))
        return layer.to(device=device, dtype=dtype)

    def _norm(self, device: torch.device | None = None) -> nn.Module | None:
        if not self.norm:
            return None
        norm = BATCH_NORMS[self.norm](self.width, device=device if self._undone is None else "cpu")
        if self._undone is not None:
            mean, variance = (each.cpu().double() for each in self._undone)
            norm.double()  # until the layer takes the type and the device of what is around it
            with torch.no_grad():
                norm.weight.copy_((variance + norm.eps).sqrt())
                norm.bias.copy_(mean)
                norm.get_buffer("running_mean").copy_(mean)
                norm.get_buffer("running_var").copy_(variance)
        return norm

    def features(self) -> nn.Module:
        """What the measured weight acts on, as a function of the place's values, without the first map of the residual form."""
        activation = self.activation.build()
        norm = self._norm()
        return activation if norm is None else nn.Sequential(norm, activation)

    def _map(self, scale: float, bias: bool, **options: Any) -> nn.Module:
        """A linear map or convolution that multiplies by ``scale``."""
        if self.kind == "conv":
            size = (self.width, self.width, self.kernel)
            options.update(padding=tuple(self.windows.padding), groups=self.groups)
            module: nn.Module = empty_module(CONVS[len(self.kernel)], *size, bias=bias, **options)
        else:
            module = empty_module(nn.Linear, self.width, self.width, bias=bias, **options)
        with torch.no_grad():
            weight = module.get_parameter("weight").zero_()
            units = torch.arange(self.width, device=weight.device)
            entries: tuple[Any, ...] = (units, units % (self.width // self.groups), *(k // 2 for k in self.kernel))
            weight[entries] = scale
            if bias:
                module.get_parameter("bias").zero_()
        return module

    def sides(self, x: Tensor, cotangent: Tensor, bend: nn.Module) -> tuple[Tensor, Tensor]:
        """What the measured weight of a virtual layer at activation ``x`` reads, and what comes back to its output.

        Every form is a linear map of some features of x: relu has ``x`` and a rectified ``g``, residual ``s(0.8 x)`` and ``g``,
        parametric ``x`` and ``g``. ``bend`` is what `features` made: ``s``, with the norm before it where there is one.
        """
        features = x
        if self.form == "relu" and self.leading:
            features = x.relu()  # the model's own ReLU after the place has put its zeros into g
        elif self.form == "residual":
            features = bend(RESIDUAL_SCALE * x)
        return features, cotangent.to(x.dtype)

    def weight_gradient(self, features: Tensor, g: Tensor) -> Tensor:
        """The gradient of the measured weight, of `weight_shape`, from its `sides`; linear: of shape (..., h), conv: (n, c, *map)."""
        if self.kind == "linear":
            return g.reshape(-1, self.width).T @ features.reshape(-1, self.width)
        return convolution_gradient(features, g, self.weight_shape, self.windows)

    def _verify(self) -> None:
        known = (("layer form", self.form, FORMS), ("kind", self.kind, ("linear", "conv")))
        for what, value, names in (*known, ("activation", self.activation.name, ACTIVATIONS)):
            if value not in names:
                raise ValueError(unknown_choice(what, value, names))
        unknown = dict(self.activation.arguments).keys() - set(ACTIVATIONS[self.activation.name])
        if unknown:
            raise ValueError(f"{self.activation.name} does not take {sorted(unknown)}")
        sizes = (self.width, self.groups, *self.kernel)
        if not all(type(size) is int and size > 0 for size in sizes) or self.width % self.groups:
            raise ValueError(f"width, groups and kernel are {sizes}, which cannot form a layer")
        if (self.kind == "conv") != (len(self.kernel) in CONVS) or any(size % 2 == 0 for size in self.kernel):
            raise ValueError(f"a layer of kind {self.kind!r} cannot have the kernel {self.kernel}")
        dims = (0,) if self.form == "parametric" else (0, max(1, len(self.kernel)))
        for name, fitting in (("leading", (False, True) if self.form == "relu" else (False,)), ("norm", dims)):
            if getattr(self, name) not in fitting:
                raise ValueError(
                    f"{name!r} is {getattr(self, name)!r}, which does not fit a layer of kind {self.kind!r} and form {self.form!r}"
                )


class Placing:
    """What was asked for, and what a new layer at a point of the flow will be."""

    def __init__(self, search: Search) -> None:
        self.search, self.around = search, search.around
        self.layer, self.kernel_size = search.request.form, search.request.kernel_size

    def sites(
        self,
        call: ModuleCall,
        side: str,
        seen: SeenTensor,
        activation: Activation | None = None,
        *,
        block: bool = False,
        form: str | None = None,
    ) -> Iterator[Site]:
        """What could be put at a point, the best first; the others are for the case that a trial refuses it. Raises `Refused`."""
        self.search.check(call, side, seen, block=block)
        near = self.around.neighbours(call, seen)
        form = form or self._form(seen, activation or activation_of(seen.node))
        layer = self._plan(form, call, seen, near, activation)
        point = self.search.point(call, side, seen, block=block)
        yield from layer.ways(Site(point, layer))
        if self.layer == "auto" and (form == "relu" or layer.norm):
            # what trains otherwise than it rests has the plain form left
            layer = replace(self._plan("residual", call, seen, near, activation), norm=0)
            yield from layer.ways(Site(point, layer))

    def before_activation(self, call: ModuleCall, activation: Activation, inner: Any) -> Iterator[Site]:
        """A layer after the module whose output goes into a functional activation, where no module comes after the activation.

        ``inner`` is the activation's graph node. ``relu(W relu(x))`` is what the layer after the ReLU would be.
        """
        assert call.output is not None
        self.search.check(call, "after", call.output, block=False)
        near = self.around.neighbours(call, call.output)
        normed = after_batch_norm(inner)
        if self.leads(activation, inner):
            layer = replace(self._plan("relu", call, call.output, near, activation), leading=True)
        elif self.layer == "relu":
            raise Refused(f"its output goes into {activation.name}, which is not a ReLU")
        else:
            form = "residual" if self.layer == "auto" else self.layer
            layer = self._plan(form, call, call.output, near, activation)
            layer = replace(layer, norm=len(layer.kernel) if normed and form == "residual" else 0)
        yield from layer.ways(Site(self.search.point(call, "after", call.output), layer))

    def leads(self, activation: Activation, inner: Any) -> bool:
        """Whether the layer before this activation begins with one like it, and so is a layer after it."""
        return activation == RELU and not after_batch_norm(inner) and self.layer in ("auto", "relu")

    def _form(self, seen: SeenTensor, activation: Activation | None) -> str:
        from_relu = never_negative(seen)
        if self.layer == "auto":
            return "relu" if from_relu and not after_batch_norm(seen.node) else "residual"
        if self.layer == "relu" and not from_relu:
            source = activation.name if activation else "this"
            raise Refused(
                f'is not idempotent: an identity layer + ReLU after {source} would change the function; use form="residual"'
            )
        return self.layer

    def _plan(
        self, form: str, call: ModuleCall, seen: SeenTensor, neighbours: list[str], activation: Activation | None
    ) -> Layer:
        shape = tuple(seen.tensor.shape)
        if len(shape) < 2 or not seen.tensor.is_floating_point():
            raise Refused(
                f"its values have shape {shape} and type {seen.tensor.dtype}: not a batch of floating-point features"
            )
        # A matrix of samples and features leaves no choice, whatever its features were before they were flattened.
        scores = len(shape) == 2 and is_score(seen.node, shape)
        lies = channels(seen.node, shape) if len(shape) > 2 or scores else Channels(1, False)
        if lies is None and call.path in self.around.blocks and call.result is not None:
            lies = channels(call.result.node, shape)  # a block maps a space into itself
        if lies is None:
            raise Refused(f"it is unclear which dimension of its shape {shape} holds the features")
        if lies.dim not in (1, len(shape) - 1):
            raise Refused(f"its features are in dimension {lies.dim} of {len(shape)}, neither second nor last")
        conv = lies.dim == 1 and (lies.first or len(shape) > 2) and 3 <= len(shape) <= 5
        s = RELU if form == "relu" else (activation or activation_of(seen.node) or self._activation_in(call) or TANH)
        if not conv:
            if lies.dim != len(shape) - 1:
                raise Refused(
                    f"its features are in dimension {lies.dim} of shape {shape}, where none of the layer forms can act"
                )
            # torch's slopes per channel lie along the second dimension, which are the features only in a matrix
            norm = int(form == "residual" and len(shape) == 2 and after_batch_norm(seen.node))
            s = fit_activation(s, shape[-1] if len(shape) == 2 else 1)
            return Layer(form, "linear", shape[-1], activation=s, norm=norm)
        near = [self.search.model.get_submodule(name) for name in neighbours]
        kernel, groups = windows_like(near, shape, self.kernel_size)
        norm = len(kernel) if form == "residual" and after_batch_norm(seen.node) else 0
        return Layer(form, "conv", shape[1], kernel, groups, fit_activation(s, shape[1]), norm=norm)

    def _activation_in(self, call: ModuleCall) -> Activation | None:
        """The first activation inside a block, module or functional: what the block's author would use."""
        for module in call.module.modules():
            known = Activation.of(module)
            if known is not None:
                return known
        calls = self.search.flow.calls
        for inner in calls[bisect(calls, call.began, key=lambda other: other.began) :]:
            if inner.began > call.ended:
                break
            if isinstance(inner.module, LAYERS) and inner.inputs:
                known = activation_of(origin(inner.inputs[0].node))
                if known is not None:
                    return known
        return None


def after_batch_norm(node: Any) -> bool:
    """Whether the values are those of a batch norm, bent by an activation."""
    node = origin(node)
    if node is None or activation_of(node) is None:
        return False
    source = origin(node.next_functions[0][0])
    return source is not None and operation(source) in ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")


def windows_like(
    neighbours: Sequence[nn.Module], shape: Sequence[int], kernel_size: int | None
) -> tuple[tuple[int, ...], int]:
    """The kernel and the groups of a new convolution on a map of this shape: those of the first neighbour that is one of as many axes."""
    kernel, groups = same_size_kernel((3,) * (len(shape) - 2), shape[2:]), 1
    for module in neighbours:
        like = map_of(module) if isinstance(module, CONVOLUTIONS) else None
        if like is not None and len(like.kernel) == len(shape) - 2:
            kernel = same_size_kernel(like.kernel, shape[2:])
            groups = grouped_like(shape[1], like.module.groups)
            break
    return kernel if kernel_size is None else (kernel_size,) * len(kernel), groups


def fit_activation(activation: Activation, width: int) -> Activation:
    """The same activation for another width: a PReLU with one slope per channel has to fit."""
    if activation.name == "PReLU" and dict(activation.arguments)["num_parameters"] > 1:
        return replace(activation, arguments=(("num_parameters", width),))
    return activation


def grouped_like(width: int, groups: int) -> int:
    """The number of groups a new convolution takes over from its neighbour: as many, if they divide its width."""
    return groups if groups > 1 and width % groups == 0 else 1


def same_size_kernel(kernel: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """The neighbour's kernel where it is odd (only an odd one keeps the map's size and has a centre), otherwise 3.

    Never with entries that lie outside of the map wherever the kernel is put: on a map of 1 x 1 it is 1 x 1.
    """
    return tuple(min(k if k % 2 == 1 else 3, 2 * max(length, 1) - 1) for k, length in zip(kernel, size, strict=True))


class LayerKind(Kind):
    """Identity layers: ReLU, residual and parametric ones."""

    move: ClassVar[type[Layer]] = Layer
    grows: ClassVar[str] = "layers"

    def propose(self, search: Search) -> None:
        if search.request.form != "twin":
            _Visit(search).all()

    def at(self, search: Search, call: ModuleCall, side: str, seen: SeenTensor) -> Iterator[Site]:
        if search.request.form != "twin":
            yield from Placing(search).sites(call, side, seen, block=True, form="residual")

    def otherwise(self, search: Search) -> None:
        if search.request.form not in ("relu", "twin"):
            _Visit(search).layers()


class _Visit:
    """Points of the data flow in this order, each at most once: the outputs of activation modules outside of blocks, the boundaries of
    stacks of blocks, the inputs of layers that come from a functional activation."""

    def __init__(self, search: Search) -> None:
        self.search, self.flow, self.around = search, search.flow, search.around
        self.placing = Placing(search)
        self._makers: dict[Any, ModuleCall] = {}  # which module gave the values of a graph node, the innermost
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
            parent, _, name = path.rpartition(".")
            if parent and name == "activation" and isinstance(self.flow.model.get_submodule(parent), ParametricLayer):
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

    def _is_single(self, call: ModuleCall) -> bool:
        """Whether a module is called once, by one name."""
        return len(self.flow.calls_of(call.path)) == 1 and not self.around.has_other_names(call)

    def _has_parameters(self, node: Any) -> bool:
        return any(True for _ in nearest_parameters(self.flow.parameter_names, node))

    def _functional_activations(self) -> None:
        for call in self.flow.calls:
            if not isinstance(call.module, LAYERS) or not call.inputs or self.around.in_block(call.path):
                continue
            source = origin(call.inputs[0].node)
            activation = activation_of(source)
            if activation is None or source in self.search.taken:
                continue
            if not self._is_single(call):
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

    def _is_taken(self, maker: ModuleCall, activation: Activation, source: Any) -> bool:
        """Whether a layer goes there already, because the module is an activation too: one place is one site."""
        assert maker.output is not None
        after = self.placing.leads(activation, source) and not never_negative(maker.output)
        return maker.output.node in self.search.taken and not after

    def _maker_before(self, source: Any, call: ModuleCall) -> ModuleCall | None:
        """The module whose map goes into a functional activation and is then flattened: the layer belongs to the map, not to its pixels."""
        map_dims, dims = len(source._input_metadata[0].shape), call.inputs[0].tensor.dim()
        maker = self._makers.get(source.next_functions[0][0]) if map_dims > 2 and dims < map_dims else None
        return maker if maker is not None and self._is_single(maker) and not self.around.in_block(maker.path) else None

    def _nameless_before(self, call: ModuleCall) -> ModuleCall | None:
        """A module without parameters that gives its values to this layer alone, where a layer goes in and no name changes."""
        parent = self.flow.model.get_submodule(call.path.rpartition(".")[0])
        if self.around.chained(call.path) or isinstance(parent, Chain):
            return None  # nothing is renamed there either
        node = call.inputs[0].node
        other = self._makers.get(node)
        if other is None or not other.path or other.output is None or other.output.tensor is not call.inputs[0].tensor:
            return None
        bare = not any(True for _ in other.module.parameters())
        if not bare or self.around.in_block(other.path) or not self._is_single(other):
            return None
        readers = sum(source is node for each in self.flow.nodes for source, _ in each.next_functions)
        return other if readers == 1 else None

    def layers(self) -> None:
        # next, as nothing was found between those blocks
        looked_into = any(stack.added for stack in self.search.stacks)
        for call in self.flow.calls:
            plain = isinstance(call.module, LAYERS) and not self.around.in_block(call.path)
            once = len(self.flow.calls_of(call.path)) == 1
            if plain and once and call.output is not None and self.around.weights_follow(call):
                self.search.offer(call, "after", call.output, self.placing.sites(call, "after", call.output))
            elif plain and once and not self.around.weights_follow(call) and not looked_into:
                why, known = self._why_last(call), self.search.skipped.get(call.path)
                self.search.skipped[call.path] = why if known is None else f"{known}; no layer, because it {why}"

    def _why_last(self, call: ModuleCall) -> str:
        if any(self._has_parameters(given.node) for given in call.inputs):
            return (
                "is the last layer with weights: its output is the model's output, and before it there is no activation, linear layer or "
                "convolution that a layer could go after"
            )
        return "is the only layer with weights, and it is the output: nothing can go after it"


def _first_that_goes(one: Iterator[Site], other: Iterator[Site]) -> Iterator[Site]:
    with suppress(Refused):
        yield from one
    yield from other


def _could_be_activation(module: nn.Module, calls: list[ModuleCall]) -> bool:
    """A parameterless leaf of the user's own that changes values and keeps the shape: treated as an activation."""
    has_parts = any(True for _ in chain(module.children(), module.parameters()))
    if has_parts or type(module).__module__.startswith("torch."):
        return False
    if len(calls) != 1 or calls[0].output is None or len(calls[0].inputs) != 1:
        return False
    given, output = calls[0].inputs[0], calls[0].output
    same = output.tensor.is_floating_point() and output.tensor.shape == given.tensor.shape
    return same and output.node is not given.node
