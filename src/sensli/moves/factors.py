"""What the natural merit divides a gradient by: the second moments of what goes into a weight and of what comes back to its output.

A map is seen as rows (samples, tokens, positions of a feature map) of inputs x and cotangents g. Its gradient is the sum of g x^T, and its
Fisher matrix about the Kronecker product of two moments, those of x and of g. All of these are sums over rows, so they add up over batches
and processes. A moment costs the square of its length for every row: of long rows an even sample is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sensli.modules.running import is_capable, upcast
from sensli.moves.trace.graph import operation

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
        """The total with this added in place, a new one if there is none. Only `mirror_moment` fills it above the diagonal."""
        rows: Tensor = upcast(self.rows.values)
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
        return mirror_moment(self.added_to(None))


def mirror_moment(moment: Tensor) -> Tensor:
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


def factored_maps(sums: Mapping[str, Tensor]) -> list[Factored]:
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


def of_convolution(x: Tensor, g: Tensor, windows: Windows, *, transposed: bool = False) -> tuple[Rows, Rows]:
    """The rows of both sides; the weight of a transposed convolution reads windows of the cotangent."""
    if transposed:
        return of_channels(x, windows.groups), of_windows(g, windows, x.shape[2:])
    return of_windows(x, windows, g.shape[2:]), of_channels(g, windows.groups)


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


# ---- Where a weight enters a computation, read from the autograd graph: what it is multiplied with, and where its
# output's cotangent arrives.
#
# A module may hold a weight and never be called (torch's attention does so with its output map), so modules do not
# tell.


class Use(NamedTuple):
    """One operation with a weight. ``matrix`` gives the weight's gradient as [groups, out, in], as the rows of both sides have it."""

    matrix: Callable[[Tensor], Tensor]
    sides: Callable[[Tensor], tuple[Rows, Rows]]  # from the cotangent of the output: rows of inputs and of outputs

    def sums(self, index: int, gradient: Tensor | None, cotangent: Tensor, samples: int) -> dict[str, Tensor | Outer]:
        """What one pass through it adds to the sums of the natural merit; a gradient is that of the weight, once for all its uses."""
        matrix = None if gradient is None else self.matrix(gradient)
        return parts_of(index, matrix, *self.sides(cotangent), samples)


_RESHAPING = {"View", "UnsafeView", "Unsqueeze", "ReshapeAlias", "Squeeze"}


def watch_uses(
    outputs: Iterable[Any], weights: Mapping[int, Tensor], arrived: Callable[[int, Use, Tensor], Tensor]
) -> None:
    """In the backward pass of a graph, hand over each operation that uses one of the weights (by their ids) with its output's cotangent.

    What is returned goes on in the place of the cotangent. Weights that an operation of an unknown kind uses are left out: what it adds to
    their gradients has no moments.
    """

    def hook(key: int, use: Use) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
        # without the node: it would keep itself alive
        return lambda cotangents: (arrived(key, use, cotangents[0]), *cotangents[1:])

    found = list(_uses(outputs, weights))
    unknown = {key for _, key, use in found if use is None}
    for node, key, use in found:
        if use is not None and key not in unknown:
            node.register_prehook(hook(key, use))


def _uses(outputs: Iterable[Any], weights: Mapping[int, Tensor]) -> Iterator[tuple[Any, int, Use | None]]:
    """All operations with weights in a graph; without a `Use` where the kind is not known."""
    frontier = [node for node in outputs if node is not None]
    seen = set(frontier)
    while frontier:
        node = frontier.pop()
        for place, (source, _) in enumerate(node.next_functions):
            if source is None:
                continue
            key, turned, reshaped = _weight(source)
            if key in weights:
                yield node, key, _use(node, place, weights[key], turned, reshaped)
            elif source not in seen:
                seen.add(source)
                frontier.append(source)


def _weight(node: Any) -> tuple[int, bool, bool]:
    """The id of the leaf that a node represents (0 if it is not one), whether it is transposed, and whether it has another shape."""
    turned = reshaped = False
    while operation(node) == "T" or operation(node) in _RESHAPING:
        turned, reshaped = turned or operation(node) == "T", reshaped or operation(node) != "T"
        node = node.next_functions[0][0]
        if node is None:
            return 0, False, False
    variable = getattr(node, "variable", None)
    return (0 if variable is None else id(variable)), turned, reshaped


