"""What layers that make or read units do with others than their own: rows that they do not have, columns that are not there."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
