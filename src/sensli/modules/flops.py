"""Floating-point operations of one forward pass: two for each multiply-add of a matrix product or a convolution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sensli.errors import BadExample, UnsupportedModel
from sensli.modules import checks
from sensli.modules.running import describe, device_of, let_memory_through, run, tensors, to_device, untouched
from sensli.modules.wrappers import run_eagerly


class Flops(int):
    """A number of floating-point operations, which also knows what it could not count.

    unknown: name of an operation with floating-point work that there is no rule for -> how often it ran.
    """

    unknown: dict[str, int]

    def __new__(cls, value: int, unknown: Mapping[str, int] | None = None) -> Flops:
        flops = super().__new__(cls, value)
        flops.unknown = dict(unknown or {})
        return flops

    def explain(self) -> str:
        """The count in words, with the operations that are missing from it."""
        text = f"{int(self):,} floating-point operations per sample"
        if not self.unknown:
            return f"{text}; every operation was known."
        names = ", ".join(f"{name} ({times} x)" for name, times in sorted(self.unknown.items()))
        return f"{text}, not counting operations without a rule: {names}."

    def __repr__(self) -> str:
        return f"Flops({int(self)}, unknown={self.unknown})" if self.unknown else f"Flops({int(self)})"

    def __str__(self) -> str:
        return int.__repr__(self)


Example = Tensor | tuple[Any, ...] | dict[str, Any]


def count_flops(model: nn.Module, example: Example, *, elementwise: bool = False) -> Flops:
    """Count the floating-point operations of one forward pass of the example, per sample.

    Every multiply-add of a matrix product or a convolution counts as two operations; views and copies are free. The model
    runs in eval mode and is left as it was.

    Args:
        model: The network.
        example: A tensor, a tuple of arguments or a dict of keyword arguments. The leading dimension of its first tensor is the
            number of samples.
        elementwise: Whether to count also one operation for each element of a bias, an activation or another elementwise
            result, and for each input element of a pooling, reduction or normalisation (default: False).

    Returns:
        The number of operations, an int that also knows which operations it could not count (``explain()``).

    Raises:
        BadExample: If the example does not run through the model.
        UnsupportedModel: If the model has lazy layers that have not run yet.
    """
    checks.model("model", model)
    samples = _samples(checks.example("example", example))
    checks.flag("elementwise", elementwise)
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise UnsupportedModel(
            f"cannot count {type(model).__name__}: it has lazy layers, whose shapes the first run would fix. "
            "Run the model once yourself, then count."
        )
    counter = FlopCounter(elementwise=elementwise)
    with unchanged(model), torch.no_grad():
        try:
            with run_eagerly(), counter:  # a compiler would run into the counter and give the model up
                run(model, to_device(example, device_of(model)))
        except Exception as error:
            let_memory_through(error)
            raise BadExample(
                f"the example does not run through {type(model).__name__}. Example: {describe(example)}. "
                f"{type(error).__name__}: {error}"
            ) from error
    return Flops(round(counter.total / samples), counter.unknown)


def _samples(example: Example) -> int:
    for tensor in tensors(example):
        if tensor.dim() and not tensor.shape[0]:
            raise BadExample(f"the example contains no sample: its first tensor has the shape {tuple(tensor.shape)}.")
        return tensor.shape[0] if tensor.dim() else 1
    raise BadExample(
        f"the example contains no tensor: {describe(example)}. Give a tensor, a tuple of arguments or a dict of them."
    )


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module's mode, every buffer and the random state are what they were.

    The modes are set one by one: a model's own train() may do more than set them.
    """
    modes = [(module, module.training) for module in model.modules()]
    fastpath = torch.backends.mha.get_fastpath_enabled()  # one opaque operation for a whole transformer layer
    with untouched(model):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            for module, _ in modes:
                module.training = False
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            for module, mode in modes:
                module.training = mode


