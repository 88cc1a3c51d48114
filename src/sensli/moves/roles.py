"""What the layers of torch do with units: which axes of their parameters make, read or pass them on, and which attributes count them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    """Of one module: for the units that it makes, those that it reads, or those that pass through it one by one."""

    channel: int  # the dimension of its values that holds the units
    makes: tuple[tuple[str, int], ...] = ()  # parameters and their axis
    reads: tuple[tuple[str, int], ...] = ()
    passes: tuple[tuple[str, int, str], ...] = ()  # and what new entries are filled with
    out_size: tuple[str, ...] = ()
    in_size: tuple[str, ...] = ()


def role_of(module: nn.Module) -> Role | None:
    """What a module does with units; None for a module without parameters along them, or one that is not known."""
    if _is(module, nn.Linear) or _is_conv1d_of_transformers(module):
        transposed = not isinstance(module, nn.Linear)
        out, given = (1, 0) if transposed else (0, 1)
        sizes = (("nf",), ("nx",)) if transposed else (("out_features",), ("in_features",))
        return Role(-1, (("weight", out), ("bias", 0)), (("weight", given),), (), *sizes)
    if _is(module, *_CONVS, *_TRANSPOSED):
        return _conv(module)
    if _is(module, *_NORMS):
        fills = (("weight", "one"), ("bias", "zero"), ("running_mean", "zero"), ("running_var", "one"))
        return Role(1, passes=tuple((name, 0, fill) for name, fill in fills), in_size=("num_features",))
    if isinstance(module, nn.PReLU) and _is(module, nn.PReLU) and module.num_parameters > 1:
        return Role(1, passes=(("weight", 0, "mean"),), in_size=("num_parameters",))
    return None


def why_unknown(module: nn.Module) -> str:
    """Why a layer of torch's has no role that is known; empty if it has one, or is not such a layer."""
    if not isinstance(module, (nn.Linear, *_CONVS, *_TRANSPOSED)) or role_of(module) is not None:
        return ""
    if is_parametrized(module):
        return "its weights come from a parametrization (weight_norm, spectral_norm, ...), which has their shape too"
    if getattr(module, "groups", 1) > 1:
        return f"is a convolution in {module.groups} groups, and each channel belongs to one of them"
    return f"is a {type(module).__name__} with a forward pass of another kind than torch's"


def _is(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is one of torch's layers, or a subclass that computes the same."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds) and not (
        is_parametrized(module)
    )


def _conv(conv: nn.Module) -> Role | None:
    out, given = ("out_channels",), ("in_channels",)
    if conv.groups == 1:
        made, read = (1, 0) if isinstance(conv, _TRANSPOSED) else (0, 1)
        return Role(1, (("weight", made), ("bias", 0)), (("weight", read),), (), out, given)
    if conv.groups == conv.in_channels == conv.out_channels:
        return Role(1, passes=(("weight", 0, "row"), ("bias", 0, "row")), in_size=(*given, *out, "groups"))
    return None


def _is_conv1d_of_transformers(module: nn.Module) -> bool:
    """The linear map of GPT-2 and its like, whose weight lies the other way round."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def units_made(module: nn.Module) -> int:
    """How many units a layer makes; 0 if that is not known."""
    role = role_of(module)
    if role is None or not role.makes:
        return 0
    name, dim = role.makes[0]
    return int(getattr(module, name).shape[dim])


# ---- How a weight acts on what it is given: what the operator norms need to know.


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

    size: tuple[int, ...] = ()  # spatial size of the convolution's input; 1, 2 or 3 entries
    stride: tuple[int, ...] = ()  # empty: 1 everywhere
    dilation: tuple[int, ...] = ()  # empty: 1 everywhere
    groups: int = 1
    transposed: bool = False  # the weight is c_in x c_out/groups x k..., as that of a ConvTranspose


# ---- What layers that make or read units do with others than their own: rows that they do not have, columns that are not
# there.


_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def applied(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a layer makes of its input with other rows."""
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        functions = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
        function = functions[x.dim() - 2]
        padding: Any = module.padding
        return function(x, weight, bias, module.stride, padding, module.output_padding, module.groups, module.dilation)
    if isinstance(module, nn.modules.conv._ConvNd):
        padded, padding = _padded(module, x)
        made: Tensor = _CONVOLUTIONS[x.dim() - 2](padded, weight, bias, module.stride, padding, module.dilation)
        return made
    return x @ weight + (0 if bias is None else bias)  # GPT-2's linear map


def _padded(conv: nn.modules.conv._ConvNd, x: Tensor) -> tuple[Tensor, Any]:
    if conv.padding_mode == "zeros":
        return x, conv.padding
    return F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0


def column_gradient(module: nn.Module, a: Tensor, cotangent: Tensor) -> Tensor:
    """The gradient of the columns of a layer that would read ``a``, by units along the first axis: [entries of a, ...]."""
    a = a.to(cotangent.dtype)
    if isinstance(module, nn.modules.conv._ConvNd):
        transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        out = cotangent.shape[1]
        padding: Any = list(module.padding) if not isinstance(module.padding, str) else module.padding
        if not transposed:
            a, padding = _padded(module, a)
            if isinstance(padding, str):
                a, padding = F.pad(a, module._reversed_padding_repeated_twice), 0
        dims = a.dim() - 2
        padding = [padding] * dims if isinstance(padding, int) else list(padding)
        shape = (a.shape[1], out, *module.kernel_size) if transposed else (out, a.shape[1], *module.kernel_size)
        gradients = torch.ops.aten.convolution_backward(
            cotangent, a, a.new_empty(1).expand(shape), None, list(module.stride), padding, list(module.dilation), transposed,
            list(module.output_padding), 1, [False, True, False],
        )  # fmt: skip
        gradient: Tensor = gradients[1]
        return gradient if transposed else gradient.transpose(0, 1)
    return a.reshape(-1, a.shape[-1]).T @ cotangent.reshape(-1, cotangent.shape[-1])


def unfolds(module: nn.Module) -> bool:
    """Whether `unfolded` knows the layer."""
    return not isinstance(module, nn.modules.conv._ConvTransposeNd)


def inputs_per_unit(module: nn.Module) -> int:
    """How many weights make a unit of a layer, with its bias."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    made = weight.shape[1 if isinstance(module, nn.modules.conv._ConvTransposeNd) or _is_turned(module) else 0]
    return weight.numel() // made + (module.bias is not None)


def unfolded(module: nn.Module, x: Tensor) -> Tensor:
    """What each weight of a unit is multiplied with, in the place of the units; with a bias ones come last.

    The units of a layer are linear in it, so the gradient of columns that would read it is that of a bypass around the units.
    """
    if not isinstance(module, nn.modules.conv._ConvNd):
        return torch.cat([x, torch.ones_like(x[..., :1])], -1) if module.bias is not None else x
    size = math.prod(module.kernel_size)
    picking = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *module.kernel_size)
    padded, padding = _padded(module, x)
    function = _CONVOLUTIONS[x.dim() - 2]
    channels = module.in_channels
    parts = function(
        padded, picking.repeat(channels, *[1] * (x.dim() - 1)), None, module.stride, padding, module.dilation, channels
    )
    return torch.cat([parts, torch.ones_like(parts[:, :1])], 1) if module.bias is not None else parts


def _is_turned(module: nn.Module) -> bool:
    """GPT-2's linear map, whose weight lies the other way round."""
    return not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
