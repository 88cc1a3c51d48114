"""What the natural merit divides a gradient by: the second moments of what goes into a weight and of what comes back to its output.

A map is seen as rows (samples, tokens, positions of a feature map) of inputs x and cotangents g. Its gradient is the sum of g x^T, and its
Fisher matrix about the Kronecker product of two moments, those of x and of g. All of these are sums over rows, so they add up over batches
and processes. A moment costs the square of its length for every row: of long rows an even sample is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from sensli.modules.running import is_capable, widened

_WORK = 2**27  # multiply-adds of one moment in one pass that are always afforded
_LEAST = 256  # rows that are always taken
_SHARE = 32  # of many rows every so many-th at least: a moment then costs less than the gradient itself
_BLOCK = 256  # rows of a moment that one product makes; about the half of it that lies above them is left out


@dataclass(frozen=True)
class Factored:
    """A gradient and the two moments of its map, in groups of separate channels."""

    gradient: Tensor  # [groups, out, in]
    inputs: Tensor  # [groups, in, in]
    outputs: Tensor  # [groups, out, out]
    counts: Tensor  # samples, rows, and of how many rows the moments are: of the inputs, of the outputs


@dataclass(frozen=True)
class Rows:
    """Values of one side of a map, [groups, rows, entries]: an even sample of all rows, and how many there are in all."""

    values: Tensor
    seen: int

    @property
    def used(self) -> int:
        return int(self.values.shape[1])

    def moment(self) -> Tensor:
        """The sum of outer products, as large as if all rows had been taken."""
        return Outer(self).moment()


@dataclass(frozen=True)
class Outer:
    """A sum of outer products that is not written out yet: it goes straight into the sum over all batches.

    A moment is as long and as wide as each row, and rows may be few: to write it, multiply it and add it would take longer than its
    product.
    """

    rows: Rows
    factor: float = 1.0
    others: tuple[Outer, ...] = ()  # of the same map, where it is used more than once

    def __add__(self, other: Outer) -> Outer:
        return replace(self, others=(*self.others, other))

    def added_to(self, total: Tensor | None) -> Tensor:
        """The total with this added in place, a new one if there is none. Above the diagonal it means nothing until it is `mirrored`."""
        rows: Tensor = widened(self.rows.values)
        factor, beta = self.factor * self.rows.seen / max(self.rows.used, 1), 1.0
        if total is None:
            total, beta = rows.new_empty(len(rows), rows.shape[2], rows.shape[2]), 0.0
        rows = rows.to(total.dtype)
        for low, high in _blocks(rows.shape[2]):
            part, left, right = total[:, low:high, :high], rows[:, :, low:high].mT, rows[:, :, :high]
            if len(rows) == 1:  # a product of matrices that lie apart needs no copy, one of stacks of them may
                part[0].addmm_(left[0], right[0], beta=beta, alpha=factor)
            else:
                part.baddbmm_(left, right, beta=beta, alpha=factor)
        for other in self.others:
            other.added_to(total)
        return total

    def moment(self) -> Tensor:
        """Written out."""
        return mirrored(self.added_to(None))


def mirrored(moment: Tensor) -> Tensor:
    """The same tensor, with what is below the diagonal above it as well."""
    for low, high in _blocks(moment.shape[-1]):
        moment[:, :low, low:high] = moment[:, low:high, :low].mT
    return moment


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """The rows of a moment in blocks: one for short ones, whose product takes no time."""
    size = _BLOCK if length >= 2 * _BLOCK else math.ceil(length / 2) if length >= _BLOCK else max(length, 1)
    return ((low, min(low + size, length)) for low in range(0, length, size))


@dataclass(frozen=True)
class Windows:
    """How a convolution meets its input."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1


def sums_of(index: int, gradient: Tensor, inputs: Rows, outputs: Rows, samples: int) -> dict[str, Tensor]:
    """What one pass adds for one map; ``gradient`` is [groups, out, in]."""
    parts = parts_of(index, gradient, inputs, outputs, samples)
    return {name: part.moment() if isinstance(part, Outer) else part for name, part in parts.items()}


