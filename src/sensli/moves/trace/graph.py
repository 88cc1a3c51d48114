"""Reading the autograd graph that led to a tensor: where its values come from, and along which dimension its channels lie.

It needs no tracing compiler and sees through hand-written forwards, because autograd records what was really computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from torch import nn

# Operations through which a value passes without changing sign: what comes out is zero or a value (or mean of values) that went in.
_KEEPS_SIGN = frozenset({
    "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "MkldnnMaxPool", "MkldnnAdaptiveAvgPool", "View", "UnsafeView",
    "ReshapeAlias", "Permute", "Transpose", "T", "Squeeze", "Unsqueeze", "Expand", "Slice", "Select", "Clone", "Alias", "ToCopy",
    "NativeDropout", "ConstantPadNd", "Mean", "UpsampleNearest", "UpsampleNearestExact", "UpsampleLinear", "UpsampleBilinear",
    "UpsampleTrilinear", "SplitWithSizes", "Split", "Cat", "AsStrided", "Unbind",
})  # fmt: skip

# Operations that keep every dimension where it is (elementwise, or along other dimensions than the channels).
_KEEPS_DIMS = frozenset({
    "Relu", "Gelu", "Tanh", "Sigmoid", "Silu", "Mish", "Elu", "Celu", "LeakyRelu", "Softplus", "Hardswish", "Hardsigmoid", "Hardtanh",
    "Softsign", "PreluKernel", "Threshold", "LogSigmoid", "RreluWithNoise", "Softshrink", "Hardshrink", "Abs", "Exp", "Pow", "Sqrt",
    "Rsqrt", "Neg", "Add", "Sub", "Rsub", "Mul", "Div", "Where", "Clamp", "ClampMin", "ClampMax", "Clone", "ToCopy", "NativeDropout",
    "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "MkldnnMaxPool", "MkldnnAdaptiveAvgPool", "UpsampleNearest",
    "UpsampleNearestExact", "UpsampleLinear", "UpsampleBilinear", "UpsampleTrilinear", "UpsampleBicubic", "ConstantPadNd",
    "ReflectionPad", "ReplicationPad", "Alias", "Slice", "Cat", "Expand", "Maximum", "Minimum", "Softmax", "LogSoftmax", "Index", "Lerp",
    "Addcmul", "Sin", "Cos", "Erf", "Reciprocal", "MaskedFill",
})  # fmt: skip

_CHANNELS_FIRST = frozenset({
    "Convolution", "MkldnnConvolution", "CudnnConvolution", "MiopenConvolution", "SlowConv", "NativeBatchNorm", "CudnnBatchNorm",
    "MiopenBatchNorm", "NativeGroupNorm",
})  # fmt: skip
_FEATURES_LAST = frozenset(
    {"Linear", "NativeLayerNorm", "FusedRmsNorm", "Embedding", "EmbeddingBag", "MkldnnLinear", "Mv"}
)
_LOOKUPS = frozenset({"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take"})
_PRODUCTS = frozenset({"Addmm", "Mm", "Bmm", "Baddbmm"})  # of two matrices, either of which may be a weight

# The name of a node without the number of dimensions: MaxPool2DWithIndices is a MaxPool. Never by a prefix: SliceScatter is not a Slice.
_NAME = re.compile(r"([A-Za-z]+?)(?:[123]D)?(?:WithIndices)?")


def operation(node: Any) -> str:
    """The name of a graph node without its "Backward0"."""
    name = str(node.name()).split("Backward")[0].removeprefix("torch::autograd::")
    plain = _NAME.fullmatch(name)
    return plain.group(1) if plain else name


def origin(node: Any, limit: int = 64) -> Any | None:
    """The nearest node before a tensor that decided its sign, walking back through pooling, dropout and changes of shape.

    A concatenation counts only if all its parts end in nodes of the same operation; then the first of them is returned.
    """
    for _ in range(limit):
        if node is None:
            return None
        name = operation(node)
        if name not in _KEEPS_SIGN:
            return node
        sources = [source for source, _ in node.next_functions if source is not None]
        if name == "Cat":
            ends = [origin(source, limit) for source in sources]
            if not ends or len(sources) != len(node.next_functions) or any(end is None for end in ends):
                return None
            return ends[0] if len({operation(end) for end in ends}) == 1 else None
        node = sources[0] if sources else None
    return None


@dataclass(frozen=True)
class Channels:
    """Where the channels of a tensor lie, and the parameter that made them."""

    dim: int
    first: bool  # made by a convolution or batch norm (channels first), otherwise by a linear map (features last)


def channels(
    node: Any, shape: tuple[int, ...], depth: int = 128, seen: dict[Any, Channels | None] | None = None
) -> Channels | None:
    """Along which dimension the channels of a tensor lie: walk back to the layer that made them, mapping dimensions on the way."""
    if node is None or depth == 0:
        return None
    seen = {} if seen is None else seen  # every skip connection doubles the paths, but not the nodes
    if (node, shape) not in seen:
        seen[node, shape] = None
        seen[node, shape] = _channels(node, shape, depth, seen)
    return seen[node, shape]


def _channels(node: Any, shape: tuple[int, ...], depth: int, seen: dict[Any, Channels | None]) -> Channels | None:
    name = operation(node)
    if name in _CHANNELS_FIRST:
        return Channels(1, True) if len(shape) >= 2 else None
    if name in _FEATURES_LAST:
        return Channels(len(shape) - 1, False)
    if name in _PRODUCTS:
        return _of_product(node, shape, depth, seen)
    for source, index in node.next_functions:
        if source is None or operation(source) == "AccumulateGrad":
            continue
        source_shape = tuple(source._input_metadata[index].shape)
        found = channels(source, source_shape, depth - 1, seen)
        if found is None:
            continue
        dim = _through(node, name, source_shape, shape, found.dim)
        if dim is not None:
            return Channels(dim, found.first)
    return None


def _of_product(node: Any, shape: tuple[int, ...], depth: int, seen: dict[Any, Channels | None]) -> Channels | None:
    """Where the channels of a product of two matrices lie: along the side of the weight, or of that factor whose channels are left.

    A product of activations alone may have none: the scores of attention are as long as the sequence in both directions.
    """
    (left, at), (right, place) = node.next_functions[-2:]
    last = len(shape) - 1
    if right is not None and is_weight(right):
        return Channels(last, False)
    if left is not None and is_weight(left):
        return Channels(last - 1, last == 2)
    if right is None or left is None:  # one of them is not differentiated, and nothing is known of it
        return None
    found = channels(right, tuple(right._input_metadata[place].shape), depth - 1, seen)
    if found is not None and found.dim == last:
        return found
    found = channels(left, tuple(left._input_metadata[at].shape), depth - 1, seen)
    return found if found is not None and found.dim == last - 1 else None


def is_score(node: Any, shape: tuple[int, ...]) -> bool:
    """Whether a matrix is a product of activations whose columns are not features, such as the scores of attention."""
    while node is not None and operation(node) in _KEEPS_DIMS:
        node = next((source for source, _ in node.next_functions if source is not None), None)
    return node is not None and operation(node) in _PRODUCTS and channels(node, shape) is None


def is_weight(node: Any, limit: int = 64) -> bool:
    """Whether a value is made of parameters alone, so that it is a weight and not an activation."""
    for current in chain.from_iterable(_levels([node])):
        limit -= 1
        name = operation(current)
        variable = getattr(current, "variable", None)
        # The data may take part without being differentiated: as numbers of rows, or as a factor.
        undifferentiated = any(source is None for source, _ in current.next_functions)
        hidden = name in _LOOKUPS or (undifferentiated and name in _PRODUCTS | _CHANNELS_FIRST | _FEATURES_LAST)
        if limit < 0 or hidden or not (variable is None or isinstance(variable, nn.Parameter)):
            return False
    return True


def _through(node: Any, name: str, before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Which dimension of its output dimension ``dim`` of an operation's input becomes."""
    if name == "Permute":
        order = [d % len(before) for d in node._saved_dims]
        return order.index(dim)
    if name in ("Transpose", "T"):
        swap = {0: 1, 1: 0} if name == "T" else _swapped(node, len(before))
        return swap.get(dim, dim)
    if len(before) == len(after) and name in _KEEPS_DIMS:
        return dim
    # views, squeezes and the like: the dimension survives where its size and what lies before or after it agree
    for candidate in range(len(after)):
        same_size = after[candidate] == before[dim]
        if same_size and prod(after[:candidate]) == prod(before[:dim]):
            return candidate
    return None


