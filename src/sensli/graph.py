"""Reading the autograd graph behind a tensor: where its values come from, and along which dimension its channels lie.

It needs no tracing compiler and sees through hand-written forwards, because autograd records what was really computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Operations through which a value passes without changing sign: what comes out is zero or a value (or mean of values) that went in.
_KEEPS_SIGN = (
    "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "MkldnnMaxPool", "View", "UnsafeView", "Reshape",
    "Permute", "Transpose", "TBackward", "Squeeze", "Unsqueeze", "Expand", "Slice", "Select", "Clone", "Alias",
    "Contiguous", "ToCopy", "Dropout", "FeatureDropout", "ConstantPadNd", "Mean", "Flatten", "Unflatten", "UpsampleNearest",
    "UpsampleLinear", "UpsampleBilinear", "UpsampleTrilinear", "SplitWithSizes", "Split", "Cat", "AsStrided",
)  # fmt: skip

# Operations that keep every dimension where it is (elementwise, or along other dimensions than the channels).
_KEEPS_DIMS = (
    "Relu", "Gelu", "Tanh", "Sigmoid", "Silu", "Mish", "Elu", "Celu", "LeakyRelu", "Softplus", "Hardswish",
    "Hardsigmoid", "Hardtanh", "Softsign", "Prelu", "Threshold", "LogSigmoid", "Rrelu", "Softshrink", "Hardshrink",
    "Abs", "Exp", "Pow", "Sqrt", "Rsqrt", "Neg", "Add", "Sub", "Rsub", "Mul", "Div", "Where", "Clamp", "Clone",
    "ToCopy", "Contiguous", "Dropout", "FeatureDropout", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool",
    "MkldnnMaxPool", "Upsample", "ConstantPadNd", "Alias", "Slice", "Cat", "Expand", "Maximum", "Minimum", "Softmax",
    "NativeDropout", "Index", "Lerp", "Addcmul",
)  # fmt: skip

_CHANNELS_FIRST = (
    "Convolution",
    "MkldnnConvolution",
    "NativeBatchNorm",
    "CudnnBatchNorm",
    "MiopenBatchNorm",
    "NativeGroupNorm",
)
_FEATURES_LAST = (
    "Addmm",
    "Mm",
    "Linear",
    "Bmm",
    "Baddbmm",
    "NativeLayerNorm",
    "FusedRmsNorm",
    "Embedding",
    "Mv",
    "MkldnnLinear",
)


def operation(node: Any) -> str:
    """The name of a graph node without its "Backward0"."""
    return str(node.name()).split("Backward")[0].removeprefix("torch::autograd::")


def _starts(name: str, families: tuple[str, ...]) -> bool:
    return any(name.startswith(family) for family in families)


def origin(node: Any, limit: int = 64) -> Any | None:
    """The nearest node behind a tensor that decided its sign, walking back through pooling, dropout and changes of shape.

    A concatenation counts only if all its parts end in nodes of the same operation; then the first of them is returned.
    """
    for _ in range(limit):
        if node is None:
            return None
        name = operation(node)
        if not _starts(name, _KEEPS_SIGN):
            return node
        sources = [source for source, _ in node.next_functions if source is not None]
        if name.startswith("Cat"):
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
    if _starts(name, _CHANNELS_FIRST):
        return Channels(1, True) if len(shape) >= 2 else None
    if _starts(name, _FEATURES_LAST):
        return Channels(len(shape) - 1, False)
    for source, index in node.next_functions:
        if source is None or operation(source).startswith("AccumulateGrad"):
            continue
        source_shape = tuple(source._input_metadata[index].shape)
        found = channels(source, source_shape, depth - 1, seen)
        if found is None:
            continue
        dim = _through(node, name, source_shape, shape, found.dim)
        if dim is not None:
            return Channels(dim, found.first)
    return None


def _through(node: Any, name: str, before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Where dimension ``dim`` of an operation's input stands in its output."""
    if name.startswith("Permute"):
        order = [d % len(before) for d in node._saved_dims]
        return order.index(dim)
    if name.startswith("Transpose") or name == "T":
        swap = {0: 1, 1: 0} if name == "T" else _swapped(node, len(before))
        return swap.get(dim, dim)
    if len(before) == len(after) and _starts(name, _KEEPS_DIMS):
        return dim
    # views, squeezes and the like: the dimension survives where its size and what lies before or behind it agree
    for candidate in range(len(after)):
        same_size = after[candidate] == before[dim]
        if same_size and _product(after[:candidate]) == _product(before[:dim]):
            return candidate
    return None


def _swapped(node: Any, dims: int) -> dict[int, int]:
    # saved as unsigned numbers: a negative dimension comes back as 2**64 - 1
    a, b = (int(d) - 2**64 if int(d) > 2**63 else int(d) for d in (node._saved_dim0, node._saved_dim1))
    return {a % dims: b % dims, b % dims: a % dims}


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def nearest_parameters(names_by_id: Mapping[int, str], node: Any, limit: int = 512) -> list[str]:
    """Names of the parameters behind a tensor, nearest first: breadth-first through the graph."""
    names: list[str] = []
    frontier, seen = [node], {node}
    while frontier and limit > 0:
        following: list[Any] = []
        for current in frontier:
            limit -= 1
            if current is None:
                continue
            variable = getattr(current, "variable", None)
            if variable is not None and id(variable) in names_by_id:
                names.append(names_by_id[id(variable)])
            for source, _ in current.next_functions:
                if source is not None and source not in seen:
                    seen.add(source)
                    following.append(source)
        frontier = following
    return names


def leaves(node: Any) -> list[Any]:
    """All tensors that a backward pass from a node would accumulate gradients into."""
    found: list[Any] = []
    frontier, seen = [node], {node}
    while frontier:
        current = frontier.pop()
        variable = getattr(current, "variable", None)
        if variable is not None:
            found.append(variable)
        for source, _ in current.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                frontier.append(source)
    return found


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