def parts_of(
    index: int, gradient: Tensor | None, inputs: Rows, outputs: Rows, samples: int
) -> dict[str, Tensor | Outer]:
    """The same with moments that are not written out; without the gradient where it comes by another way."""
    positions = inputs.seen / samples
    device = inputs.values.device  # where ranks would add them up
    precise = torch.float64 if is_capable(device) else torch.float32
    counts = torch.tensor([samples, inputs.seen, inputs.used, outputs.used], dtype=precise, device=device)
    parts: dict[str, Tensor | Outer] = {
        f"inputs{index}": Outer(inputs),
        # A sample's gradient is a sum over its positions. If these are independent, its variance is as many times that of one.
        f"outputs{index}": Outer(outputs, 1 / positions),
        f"counts{index}": counts,
    }
    if gradient is not None:
        parts[f"map{index}"] = gradient
    return parts


def factored(sums: Mapping[str, Tensor]) -> list[Factored]:
    """The maps that `sums_of` has summed."""
    numbers = sorted(int(name.removeprefix("map")) for name in sums if name.startswith("map"))
    return [Factored(*(sums[f"{part}{index}"] for part in ("map", *MOMENTS))) for index in numbers]


MOMENTS = {
    "inputs": 0,
    "outputs": 2,
    "counts": 0,
}  # what is summed beside gradients, and by which power of the loss's scale it grows


def power_of(name: str) -> int:
    """By which power of the scale of the loss a sum grows."""
    return MOMENTS.get(name.rstrip("0123456789"), 1)


def is_moment(name: str) -> bool:
    """Whether a sum is a measure for gradients, rather than one of them."""
    return name.rstrip("0123456789") in MOMENTS


# --- the rows of maps ---


def of_features(x: Tensor, groups: int = 1) -> Rows:
    """Every vector along the last dimension is a row."""
    rows = x.reshape(-1, x.shape[-1])
    every = _every(len(rows), rows.shape[1] // groups)
    values = rows[every // 2 :: every]
    return Rows(values.unflatten(1, (groups, -1)).transpose(0, 1), len(rows))


def of_channels(x: Tensor, groups: int = 1) -> Rows:
    """Every position of a map with its channels at dimension 1 is a row."""
    return of_features(x.movedim(1, -1), groups)


def of_windows(x: Tensor, windows: Windows, size: Sequence[int]) -> Rows:
    """Every window that a convolution reads is a row, channel by channel; ``size``: of its output."""
    entries = x.shape[1] // windows.groups * math.prod(windows.kernel)
    seen = x.shape[0] * math.prod(size)
    steps = _steps(size, _every(seen, entries))
    first = [step // 2 for step in steps]
    counts = [len(range(begin, length, step)) for begin, length, step in zip(first, size, steps, strict=True)]
    last = x.movedim(1, -1)
    # Only what is taken is copied; what padding would add stays zero.
    rows = x.new_zeros(len(x), *counts, math.prod(windows.kernel), x.shape[1])
    for number, tap in enumerate(product(*(range(length) for length in windows.kernel))):
        source, target = [slice(None)], [slice(None)]
        for axis, offset in enumerate(tap):
            begin = first[axis] * windows.stride[axis] + offset * windows.dilation[axis] - windows.padding[axis]
            jump = steps[axis] * windows.stride[axis]
            low = max(0, -(begin // jump))
            high = max(low, min(counts[axis], (x.shape[2 + axis] - 1 - begin) // jump + 1))
            source.append(slice(begin + low * jump, begin + high * jump, jump) if high > low else slice(0, 0))
            target.append(slice(low, high))
        rows.select(-2, number)[tuple(target)] = last[tuple(source)]
    values = rows.view(-1, math.prod(windows.kernel), windows.groups, x.shape[1] // windows.groups)
    return Rows(values.permute(2, 0, 3, 1).reshape(windows.groups, -1, entries), seen)


def of_entries(x: Tensor, dims: Iterable[int]) -> Rows:
    """For a scale of single entries: a group for each entry along ``dims``, whose rows are single numbers."""
    dims = sorted(dim % x.dim() for dim in dims)
    values = x.movedim(dims, list(range(len(dims)))).reshape(math.prod(x.shape[dim] for dim in dims), -1, 1)
    return Rows(values, values.shape[1])


def _every(seen: int, entries: int) -> int:
    """Of so many rows with so many entries, every how many-th is taken."""
    most = max(_LEAST, _WORK // max(entries, 1) ** 2, seen // _SHARE)
    return max(1, math.ceil(seen / most))


def _steps(size: Sequence[int], every: int) -> list[int]:
    """About every so many-th position of a map, evenly in all directions."""
    steps = [1] * len(size)
    while math.prod(steps) < every and any(step < length for step, length in zip(steps, size, strict=True)):
        axis = max(range(len(size)), key=lambda axis: size[axis] / steps[axis])
        steps[axis] += 1
    return steps
