"""The layers of torch that are known, a class for each type: where units lie in their parameters, and what they do with other units.

A new type of layer is one more class here, named in `TYPES`. Subclasses of a user's own count as the layer that they compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sensli.moves.factors import Rows, Windows, of_convolution, of_features


@dataclass(frozen=True)
class Geometry:
    """How a weight acts: as a matrix, or as a convolution on a feature map.

    Attributes:
        size: The spatial size of the convolution's input, 1 to 3 numbers; empty for a matrix.
        stride: The stride for each axis; empty for 1 everywhere.
        dilation: The dilation for each axis; empty for 1 everywhere.
        groups: The number of groups.
        transposed: Whether the weight is that of a transposed convolution (c_in x c_out/groups x k...).
    """

    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False


Axes = tuple[tuple[str, int], ...]
Names = tuple[str, ...]


class Role:
    """What one layer does with units: it makes them, reads them, or passes them on one by one."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = ()  # torch's classes of this type
    channel: ClassVar[int] = 1  # the dimension of its values that holds the units
    makes: Axes = ()  # parameters and their axis
    reads: Axes = ()
    passes: tuple[tuple[str, int, str], ...] = ()  # and what new entries are filled with
    out_size: Names = ()  # attributes that count the units
    in_size: Names = ()

    def __init__(self, module: Any) -> None:
        self.module = module

    @classmethod
    def is_of(cls, module: nn.Module) -> bool:
        """Whether a module is of this type, or of a subclass."""
        return isinstance(module, cls.kinds)

    def is_known(self) -> bool:
        """Whether the module computes what torch's own layer does, and units lie in it as they are described here."""
        own = any(isinstance(self.module, kind) and type(self.module).forward is kind.forward for kind in self.kinds)
        return own and not is_parametrized(self.module)


class MapRole(Role):
    """A layer with a weight: a linear map from the units that it reads to those that it makes."""

    kernel: tuple[int, ...] = ()  # of a convolution
    can_unfold: ClassVar[bool] = True  # whether `unfold` is there

    def apply_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the layer makes of its input with other rows."""
        return self._run(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def column_gradient(self, a: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient of the columns if the layer would read ``a``, by units along the first axis: [entries of a, ...]."""
        a = a.to(cotangent.dtype)
        return a.reshape(-1, a.shape[-1]).T @ cotangent.reshape(-1, cotangent.shape[-1])

    def unfold(self, x: Tensor) -> Tensor:
        """What each weight of a unit is multiplied with, in the place of the units; with a bias ones come last.

        The units of a layer are linear in it, so the gradient of columns that would read it is that of a bypass around the units.
        """
        if self.module.bias is None:
            return x
        return torch.cat([x, torch.ones_like(x.narrow(self.channel, 0, 1))], self.channel)

    @property
    def inputs_per_unit(self) -> int:
        """How many weights make a unit, with its bias."""
        weight: Tensor = self.module.weight
        _, dim = self.makes[0]
        return weight.numel() // weight.shape[dim] + (self.module.bias is not None)

    def sides(self, x: Tensor, cotangent: Tensor) -> tuple[Rows, Rows]:
        """What the natural merit needs: rows of what the layer reads, and of what comes back to its output."""
        return of_features(x), of_features(cotangent)

    def geometry(self, size: tuple[int, ...]) -> Geometry:
        """How the weight acts on a map of this size."""
        return Geometry()


class LinearRole(MapRole):
    """`nn.Linear`: features last."""

    kinds = (nn.Linear,)
    channel = -1
    makes = (("weight", 0), ("bias", 0))
    reads = (("weight", 1),)
    out_size, in_size = ("out_features",), ("in_features",)

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class TurnedLinearRole(MapRole):
    """The linear map of GPT-2 and its like (transformers' Conv1D), whose weight lies the other way round."""

    channel = -1
    makes = (("weight", 1), ("bias", 0))
    reads = (("weight", 0),)
    out_size, in_size = ("nf",), ("nx",)

    @classmethod
    def is_of(cls, module: nn.Module) -> bool:
        return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"

    def is_known(self) -> bool:
        return True

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight + (0 if bias is None else bias)