# ---- what one operation costs -----------------------------------------------------------------------------------------


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    # query: ... x q x d, key: ... x k x d, value: ... x k x e: the scores, then their products with the values
    return int(2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _lstm(data: Any, from_input: Any, from_state: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    # data: steps x samples x features; each step multiplies by both weight matrices
    return int(2 * data.shape[0] * data.shape[1] * (from_input.numel() + from_state.numel()))


Rule = Callable[..., int]  # takes the arguments of the operation, and its result as out_val
# Products that torch's own registry of formulas does not have.
PRODUCTS: dict[str, Rule] = {
    "mv": lambda matrix, vector, out_val: 2 * matrix.numel(),
    "addmv": lambda bias, matrix, vector, out_val, **scale: 2 * matrix.numel(),
    "dot": lambda one, other, out_val: 2 * one.numel(),
    "vdot": lambda one, other, out_val: 2 * one.numel(),
    "addbmm": lambda bias, one, other, out_val, **scale: 2 * one.numel() * other.shape[-1],
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "mkldnn_rnn_layer": _lstm,
}
# As in torch's registry, which takes longer to say it than a small product takes to run.
_PLAIN: dict[str, Rule] = {
    "mm": lambda one, other, out_val: 2 * out_val.numel() * one.shape[-1],
    "bmm": lambda one, other, out_val: 2 * out_val.numel() * one.shape[-1],
    "addmm": lambda bias, one, other, out_val, **scale: 2 * out_val.numel() * one.shape[-1],
    "baddbmm": lambda bias, one, other, out_val, **scale: 2 * out_val.numel() * one.shape[-1],
}
# Products that add a bias, and the position of that argument.
_BIASED = {"addmm": 0, "baddbmm": 0, "addmv": 0, "addbmm": 0, "convolution": 2}

# Reductions, and what is elementwise in effect although torch does not tag it so: one for each input element.
_PER_INPUT = frozenset(
    """
    mean sum prod amax amin aminmax max min var std var_mean std_mean norm linalg_vector_norm logsumexp nansum cumsum cumprod
    logcumsumexp _softmax _log_softmax _safe_softmax glu _prelu_kernel addr native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm native_layer_norm native_group_norm
    _fused_rms_norm max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d mkldnn_max_pool3d avg_pool2d avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d
    fractional_max_pool3d scatter_add scatter_reduce index_add index_reduce col2im
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa allclose
    mse_loss mse_loss_backward
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward _softmax_backward_data _log_softmax_backward_data
    native_batch_norm_backward native_layer_norm_backward native_group_norm_backward max_pool2d_with_indices_backward
    avg_pool2d_backward _adaptive_avg_pool2d_backward embedding_dense_backward
    """.split()  # noqa: SIM905 (a table of names)
)

# Moves, repeats, looks up or orders numbers, but computes none. Views and random numbers are recognised by their schema.
_FREE = frozenset(
    """
    clone copy _to_copy lift_fresh lift_fresh_copy detach _unsafe_view unsafe_split unsafe_split_with_sizes cat stack repeat
    repeat_interleave roll flip constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d im2col pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d triu tril diag_embed index _unsafe_index
    index_select index_put _index_put_impl gather scatter take masked_select masked_scatter embedding sort topk kthvalue
    argsort argmax argmin searchsorted bucketize nonzero empty_like new_empty new_empty_strided zeros_like new_zeros
    ones_like new_ones full_like new_full fill zero resize set equal _local_scalar_dense any all is_nonzero _assert_async
    slice_scatter select_scatter diagonal_scatter _pack_padded_sequence _pad_packed_sequence to_padded_tensor
    """.split()  # noqa: SIM905 (a table of names)
)


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of everything that runs inside, backward passes included."""

    supports_higher_order_operators = True
    products: ClassVar[Mapping[str, Rule]] = PRODUCTS

    def __init__(self, *, elementwise: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elementwise = elementwise
        self.total = 0
        self.unknown: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = _known(type(self), func)  # type: ignore[arg-type]  # a class is hashable
        if op.composite and op.rule is None:
            with self:  # under inference_mode composite operations arrive whole
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if op.rule is not None:
            self.total += op.rule(*args, **kwargs, out_val=out)
            if self.elementwise and op.bias is not None and args[op.bias] is not None:
                self.total += _size(out)
        elif op.group == "free" or (op.group != "other" and not self.elementwise):
            pass
        elif not op.overload:
            self.unknown[op.name] += 1
        elif any(each.is_floating_point() or each.is_complex() for each in tensors((args, kwargs))):
            # What gets only integers computes no floating-point numbers.
            if op.group == "other":
                self.unknown[op.name] += 1
            else:
                self.total += _size(out if op.group == "per output" else args[0])
        return out


class _Op(NamedTuple):
    """What is known of an operation before it runs."""

    name: str
    rule: Rule | None
    bias: int | None  # the position of the argument that the rule does not count
    composite: bool  # made of others
    overload: bool  # the others, such as flex_attention, take functions as arguments
    group: str  # "free", one operation "per output" or "per input" element, or "other"


@cache  # asked for every operation of a count; there are a few hundred of them
def _known(counter: Any, func: Any) -> _Op:
    """Of a class of counters, which have rules of different operations."""
    if not isinstance(func, torch._ops.OpOverload):
        return _Op(str(func), flop_registry.get(func), None, False, False, "other")
    name = func._schema.name.removeprefix("aten::")
    plain = name.removesuffix("_")  # in place (addmm_, relu_) or not, it is the same operation
    packet = getattr(torch.ops.aten, plain, func.overloadpacket)
    rule = _PLAIN.get(name) or flop_registry.get(packet) or counter.products.get(plain)
    if _never_computes(func, plain):
        group = "free"
    elif torch.Tag.pointwise in func.tags:
        group = "per output"
    else:
        group = "per input" if plain in _PER_INPUT else "other"
    return _Op(name, rule, _BIASED.get(name), func._can_decompose(), True, group)


def _never_computes(func: torch._ops.OpOverload, name: str) -> bool:
    """Whatever goes in: it is free, random, or a view of an argument."""
    if name in _FREE or torch.Tag.nondeterministic_seeded in func.tags:
        return True
    results = func._schema.returns
    if results and all(each.alias_info is not None and not each.alias_info.is_write for each in results):
        return True
    return torch.Tag.inplace_view in func.tags


def _size(value: object) -> int:
    """Elements of the first tensor; the others are statistics or indices."""
    return next((tensor.numel() for tensor in tensors(value)), 0)