def _use(node: Any, place: int, weight: Tensor, turned: bool, reshaped: bool) -> Use | None:
    name = operation(node)
    if name in ("Addmm", "Mm", "Linear"):
        return None if reshaped else _product(node, name, place, turned)
    if name in ("Convolution", "ConvolutionOverrideable") and place == 1:
        return _convolution(node, weight)
    if name == "Mul":
        return _scale(node, place, weight)
    if name in _NORMALISED and place == 1:
        x, dims = _NORMALISED[name](node)
        return Use(_single, lambda g: (of_entries(x, dims), of_entries(g, dims)))
    return None


def _single(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, 1, 1)


def _product(node: Any, name: str, place: int, turned: bool) -> Use | None:
    if name == "Linear":
        x = node._saved_input.detach()
        return Use(lambda w: w[None], lambda g: (of_features(x), of_features(g))) if place == 1 else None
    first, second = (1, 2) if name == "Addmm" else (0, 1)
    if place == second:  # x @ W, or x @ W.T for a weight that is out x in
        x = (node._saved_mat1 if name == "Addmm" else node._saved_self).detach()
        matrix = (lambda w: w[None]) if turned else (lambda w: w.T[None])
        return Use(matrix, lambda g: (of_features(x), of_features(g)))
    if place == first:  # W @ x
        x = node._saved_mat2.detach()
        matrix = (lambda w: w.T[None]) if turned else (lambda w: w[None])
        return Use(matrix, lambda g: (of_features(x.T), of_features(g.T)))
    return None


def _convolution(node: Any, weight: Tensor) -> Use:
    x, groups = node._saved_input.detach(), node._saved_groups
    windows = Windows(weight.shape[2:], node._saved_stride, node._saved_padding, node._saved_dilation, groups)
    transposed = node._saved_transposed

    def matrix(gradient: Tensor) -> Tensor:
        parts = gradient.reshape(groups, len(gradient) // groups, -1)
        return parts.mT if transposed else parts

    return Use(matrix, lambda g: of_convolution(x, g, windows, transposed=transposed))


def _scale(node: Any, place: int, weight: Tensor) -> Use | None:
    mine, its = (node._saved_self, node._saved_other) if place == 0 else (node._saved_other, node._saved_self)
    if not isinstance(its, Tensor):
        return None
    x, shape = its.detach(), weight.shape if mine is None else mine.shape

    def sides(g: Tensor) -> tuple[Rows, Rows]:
        dims = [axis - len(shape) for axis, length in enumerate(shape) if length > 1]
        return of_entries(x.expand(g.shape), dims), of_entries(g, dims)

    return Use(_single, sides)


# --- what a norm multiplies its weight with, and along which dimensions the weight lies ---


def _layer_norm(node: Any) -> tuple[Tensor, list[int]]:
    x = node._saved_input.detach()
    dims = [-1 - axis for axis in range(len(node._saved_normalized_shape))]
    return (x - node._saved_result1) * node._saved_result2, dims


def _batch_norm(node: Any) -> tuple[Tensor, list[int]]:
    x = node._saved_input.detach()
    if node._saved_training:
        mean, inverse = node._saved_result1, node._saved_result2
    else:
        mean, inverse = node._saved_running_mean, (node._saved_running_var + node._saved_eps).rsqrt()
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return (x - mean.view(shape)) * inverse.view(shape), [1]


def _group_norm(node: Any) -> tuple[Tensor, list[int]]:
    x = node._saved_input.detach()
    split = x.reshape(x.shape[0], node._saved_group, -1)
    normal = (split - node._saved_result1[..., None]) * node._saved_result2[..., None]
    return normal.view(x.shape), [1]


_NORMALISED: Mapping[str, Callable[[Any], tuple[Tensor, list[int]]]] = {
    "NativeLayerNorm": _layer_norm,
    "NativeBatchNorm": _batch_norm,
    "NativeGroupNorm": _group_norm,
}
