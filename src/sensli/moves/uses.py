"""Where a weight enters a computation, read from the autograd graph: what it is multiplied with, and where its output's cotangent arrives.

A module may hold a weight and never be called (torch's attention does so with its output map), so modules do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from sensli.moves.factors import Outer, Rows, Windows, of_channels, of_entries, of_features, of_windows, parts_of
from sensli.moves.trace.graph import operation


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
    kernel = weight.shape[2:]
    windows = Windows(kernel, node._saved_stride, node._saved_padding, node._saved_dilation, groups)
    if node._saved_transposed:  # its weight reads windows of the cotangent
        size = x.shape[2:]
        return Use(
            lambda w: w.reshape(groups, w.shape[0] // groups, -1).mT,
            lambda g: (of_channels(x, groups), of_windows(g, windows, size)),
        )
    return Use(
        lambda w: w.reshape(groups, w.shape[0] // groups, -1),
        lambda g: (of_windows(x, windows, g.shape[2:]), of_channels(g, groups)),
    )


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
