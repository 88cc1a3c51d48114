"""A few places of a pass: what a layer that makes units is given there, and what comes back nearby to those that read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOST = 128  # more tell hardly better how large units are and which way they should point, and cost more


@dataclass(frozen=True)
class Places:
    """Some samples and positions of what a layer makes: an index for each of its axes but that of the units."""

    shape: tuple[int, ...]
    at: tuple[Tensor, ...]

    @classmethod
    def among(cls, shape: tuple[int, ...], device: torch.device) -> Places:
        """All of them, or as many as are needed."""
        count = math.prod(shape)
        flat = torch.arange(count, device="cpu")
        if count > _MOST:  # at random: steps of equal length would stay in one column of a picture
            flat = torch.randint(count, (_MOST,), generator=torch.Generator().manual_seed(count), device="cpu")
        return cls(shape, torch.unravel_index(flat.to(device), shape))

    def nearby(self, values: Tensor) -> Tensor:
        """Of another map, whose channels come last, what lies at about the same places: [places, channels]."""
        shape = values.shape[:-1]
        index = [
            self.at[axis].to(values.device) * size // self.shape[axis] if axis < len(self.shape) else size // 2
            for axis, size in enumerate(shape)
        ]
        rows: Tensor = values[tuple(index)] if index else values[None]
        return rows


def inputs_of(module: nn.Module, x: Tensor) -> tuple[Places, Tensor] | None:
    """Places of what a layer makes of ``x``, and what each weight of a unit is multiplied with there; None if it is not known."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        places = Places.among(tuple(x.shape[:-1]), x.device)
        return places, x[places.at] if places.at else x[None]
    if isinstance(module, nn.modules.conv._ConvTransposeNd) or x.dim() != module.weight.dim():
        return None
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    spans = [(size - 1) * step + 1 for size, step in zip(module.kernel_size, module.dilation, strict=True)]
    space = [(length - span) // step + 1 for length, span, step in zip(x.shape[2:], spans, module.stride, strict=True)]
    places = Places.among((len(x), *space), x.device)
    x = x.movedim(1, -1)
    taps = []
    for tap in product(*(range(size) for size in module.kernel_size)):
        geometry = zip(places.at[1:], module.stride, tap, module.dilation, strict=True)
        at = tuple(place * step + offset * apart for place, step, offset, apart in geometry)
        index = (places.at[0], *at)
        taps.append(x[index])
    return places, torch.stack(taps, -1).flatten(1)
