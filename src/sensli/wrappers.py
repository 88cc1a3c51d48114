"""What stands around a model: wrappers that are looked through, and those that cannot be."""

from __future__ import annotations

import torch
from torch import nn

from sensli.errors import UnsupportedModel

# By class name, because some of them live in modules that are costly to import or absent from a build of torch.
_ENGINES = {
    "DistributedDataParallel": "DistributedDataParallel does not synchronise a layer inserted behind its back",
    "DataParallel": "DataParallel copies the model at every step",
    "FullyShardedDataParallel": "FullyShardedDataParallel keeps flat parameters that a new layer is not part of",
    "FSDPModule": "fully_shard keeps a state per module that a new layer is not part of",
}


def bare(model: nn.Module) -> nn.Module:
    """The user's own module: a compiled model is looked through, an engine that would go wrong silently is refused."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected an nn.Module, got {type(model).__name__}; give the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModel(
            f"{type(model).__name__} is scripted, and a scripted module can be neither read nor changed. "
            "Grow the Python module and script it afterwards."
        )
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__module__.startswith("torch.") and base.__name__ in _ENGINES:
                raise UnsupportedModel(
                    f"the model is wrapped in {base.__name__}: {_ENGINES[base.__name__]}. "
                    "Grow the bare module (before wrapping it, or its .module on every process alike) and wrap it again."
                )
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise UnsupportedModel(
            f"{type(model).__name__} has lazy layers without parameters yet. Run one batch through it first; a growing model needs to "
            "know its shapes."
        )
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else model
