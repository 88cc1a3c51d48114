"""The layers that can be inserted: each starts as the identity and has a weight whose gradient is not zero.

Form        new layer                          starts with             measured weight
relu        ``relu(W x + b)``, x >= 0          W = I, b = 0            W
            ``W relu(x) + b`` before a ReLU    W = I, b = 0            W
            ``relu(norm(W x + b))``            a norm that undoes      W
                                               itself (Net2Net)
residual    ``x + W2 s(W1 x + b)``             W1 = 0.8 I, b, W2 = 0   W2
            ``x + W2 s(norm(W1 x + b))``       beside batch norms      W2
parametric  ``(1 - a) z + a s(z)``, z = W x+b  W = I, b = 0, a = 0     W

``W`` is a matrix (``kind="linear"``) or a convolution (``kind="conv"``) that keeps the shape. What a layer at a place would be
worth needs no layer there: `sides` and `weight_gradient` are the vector-Jacobian product through the virtual layer alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import one_of
from sensli.moves.geometry import Geometry
from sensli.moves.inserting import Inserts, example_parameter
from sensli.moves.layer.gauge import LayerGauge
from sensli.moves.layer.modules import CONVS, ParametricLayer, ResidualLayer, undrawn
from sensli.moves.layer.stand_in import StandIn
from sensli.moves.move import Cost
from sensli.moves.point import Point
from sensli.moves.trace.activations import ACTIVATIONS, RELU, Activation
from sensli.text.names import FORMS

if TYPE_CHECKING:
    from sensli.moves.sites import Site

BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

# W1 of the residual form: the paper's choice, the same at every place so that merits compare.
RESIDUAL_SCALE = 0.8


@dataclass(frozen=True)
class Layer(Inserts):
    """A new layer: a plan that prints as one phrase, goes to JSON and builds the module when it is wanted."""

    tag: ClassVar[str] = "layer"

    form: str
    kind: str  # "linear" (features last) or "conv" (channels at dimension 1)
    width: int = 0  # features or channels
    kernel: tuple[int, ...] = ()
    groups: int = 1
    activation: Activation = RELU
    leading: bool = (
        False  # of the ReLU form: the ReLU comes first, because the model applies one itself after the place
    )
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
        return LayerGauge([(site.point, anchor)], shape=(1, *site.shape), layer=self, anchor=anchor)

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
        return StandIn(self, self.module_at(model, site, anchor))

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
            raise ValueError(one_of("layer form", self.form, FORMS))
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
            padding = tuple(k // 2 for k in self.kernel)
            size = (self.width, self.width, self.kernel)
            options.update(padding=padding, groups=self.groups)
            module: nn.Module = undrawn(CONVS[len(self.kernel)], *size, bias=bias, **options)
        else:
            module = undrawn(nn.Linear, self.width, self.width, bias=bias, **options)
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

        Every form is a linear map of some features of x: relu has ``x`` and ``g [x > 0]``, residual ``s(0.8 x)`` and ``g``, parametric
        ``x`` and ``g``. ``bend`` is what `features` made: ``s``, with the norm before it where there is one.
        """
        features, g = x, cotangent.to(x.dtype)
        if self.form == "relu" and self.leading:
            features = x.relu()  # the model's own ReLU after the place has put its zeros into g already
        elif self.form == "relu":
            g = torch.ops.aten.threshold_backward(g, x, 0)
        elif self.form == "residual":
            features = bend(RESIDUAL_SCALE * x)
        return features, g

    def weight_gradient(self, features: Tensor, g: Tensor) -> Tensor:
        """The gradient of the measured weight, of `weight_shape`, from its `sides`; linear: of shape (..., h), conv: (n, c, *map)."""
        if self.kind == "linear":
            return g.reshape(-1, self.width).T @ features.reshape(-1, self.width)
        dims = len(self.kernel)
        padding = [k // 2 for k in self.kernel]
        # Only the weight's gradient is asked for; the empty weight carries its shape.
        shape_only = features.new_empty(1).expand(self.weight_shape)
        gradients = torch.ops.aten.convolution_backward(
            g, features, shape_only, None, [1] * dims, padding, [1] * dims, False, [0] * dims, self.groups,
            [False, True, False],
        )  # fmt: skip
        return gradients[1]  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Layer:
        """The inverse of `to_dict`. Values that make no layer raise ValueError: a file may have been altered."""
        activation = data["activation"]
        if data["form"] not in FORMS:
            raise ValueError(one_of("layer form", data["form"], FORMS))
        if data["kind"] not in ("linear", "conv"):
            raise ValueError(one_of("kind", data["kind"], ("linear", "conv")))
        if activation["name"] not in ACTIVATIONS:
            raise ValueError(one_of("activation", activation["name"], ACTIVATIONS))
        unknown = {key for key, _ in activation["arguments"]} - set(ACTIVATIONS[activation["name"]])
        if unknown:
            raise ValueError(f"{activation['name']} does not take {sorted(unknown)}")
        sizes = (data["width"], data["groups"], *data["kernel"])
        if not all(type(size) is int and size > 0 for size in sizes) or data["width"] % data["groups"]:
            raise ValueError(f"width, groups and kernel are {sizes}, which cannot form a layer")
        if (data["kind"] == "conv") != (len(data["kernel"]) in CONVS) or any(size % 2 == 0 for size in data["kernel"]):
            raise ValueError(f"a layer of kind {data['kind']!r} cannot have the kernel {data['kernel']}")
        arguments = tuple((key, value) for key, value in activation["arguments"])
        return cls(
            form=data["form"],
            kind=data["kind"],
            width=data["width"],
            kernel=tuple(data["kernel"]),
            groups=data["groups"],
            activation=Activation(activation["name"], arguments),
            leading=_flag(data, "leading") and data["form"] == "relu",
            norm=_norm_of(data),
        )


def _flag(data: dict[str, Any], name: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name!r} must be true or false, got {value!r}")
    return value


def _norm_of(data: dict[str, Any]) -> int:
    dims = data.get("norm", 0)
    fits = type(dims) is int and (dims == 0 or (data["form"] != "parametric" and dims == max(1, len(data["kernel"]))))
    if not fits:
        raise ValueError(
            f"'norm' is {dims!r}, which does not fit a layer of kind {data['kind']!r} and form {data['form']!r}"
        )
    return int(dims)