def _swapped(node: Any, dims: int) -> dict[int, int]:
    # saved as unsigned numbers: a negative dimension comes back as 2**64 - 1
    a, b = (int(d) - 2**64 if int(d) > 2**63 else int(d) for d in (node._saved_dim0, node._saved_dim1))
    return {a % dims: b % dims, b % dims: a % dims}


def _levels(nodes: Iterable[Any]) -> Iterator[list[Any]]:
    """The given nodes, then those that they were computed from, and so on: all that lead to them, each once."""
    level = [node for node in nodes if node is not None]
    seen = set(level)
    while level:
        yield level
        following: list[Any] = []
        for node in level:
            for source, _ in node.next_functions:
                if source is not None and source not in seen:
                    seen.add(source)
                    following.append(source)
        level = following


def nearest_parameters(names_by_id: Mapping[int, str], node: Any, limit: int = 512) -> Iterator[str]:
    """Names of the parameters that led to a tensor, nearest first."""
    for level in _levels([node]):
        for current in level:
            variable = getattr(current, "variable", None)
            if variable is not None and id(variable) in names_by_id:
                yield names_by_id[id(variable)]
        limit -= len(level)
        if limit <= 0:
            return


def leaves(node: Any) -> list[Any]:
    """All tensors that a backward pass from a node would accumulate gradients into."""
    variables = (getattr(current, "variable", None) for current in chain.from_iterable(_levels([node])))
    return [variable for variable in variables if variable is not None]


def all_before(nodes: Iterable[Any]) -> set[Any]:
    """All graph nodes that the given ones depend on, themselves included."""
    return set(chain.from_iterable(_levels(nodes)))


def reaches(node: Any, target: Any, through: frozenset[str], needed: str, limit: int = 512) -> bool:
    """Whether a path leads back from a node to a target node along the named operations only, and along the needed one at least once."""
    frontier, seen = [(node, False)], set()
    while frontier and limit > 0:
        limit -= 1
        current, met = frontier.pop()
        if current is target and met:
            return True
        if current is None or (current, met) in seen or operation(current) not in through:
            continue
        seen.add((current, met))
        met = met or operation(current) == needed
        frontier.extend((source, met) for source, _ in current.next_functions)
    return False
