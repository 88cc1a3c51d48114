"""A step's forward and backward pass, recorded once and replayed: the same operations on the same memory, without Python's modules and
autograd's graph, which take several times as long as the products of networks this small.

Every operation of one real pass is seen below autograd. Views and constants stay as they are, since all results are written again to where
they were; what is left is called in order, with the recorded tensors. The kernels are those of an ordinary pass, so the results are, to
the bit. What is not known to be replayable (random numbers, decisions by values, changes in place, buffers, hooks) is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Loss = Callable[[Tensor, Tensor], Tensor]
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_aten = torch.ops.aten


def _relu(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out)  # which is how torch computes it


# What writes to a given result, and the names of its results. Others are computed and copied.
_WRITING: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    _aten.addmm.default: (torch.addmm, ("out",)),
    _aten.mm.default: (torch.mm, ("out",)),
    _aten.relu.default: (_relu, ("out",)),
    _aten.add.Tensor: (torch.add, ("out",)),
    _aten.sub.Tensor: (torch.sub, ("out",)),
    _aten.mul.Tensor: (torch.mul, ("out",)),
    _aten.threshold_backward.default: (_aten.threshold_backward.grad_input, ("grad_input",)),
    _aten.sum.dim_IntList: (_aten.sum.IntList_out, ("out",)),
    _aten.mse_loss_backward.default: (_aten.mse_loss_backward.grad_input, ("grad_input",)),
    _aten._log_softmax.default: (_aten._log_softmax.out, ("out",)),
    _aten._log_softmax_backward_data.default: (_aten._log_softmax_backward_data.out, ("out",)),
    _aten.nll_loss_forward.default: (_aten.nll_loss_forward.output, ("output", "total_weight")),
    _aten.nll_loss_backward.default: (_aten.nll_loss_backward.grad_input, ("grad_input",)),
}
_COPIED = {_aten.sum.default, _aten.mse_loss.default}  # with a given result the loss changes the size of that
_CONSTANT = {_aten.ones_like.default}  # the gradient of the loss by itself


class Unknown(Exception):
    """An operation that is not known to do the same again."""


class Recorded:
    """The passes of one batch through a model as it is; its values may change, its parameters and modules may not.

    Args:
        parameters: Those that have a gradient.
        gradients: Of these; written by every replay.
        loss: Of the batch; written by every replay.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        batch: tuple[Tensor, Tensor],
        parameters: list[Tensor],
        gradients: list[Tensor],
        loss: Tensor,
    ) -> None:
        self._calls, self._batch = list(calls), batch
        self.parameters, self.gradients, self.loss = parameters, gradients, loss

    @torch.no_grad()
    def replay(self, x: Tensor, y: Tensor) -> None:
        """Loss and gradients of this batch, which has the shape of the recorded one."""
        for own, given in zip(self._batch, (x, y), strict=True):
            if own is not given:
                own.copy_(given)
        for call, args, named in self._calls:
            call(*args, **named)


def recorded(model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], *, constant: bool) -> Recorded | None:
    """The passes of this batch, or None if they cannot be replayed. ``constant``: all batches are this one."""
    if any(True for _ in model.buffers()) or any(_hooked(module) for module in model.modules()):
        return None
    parameters = [one for one in model.parameters() if one.requires_grad]
    if any(one._backward_hooks for one in parameters) or batch[0].device.type != "cpu":
        return None
    x, y = batch if constant else (batch[0].clone(), batch[1].clone())
    recorder = _Recorder()
    try:
        with torch.enable_grad(), recorder:
            value = loss(model(x), y)
            found = torch.autograd.grad(value, parameters, allow_unused=True)
    except Unknown:
        return None
    known = [(one, gradient) for one, gradient in zip(parameters, found, strict=True) if gradient is not None]
    if any(one.stride() != gradient.stride() for one, gradient in known):
        return None  # an optimizer would get a copy
    return Recorded(
        recorder.calls, (x, y), [one for one, _ in known], [gradient for _, gradient in known], value.detach()
    )


class _Recorder(TorchDispatchMode):
    """Keeps every operation with its arguments and its results, without what autograd hangs on them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _CONSTANT or _is_view(func):
            return out
        if func not in _WRITING and func not in _COPIED and not _elementwise(func):
            raise Unknown(str(func))
        given, named, results = tree_map_only(Tensor, Tensor.detach, (args, kwargs, out))
        if func in _WRITING:
            call, names = _WRITING[func]
            kept = results if isinstance(results, tuple) else (results,)
            self.calls.append((call, given, {**named, **dict(zip(names, kept, strict=True))}))
        else:
            self.calls.append((_copying(func, results), given, named))
        return out


def _copying(func: Any, result: Tensor) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> None:
        result.copy_(func(*args, **named))

    return call


def _is_view(func: Any) -> bool:
    results = func._schema.returns
    return bool(results) and all(one.alias_info is not None and not one.alias_info.is_write for one in results)


def _elementwise(func: Any) -> bool:
    """A function of its arguments, entry by entry, that changes none of them."""
    tags = func.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not func._schema.is_mutable


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
