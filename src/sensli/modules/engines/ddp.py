"""DistributedDataParallel follows a changed module: the wrapper is rebuilt in place.

Others hold the wrapper (the user's loop, Lightning's strategy, the Trainer of Hugging Face in a local variable), so it must stay the same
object: its arguments are read off it, its hooks into autograd removed, and its constructor run again on it. The constructor compares
the shapes of the parameters over all processes and sends rank 0's weights to the others.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sensli.errors import UnsupportedModel

# What `nn.Module.__init__` would empty although it is the user's: hooks on the wrapper itself.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
# Arguments that the wrapper keeps under their own name; which of them there are depends on the version of torch.
_KEPT = (
    "device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "gradient_as_bucket_view", "static_graph",
    "skip_all_reduce_unused_params", "batched_grad_copy", "broadcast_buffers",
)  # fmt: skip


def check(wrapper: DistributedDataParallel) -> None:
    """Refuse what could not be rebuilt, before anything changes."""
    for name, what in (
        ("mixed_precision", "mixed_precision= keeps copies of the parameters. Use torch.autocast instead"),
        ("_delay_all_reduce_params", "delay_all_reduce_named_params= names parameters that a growth may rename"),
    ):
        if getattr(wrapper, name, None):
            raise UnsupportedModel(f"this DistributedDataParallel cannot follow a growth: {what}.")
    if not wrapper.require_backward_grad_sync:
        raise UnsupportedModel(
            "this DistributedDataParallel is inside no_sync(): gradients are being accumulated, and a growth would drop them. "
            "Grow after optimizer.step()."
        )


def arguments(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """The constructor's arguments, read off the wrapper."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    given = {name: getattr(wrapper, name) for name in _KEPT if name in known and hasattr(wrapper, name)}
    mesh = getattr(wrapper, "device_mesh", None)
    if mesh is not None:
        del given["process_group"]
        given["device_mesh"] = mesh
    if not getattr(wrapper, "bucket_bytes_cap_default", True):
        given["bucket_cap_mb"] = wrapper.bucket_bytes_cap / 2**20
    return given


def rebuild(wrapper: DistributedDataParallel) -> None:
    """Rebuild the wrapper around its changed module. All processes must call it together, between two steps."""
    given, module, training = arguments(wrapper), wrapper.module, wrapper.training
    hooks = {name: getattr(wrapper, name) for name in _HOOKS if hasattr(wrapper, name)}
    comm_hooks = list(getattr(wrapper, "_comm_hooks", ()))
    _let_go(wrapper, module)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # broadcast_buffers: its successor means something else at this moment
        DistributedDataParallel.__init__(wrapper, module, **given)
    for name, value in hooks.items():
        object.__setattr__(wrapper, name, value)
    wrapper.training = training
    for hook, state in comm_hooks:
        wrapper.register_comm_hook(state, hook)


def _let_go(wrapper: DistributedDataParallel, module: nn.Module) -> None:
    # A reducer that stays alive with its hooks continues to reduce, and may abort the process.
    wrapper._remove_autograd_hooks()
    for handle in getattr(wrapper, "_accum_grad_hooks", ()):
        handle.remove()
    for parameter in module.parameters():
        parameter.grad = None  # it may be a view into the buckets of the old reducer
    wrapper.reducer = wrapper.logger = None  # type: ignore[assignment]