class ConvRole(MapRole):
    """`nn.Conv1d` to `nn.Conv3d`: all channels together or, with one group for each channel, each by itself."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    makes: Axes = (("weight", 0), ("bias", 0))
    reads: Axes = (("weight", 1),)
    out_size: Names = ("out_channels",)
    in_size: Names = ("in_channels",)
    transposed: ClassVar[bool] = False
    _functions: ClassVar[dict[int, Any]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.kernel = module.kernel_size
        if module.groups > 1:
            self.makes = self.reads = self.out_size = ()
            self.passes = (("weight", 0, "row"), ("bias", 0, "row"))
            self.in_size = ("in_channels", "out_channels", "groups")

    def is_known(self) -> bool:
        conv = self.module
        return super().is_known() and (conv.groups == 1 or conv.groups == conv.in_channels == conv.out_channels)

    def pad(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """The input with what the layer puts around it, and how many zeros are still to be put there."""
        conv = self.module
        if conv.padding_mode == "zeros" and not isinstance(conv.padding, str):
            return x, list(conv.padding)
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        return F.pad(x, conv._reversed_padding_repeated_twice, mode=mode), [0] * len(self.kernel)

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1) -> Tensor:
        x, padding = self.pad(x)
        function = self._functions[len(self.kernel)]
        made: Tensor = function(x, weight, bias, self.module.stride, padding, self.module.dilation, groups)
        return made

    def _windows(self, x: Tensor) -> tuple[Tensor, Windows]:
        x, padding = self.pad(x)
        return x, Windows(self.kernel, self.module.stride, padding, self.module.dilation)

    def column_gradient(self, a: Tensor, cotangent: Tensor) -> Tensor:
        a, windows = self._windows(a.to(cotangent.dtype))
        if self.transposed:
            shape = (a.shape[1], cotangent.shape[1], *self.kernel)
            return convolution_gradient(a, cotangent, shape, windows, self.module.output_padding)
        shape = (cotangent.shape[1], a.shape[1], *self.kernel)
        return convolution_gradient(a, cotangent, shape, windows).transpose(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        size, channels = math.prod(self.kernel), self.module.in_channels
        picking = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *self.kernel)
        return super().unfold(self._run(x, picking.repeat(channels, *[1] * (x.dim() - 1)), None, channels))

    def sides(self, x: Tensor, cotangent: Tensor) -> tuple[Rows, Rows]:
        x, windows = self._windows(x)
        return of_convolution(x, cotangent, windows, transposed=self.transposed)

    def geometry(self, size: tuple[int, ...]) -> Geometry:
        conv = self.module
        return Geometry(size, tuple(conv.stride), tuple(conv.dilation), conv.groups, conv.transposed)


def convolution_gradient(
    x: Tensor, cotangent: Tensor, shape: Sequence[int], windows: Windows, transposed: Sequence[int] | None = None
) -> Tensor:
    """The gradient of a convolution's weight, of this shape; ``transposed``: the output padding, if it is a transposed one."""
    # Only the weight's gradient is asked for; the empty weight carries its shape.
    empty, others = x.new_empty(1).expand(*shape), transposed or [0] * len(windows.kernel)
    gradient: Tensor = torch.ops.aten.convolution_backward(
        cotangent, x, empty, None, list(windows.stride), list(windows.padding), list(windows.dilation), transposed is not None,
        list(others), windows.groups, [False, True, False],
    )[1]  # fmt: skip
    return gradient


class TransposedConvRole(ConvRole):
    """`nn.ConvTranspose1d` to `nn.ConvTranspose3d`."""

    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    makes = (("weight", 1), ("bias", 0))
    reads = (("weight", 0),)
    transposed = True
    can_unfold = False
    _functions: ClassVar[dict[int, Any]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

    def pad(self, x: Tensor) -> tuple[Tensor, list[int]]:
        return x, list(self.module.padding)  # what is cut off its output

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1) -> Tensor:
        conv, function = self.module, self._functions[len(self.kernel)]
        made: Tensor = function(x, weight, bias, conv.stride, conv.padding, conv.output_padding, groups, conv.dilation)
        return made


class NormRole(Role):
    """Batch norms and instance norms, which take each channel by itself."""

    kinds = (
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
        nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    )  # fmt: skip
    passes = (("weight", 0, "one"), ("bias", 0, "zero"), ("running_mean", 0, "zero"), ("running_var", 0, "one"))
    in_size = ("num_features",)


class SlopesRole(Role):
    """`nn.PReLU` with a slope for each channel."""

    kinds = (nn.PReLU,)
    passes = (("weight", 0, "mean"),)
    in_size = ("num_parameters",)

    def is_known(self) -> bool:
        return super().is_known() and self.module.num_parameters > 1


TYPES: tuple[type[Role], ...] = (LinearRole, TurnedLinearRole, ConvRole, TransposedConvRole, NormRole, SlopesRole)


def _kinds(of: type[Role]) -> tuple[type[nn.Module], ...]:
    return tuple(kind for each in TYPES if issubclass(each, of) for kind in each.kinds)


CONVOLUTIONS, LAYERS = _kinds(ConvRole), _kinds(MapRole)  # torch's own classes with weights, between which layers go


def _type_of(module: nn.Module) -> type[Role] | None:
    return next((each for each in TYPES if each.is_of(module)), None)


def role_of(module: nn.Module) -> Role | None:
    """What a module does with units; None for a module without parameters along them, or one that is not known."""
    kind = _type_of(module)
    role = None if kind is None else kind(module)
    return role if role is not None and role.is_known() else None


def map_of(module: nn.Module) -> MapRole:
    """The same of a layer that is known to have a weight."""
    kind = _type_of(module)
    assert kind is not None and issubclass(kind, MapRole)
    return kind(module)


def why_unknown(module: nn.Module) -> str:
    """Why a layer of torch's has no role that is known; empty if it has one, or is not such a layer."""
    if not isinstance(module, LAYERS) or role_of(module) is not None:
        return ""
    if is_parametrized(module):
        return "its weights come from a parametrization (weight_norm, spectral_norm, ...), which has their shape too"
    if getattr(module, "groups", 1) > 1:
        return f"is a convolution in {module.groups} groups, and each channel belongs to one of them"
    return f"is a {type(module).__name__} with a forward pass of another kind than torch's"


def units_made(module: nn.Module) -> int:
    """How many units a layer makes; 0 if that is not known."""
    role = role_of(module)
    if role is None or not role.makes:
        return 0
    name, dim = role.makes[0]
    return int(getattr(module, name).shape[dim])


def entries_read(module: nn.Module) -> int:
    """How many entries a layer reads along its axis of units; 0 if that is not known."""
    role = role_of(module)
    return int(getattr(module, role.in_size[0], 0)) if role is not None and role.in_size else 0
